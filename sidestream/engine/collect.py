"""Rows of a processed step, handed to the requests they belong to: out of the arena into buffers of their own."""

from __future__ import annotations

from typing import NamedTuple

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
    copied_bytes: dict[int, dict[str, int]]  # by kind, without the token


def collect_rows(batch: Batch, result: GenerationBatchResult) -> StepRows | None:
    """Called when `copy_done` is complete and before the arena block is used again. None when the batch returns only tokens."""
    layout = batch.outputs
    if not (batch.return_logprob or layout.taps):
        return None
    out = StepRows({}, {}, {})
    for name, block, slices in (
        ("input_logprobs", result.logits_output.input_token_logprobs, layout.input_slices),
        ("output_logprobs", result.logits_output.next_token_logprobs, layout.next_slices),
    ):
        if block is None:
            continue
        arrays = LogprobBlock(*(None if part is None else host_array(part) for part in block))
        for part in slices:
            rows = _logprob_rows(arrays, part)
            _add(out, part.span, name, rows, "logprob", sum(a.nbytes for a in rows[1:] if a is not None))  # type: ignore[union-attr]
    if result.logits_output.hidden_states is not None:
        for piece in layout.hidden_slices:
            host = result.logits_output.hidden_states[piece.group][piece.rows]
            _add(out, piece.span, "hidden", hidden_rows(host, piece.position), "hidden", host.nbytes)
    for piece in layout.kept_slices:
        kept = KeptRow(result, result.kept_hidden_states[piece.group], piece.rows.start, piece.position)
        out.kept[piece.span] = kept
    return out


def _add(out: StepRows, span: int, name: str, rows: LogprobRows | HiddenRows, kind: str, size: int) -> None:
    out.rows[span] = out.rows.get(span, Rows())._replace(**{name: rows})
    sizes = out.copied_bytes.setdefault(span, {"logprob": 0, "hidden": 0})
    sizes[kind] += size


def _logprob_rows(block: LogprobBlock, part: LogprobSlice) -> LogprobRows:
    n = part.rows.stop - part.rows.start

    def cut(values: npt.NDArray[np.generic] | None, where: slice) -> npt.NDArray[np.generic] | None:
        return None if values is None or where.start == where.stop else values[where].reshape(n, -1).copy()

    return LogprobRows(
        part.position,
        block.chosen[part.rows].copy(),
        cut(block.top_values, part.top),  # type: ignore[arg-type]
        cut(block.top_ids, part.top),  # type: ignore[arg-type]
        cut(block.id_values, part.ids),  # type: ignore[arg-type]
    )


def hidden_rows(host: Tensor, position: int) -> HiddenRows:
    """Copy rows [rows, layers, hidden] of host memory into a buffer of their own. Byte by byte: numpy has no bfloat16."""
    data = host_array(host.view(torch.uint8)).reshape(-1).copy()
    return HiddenRows(position, str(host.dtype).removeprefix("torch."), (host.shape[0], host.shape[1], host.shape[2]), data)
