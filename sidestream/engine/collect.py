"""Rows of a processed step, handed to the requests they belong to: out of the arena into buffers of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

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

    def add(self, span: int, rows: Rows, kind: str, size: int) -> None:
        self.rows[span] = rows
        self.copied_bytes.setdefault(span, {"logprob": 0, "hidden": 0})[kind] += size


def collect_rows(batch: Batch, result: GenerationBatchResult) -> StepRows | None:
    """Called when `copy_done` is complete and before the arena block is used again. None when the batch returns only tokens."""
    layout = batch.outputs
    if not (batch.return_logprob or layout.taps):
        return None
    out = StepRows({}, {}, {})
    for part, rows in _logprob_parts(result.logits_output.input_token_logprobs, layout.input_slices):
        out.add(part.span, out.rows.get(part.span, Rows())._replace(input_logprobs=rows), "logprob", _nbytes(rows))
    for part, rows in _logprob_parts(result.logits_output.next_token_logprobs, layout.next_slices):
        out.add(part.span, out.rows.get(part.span, Rows())._replace(output_logprobs=rows), "logprob", _nbytes(rows))
    if result.logits_output.hidden_states is not None:
        for piece in layout.hidden_slices:
            host = result.logits_output.hidden_states[piece.group][piece.rows]
            hidden = hidden_rows(host, piece.position)
            out.add(piece.span, out.rows.get(piece.span, Rows())._replace(hidden=hidden), "hidden", host.nbytes)
    for piece in layout.kept_slices:
        kept = KeptRow(result, result.kept_hidden_states[piece.group], piece.rows.start, piece.position)
        out.kept[piece.span] = kept
    return out


def _logprob_parts(block: LogprobBlock | None, slices: Sequence[LogprobSlice]) -> Iterator[tuple[LogprobSlice, LogprobRows]]:
    if block is not None:
        arrays = LogprobBlock(*(None if part is None else host_array(part) for part in block))
        for part in slices:
            yield part, _logprob_rows(arrays, part)


def _nbytes(rows: LogprobRows) -> int:
    return sum(part.nbytes for part in (rows.chosen, rows.top_values, rows.top_ids, rows.id_values) if part is not None)


def _logprob_rows(block: LogprobBlock, part: LogprobSlice) -> LogprobRows:
    n = part.rows.stop - part.rows.start

    def cut(values: npt.NDArray[Any] | None, where: slice) -> npt.NDArray[Any] | None:
        return None if values is None or where.start == where.stop else values[where].reshape(n, -1).copy()

    return LogprobRows(
        part.position,
        block.chosen[part.rows].copy(),
        cut(block.top_values, part.top),
        cut(block.top_ids, part.top),
        cut(block.id_values, part.ids),
    )


def hidden_rows(host: Tensor, position: int) -> HiddenRows:
    """Copy rows [rows, layers, hidden] of host memory into a buffer of their own. Byte by byte: numpy has no bfloat16."""
    data = host_array(host.view(torch.uint8)).reshape(-1).copy()
    return HiddenRows(position, str(host.dtype).removeprefix("torch."), (host.shape[0], host.shape[1], host.shape[2]), data)
