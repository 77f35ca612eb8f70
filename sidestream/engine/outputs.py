"""What a batch returns besides its tokens: from the output plans of its requests to rows that exist on the device in this step.

`plan_outputs` runs on the host when the batch is planned. It says which rows of the step each request gets, packed without gaps, so that
the device gathers exactly those rows and the copy moves nothing else. Nothing here is built for a batch in which nobody asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sidestream.engine.request import Feature, Request, RowBytes
from sidestream.params import OutputPlan

Ints = npt.NDArray[np.int64]

LOGITS_PIECE_BYTES = 64 << 20  # float32 logits of prompt rows alive at once


class LogprobBlock(NamedTuple):
    """Logprobs of `rows` rows, packed. A field is None when no row asked for it."""

    chosen: Any  # [rows] float32
    top_values: Any = None  # [sum of k] float32, row after row, best first
    top_ids: Any = None  # [sum of k] int32
    id_values: Any = None  # [sum of asked ids] float32


class LogitsProcessorOutput(NamedTuple):
    """Tensors of one step; each is None when nobody in the batch asked. On the device until `copy_to_cpu`, on the host after it."""

    next_token_logprobs: LogprobBlock | None = None
    input_token_logprobs: LogprobBlock | None = None
    hidden_states: tuple[Any, ...] | None = None  # one [rows, layers, hidden] for each distinct (layers, dtype)


@dataclass(frozen=True)
class TapGroup:
    """Hidden rows with the same layers and dtype: `rows` of the step's tokens -> packed [len(rows), len(layers), hidden]."""

    rows: Ints
    layers: tuple[int, ...]
    dtype: str  # "model" is the compute type


@dataclass(frozen=True)
class TapPlan:
    """The rows and layers a forward has to keep: `copied` leave the device in this step, `kept` stay on it for one step ("last")."""

    copied: tuple[TapGroup, ...] = ()
    kept: tuple[TapGroup, ...] = ()

    def layers(self) -> frozenset[int]:
        return frozenset(layer for group in self.copied + self.kept for layer in group.layers)


@dataclass(frozen=True)
class ScorePlan:
    """Rows whose logprobs are wanted, in the order of the packed block."""

    rows: Ints  # [n] rows of the logits (or of the step's tokens, for input logprobs)
    targets: Ints | None  # [n] chosen ids where the host knows them (prompt tokens)
    processed: npt.NDArray[np.bool_] | None  # [n] rows scored on the processed distribution
    k: int  # largest number of alternatives
    top_index: Ints  # [sum of k] into a flattened [n, k]
    id_rows: Ints  # [ids]
    id_columns: Ints  # [ids]

    def piece(self, start: int, stop: int) -> ScorePlan:
        """The plan of rows start..stop alone."""
        inside = (self.top_index >= start * self.k) & (self.top_index < stop * self.k)
        ids = (self.id_rows >= start) & (self.id_rows < stop)
        return ScorePlan(
            self.rows[start:stop],
            None if self.targets is None else self.targets[start:stop],
            None if self.processed is None else self.processed[start:stop],
            self.k if inside.any() else 0,
            self.top_index[inside] - start * self.k,
            self.id_rows[ids] - start,
            self.id_columns[ids],
        )


class LogprobSlice(NamedTuple):
    """Where one request's rows are in a packed block: its first row, value of the best and value of the ids asked for."""

    span: int
    position: int  # absolute position of the token the first row scores
    n: int  # rows
    k: int  # alternatives of each
    ids: int  # asked ids of each
    row: int
    top: int
    id: int


class HiddenSlice(NamedTuple):
    span: int
    group: int
    rows: slice
    position: int


@dataclass(frozen=True)
class OutputLayout:
    """All that a batch returns besides tokens, and which part belongs to which of its spans."""

    taps: TapPlan | None = None
    next_token: ScorePlan | None = None
    input_token: ScorePlan | None = None
    next_slices: tuple[LogprobSlice, ...] = ()
    input_slices: tuple[LogprobSlice, ...] = ()
    hidden_slices: tuple[HiddenSlice, ...] = ()
    kept_slices: tuple[HiddenSlice, ...] = ()


NOTHING = OutputLayout()


class _Score:
    """Collects logprob rows of a batch: `n` consecutive rows from `row` for a span. Arithmetic on arrays: a step has hundreds of spans."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int, int, int]] = []  # span, position, row, n
        self.plans: list[OutputPlan] = []
        self.targets: list[Ints] = []

    def add(self, span: int, plan: OutputPlan, row: int, n: int, position: int) -> None:
        self.spans.append((span, position, row, n))
        self.plans.append(plan)

    def plan(self) -> tuple[ScorePlan | None, tuple[LogprobSlice, ...]]:
        if not self.spans:
            return None, ()
        span, position, first, n = np.array(self.spans, np.int64).T  # [spans] each
        k = np.array([plan.top_logprobs_num for plan in self.plans], np.int64)
        ids = np.array([len(plan.token_ids_logprob) for plan in self.plans], np.int64)
        row, top, id_start = (np.cumsum(size) - size for size in (n, n * k, n * ids))
        packed = np.arange(n.sum())
        largest = int(k.max())
        processed = None
        if not self.targets and any(plan.logprobs_mode == "processed" for plan in self.plans):  # input logprobs are always raw
            processed = np.repeat([plan.logprobs_mode == "processed" for plan in self.plans], n)
        columns = [token for plan, rows in zip(self.plans, n.tolist(), strict=True) for token in plan.token_ids_logprob * rows]
        score = ScorePlan(
            packed + np.repeat(first - row, n),
            np.concatenate(self.targets) if self.targets else None,
            processed,
            largest,
            np.flatnonzero(np.arange(largest) < np.repeat(k, n)[:, None]),
            np.repeat(packed, np.repeat(ids, n)),
            np.array(columns, np.int64),
        )
        fields = (part.tolist() for part in (span, position, n, k, ids, row, top, id_start))
        return score, tuple(map(LogprobSlice._make, zip(*fields, strict=True)))


class _Group:
    """Rows with the same layers and dtype, as runs of consecutive ones."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.size = 0
        self.first: list[int] = []
        self.ends: list[int] = []  # of the runs, in the packed rows

    def rows(self) -> Ints:
        starts = np.array([0, *self.ends[:-1]], np.int64)
        return np.arange(self.size) + np.repeat(np.array(self.first, np.int64) - starts, np.array(self.ends, np.int64) - starts)


