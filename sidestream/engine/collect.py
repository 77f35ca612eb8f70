"""Rows of a processed step, handed to the requests they belong to: out of the arena into buffers of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sidestream.engine.batch import Batch
from sidestream.engine.copies import GenerationBatchResult, host_array
from sidestream.engine.outputs import LogprobBlock, LogprobSlice
from sidestream.engine.request import KeptRow
from sidestream.messages import HiddenRows, LogprobRows, Rows


class StepRows(NamedTuple):
    """By span of the batch."""

    rows: dict[int, Rows]
    kept: dict[int, KeptRow]


def collect_rows(batch: Batch, result: GenerationBatchResult) -> StepRows | None:
    """Called when `copy_done` is complete and before the arena block is used again. None when the batch returns only tokens."""
    layout, output = batch.outputs, result.logits_output
    if not (batch.return_logprob or layout.taps):
        return None
    prompts = _logprob_rows(output.input_token_logprobs, layout.input_slices)
    tokens = _logprob_rows(output.next_token_logprobs, layout.next_slices)
    hidden: dict[int, HiddenRows] = {}
    if output.hidden_states is not None:
        for piece in layout.hidden_slices:
            hidden[piece.span] = hidden_rows(output.hidden_states[piece.group][piece.rows], piece.position)
    kept = {
        piece.span: KeptRow(result, result.kept_hidden_states[piece.group], piece.rows.start, piece.position)
        for piece in layout.kept_slices
    }
    for span in batch.appended.keys() & prompts.keys():  # output tokens that were not sampled: their rows are scored like the prompt's
        tokens[span] = _joined(prompts.pop(span), tokens.get(span))
    spans = prompts.keys() | tokens.keys() | hidden.keys()
    return StepRows({span: Rows(prompts.get(span), tokens.get(span), hidden.get(span)) for span in spans}, kept)


def _logprob_rows(block: LogprobBlock | None, slices: Sequence[LogprobSlice]) -> dict[int, LogprobRows]:
    if block is None:
        return {}
    chosen, top_values, top_ids, id_values = (None if part is None else host_array(part) for part in block)
    assert chosen is not None
    return {
        span: LogprobRows(
            position,
            chosen[row : row + n].copy(),
            _cut(top_values, top, n, k),
            _cut(top_ids, top, n, k),
            _cut(id_values, id_start, n, ids),
        )
        for span, position, n, k, ids, row, top, id_start in slices
    }


def _joined(first: LogprobRows, second: LogprobRows | None) -> LogprobRows:
    """Rows of consecutive tokens in one block."""
    if second is None:
        return first
    parts = (None if a is None or b is None else np.concatenate([a, b]) for a, b in zip(first[1:], second[1:], strict=True))
    return LogprobRows(first.position, *parts)  # type: ignore[arg-type]


def _cut(values: npt.NDArray[Any] | None, start: int, n: int, width: int) -> npt.NDArray[Any] | None:
    return values[start : start + n * width].reshape(n, width).copy() if values is not None and width else None


def hidden_rows(host: Tensor, position: int) -> HiddenRows:
    """Copy rows [rows, layers, hidden] of host memory into a buffer of their own. Byte by byte: numpy has no bfloat16."""
    data = host_array(host.view(torch.uint8)).reshape(-1).copy()
    return HiddenRows(position, str(host.dtype).removeprefix("torch."), (host.shape[0], host.shape[1], host.shape[2]), data)