class _Taps:
    """Collects hidden rows of a batch: `n` consecutive rows from `row` for a span, grouped by (layers, dtype)."""

    def __init__(self) -> None:
        self.groups: dict[tuple[tuple[int, ...], str], _Group] = {}
        self.slices: list[HiddenSlice] = []

    def add(self, span: int, plan: OutputPlan, row: int, n: int, position: int) -> None:
        key = (plan.layers, plan.hidden_states_dtype)
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = _Group(len(self.groups))
        start = group.size
        group.size += n
        group.first.append(row)
        group.ends.append(group.size)
        self.slices.append(HiddenSlice(span, group.number, slice(start, group.size), position))

    def plan(self) -> tuple[TapGroup, ...]:
        return tuple(TapGroup(group.rows(), layers, dtype) for (layers, dtype), group in self.groups.items())


def plan_outputs(
    requests: Sequence[Request], starts: Sequence[int], lengths: Sequence[int], samples: Sequence[bool], features: int
) -> OutputLayout:
    """Lay out the outputs of the spans `starts[i] .. starts[i]+lengths[i]`, and move each request's marks past the rows planned here.

    Called before the requests' counters advance to the end of their spans.
    """
    if not features & (Feature.LOGPROB | Feature.HIDDEN):
        return NOTHING
    next_token, input_token, copied, kept = _Score(), _Score(), _Taps(), _Taps()
    offset = sample_row = 0
    for span, (request, start, length, sample) in enumerate(zip(requests, starts, lengths, samples, strict=True)):
        plan = request.plan
        end = start + length
        if plan.return_hidden_states:
            _plan_hidden(request, span, start, end, offset, sample, copied, kept)
        if plan.return_logprob:
            first, last = max(start, request.logprob_next), min(end, request.prompt_len - 1)
            if first < last:
                input_token.add(span, plan, offset + first - start, last - first, first + 1)
                input_token.targets.append(request.prompt[first + 1 : last + 1].astype(np.int64))
                request.logprob_next = last
            appended = returned_unsampled(request, end, sample)
            if appended:
                first = request.output_next
                input_token.add(span, plan, offset + first - 1 - start, appended, first)
                input_token.targets.append(np.array(request.known(first, appended), np.int64))
            if sample:
                next_token.add(span, plan, sample_row, 1, end)
        offset += length
        sample_row += sample
    taps = TapPlan(copied.plan(), kept.plan()) if copied.slices or kept.slices else None
    next_score, next_slices = next_token.plan()
    input_score, input_slices = input_token.plan()
    return OutputLayout(taps, next_score, input_score, next_slices, input_slices, tuple(copied.slices), tuple(kept.slices))


def returned_unsampled(request: Request, end: int, sample: bool) -> int:
    """How many tokens that were appended without being sampled come with a span up to `end`: it is the first to have their rows."""
    return max(0, end + 1 - sample - request.output_next) if request.ahead else 0


def _plan_hidden(request: Request, span: int, start: int, end: int, offset: int, sample: bool, copied: _Taps, kept: _Taps) -> None:
    plan = request.plan
    if plan.return_hidden_states is True:
        first = max(start, request.hidden_next)
        if first < end:
            copied.add(span, plan, offset + first - start, end - first, first)
            request.hidden_next = end
    elif request.shares_prompt and request.max_tokens <= 1:
        pass  # its last row is the prompt's, which the primary returns
    elif sample or (request.max_tokens == 0 and end == request.prompt_len):
        row = offset + end - 1 - start
        # The last step by arithmetic, and no token in flight that could have ended the request before: the row leaves with this step.
        final = request.samples_launched + 1 >= request.max_tokens
        in_flight_may_end_it = request.samples_launched > len(request.output_ids) and not request.cannot_surprise
        if final and not in_flight_may_end_it:
            copied.add(span, plan, row, 1, end - 1)
        else:
            kept.add(span, plan, row, 1, end - 1)


def row_bytes(plan: OutputPlan, hidden_size: int, itemsize: int) -> RowBytes:
    """Bytes of one row. `itemsize` is the compute type's, for `hidden_states_dtype="model"`."""
    size = {"model": itemsize, "float32": 4}.get(plan.hidden_states_dtype, 2)
    # The chosen value, values and ids of the best, values of the ids asked for.
    logprob = 4 + 8 * plan.top_logprobs_num + 4 * len(plan.token_ids_logprob) if plan.return_logprob else 0
    return RowBytes(len(plan.layers) * hidden_size * size, logprob)


def output_bytes(request: Request, start: int, end: int, row: RowBytes) -> int:
    """Bytes that leave the device if `request` gets the span start..end, at most; 4 of them are the token."""
    plan = request.plan
    total = 4 + row.logprob
    if plan.return_hidden_states is True:
        total += max(0, end - max(start, request.hidden_next)) * row.hidden
    elif plan.return_hidden_states:
        total += row.hidden
    appended = returned_unsampled(request, end, end == request.num_tokens)
    return total + (appended + max(0, min(end, request.prompt_len - 1) - max(start, request.logprob_next))) * row.logprob
