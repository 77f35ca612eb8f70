"""From logits to tokens and logprobs, for all rows of a step at once.

The order of transforms, the only place where it stands:

1. repetition penalty (prompt and output), frequency and presence penalty (output), from the token table on the device
2. logit bias
3. masks: bad ids, allowed ids, `min_new_tokens` (end-of-sequence and stop ids), grammar
4. temperature (0 takes the argmax here)
5. top-k, then top-p, then min-p; equal values at a threshold are all kept, so that the result does not depend on the order of a sort
6. one uniform number per token from (seed, choice index, absolute position), inverse CDF in token-id order
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sidestream.engine import rows as row_ops
from sidestream.engine.outputs import LOGITS_PIECE_BYTES, LogprobBlock, ScorePlan
from sidestream.engine.request import Feature, Request

Upload = Callable[[npt.NDArray[np.generic]], Tensor]


@dataclass(frozen=True)
class SamplingPlan:
    """Host arrays for the sampled rows of one step; the parts that no row needs are None."""

    features: int
    slots: npt.NDArray[np.int64]  # [rows]
    lengths: npt.NDArray[np.int64]  # [rows] tokens of the request before the sampled one
    temperature: npt.NDArray[np.float32] | None = None  # [rows], 0 = greedy
    uniform: npt.NDArray[np.float64] | None = None  # [rows] in [0, 1)
    top_k: npt.NDArray[np.int64] | None = None  # [rows], 0 = off
    top_p: npt.NDArray[np.float32] | None = None
    min_p: npt.NDArray[np.float32] | None = None
    penalised: npt.NDArray[np.int64] | None = None  # [m] rows with any penalty
    penalties: npt.NDArray[np.float32] | None = None  # [m, 3] repetition, frequency, presence
    prompt_lengths: npt.NDArray[np.int64] | None = None  # [m]
    bias: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]] | None = None  # rows, ids, values
    banned: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None  # rows, ids
    allowed: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None  # rows, (row, id) pairs


class Sampled(NamedTuple):
    tokens: Tensor  # [rows] int32; rows.NOTHING_ADMITTED or rows.NOT_FINITE where there is none
    processed: Tensor  # [rows, vocabulary] float32 logits of the output distribution (temperature 1 at temperature 0)


def plan_sampling(requests: Sequence[Request], slots: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], features: int) -> SamplingPlan:
    """Gather the parameters of the sampled rows. `ends[i]` tokens precede the one sampled in row i."""
    plan = SamplingPlan(features, slots, ends)
    changes: dict[str, object] = {}
    if features & Feature.RANDOM:
        changes["temperature"] = np.array([r.sampling.temperature for r in requests], np.float32)
        changes["uniform"] = uniform(
            np.array([(r.sampling.seed or 0) & (2**64 - 1) for r in requests], np.uint64),
            np.array([r.index for r in requests], np.uint64),
            ends.astype(np.uint64),
        )
    if features & Feature.FILTER:
        # A greedy row takes the argmax whatever the filters say.
        changes["top_k"] = np.array([max(r.sampling.top_k, 0) if r.sampling.temperature > 0 else 0 for r in requests], np.int64)
        changes["top_p"] = np.array([r.sampling.top_p if r.sampling.temperature > 0 else 1 for r in requests], np.float32)
        changes["min_p"] = np.array([r.sampling.min_p if r.sampling.temperature > 0 else 0 for r in requests], np.float32)
    if features & Feature.PENALTY:
        rows = [i for i, r in enumerate(requests) if r.features & Feature.PENALTY]
        chosen = [requests[i].sampling for i in rows]
        changes["penalised"] = np.array(rows, np.int64)
        changes["penalties"] = np.array(
            [(s.repetition_penalty, s.frequency_penalty, s.presence_penalty) for s in chosen], np.float32
        ).reshape(len(rows), 3)
        changes["prompt_lengths"] = np.array([requests[i].prompt_len for i in rows], np.int64)
    if features & Feature.EDIT:
        changes.update(_plan_edits(requests))
    return SamplingPlan(features, slots, ends, **changes) if changes else plan  # type: ignore[arg-type]


def _plan_edits(requests: Sequence[Request]) -> dict[str, object]:
    bias: list[tuple[int, int, float]] = []
    banned: list[tuple[int, int]] = []
    allowed: list[tuple[int, int]] = []
    for row, request in enumerate(requests):
        if not request.features & Feature.EDIT:
            continue
        sampling = request.sampling
        bias += [(row, token, value) for token, value in (sampling.logit_bias or {}).items()]
        banned += [(row, token) for token in sampling.bad_token_ids or ()]
        if request.samples_launched < sampling.min_new_tokens:
            banned += [(row, token) for token in request.stop_ids]
        allowed += [(row, token) for token in sampling.allowed_token_ids or ()]
    edits: dict[str, object] = {}
    if bias:
        rows, ids, values = zip(*bias, strict=True)
        edits["bias"] = (np.array(rows, np.int64), np.array(ids, np.int64), np.array(values, np.float32))
    if banned:
        pairs = np.array(banned, np.int64)
        edits["banned"] = (pairs[:, 0].copy(), pairs[:, 1].copy())
    if allowed:
        pairs = np.array(allowed, np.int64)
        edits["allowed"] = (np.unique(pairs[:, 0]), pairs[:, 0].copy(), pairs[:, 1].copy())
    return edits


def uniform(seed: npt.NDArray[np.uint64], index: npt.NDArray[np.uint64], position: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, a function of (seed, choice index, absolute position) alone.

    A counter-based generator: splitmix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) over
    each input in turn, so a request repeats itself alone, in any batch, and after retraction.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        state = _mix(seed + golden)
        state = _mix(state ^ (index * golden + np.uint64(0x632BE59BD9B4E019)))
        state = _mix(state ^ (position * golden + np.uint64(0xD1B54A32D192ED03)))
    return np.asarray((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))


def sample(logits: Tensor, plan: SamplingPlan, token_table: Tensor, upload: Upload, mask: npt.NDArray[np.uint32] | None) -> Sampled:
    """Choose one token per row. logits: [rows, vocabulary] float32, left as they are. mask: [rows, ceil(vocabulary/32)] packed bits."""
    edited = _edit(logits, plan, token_table, upload, mask)
    best = row_ops.greedy(edited)
    if plan.temperature is None or plan.uniform is None:
        return Sampled(best, edited)
    temperature = upload(plan.temperature)[:, None]  # [rows, 1]
    greedy = temperature == 0
    processed = _filter(edited / torch.where(greedy, 1, temperature), plan, upload)
    drawn = row_ops.draw(processed, upload(plan.uniform))
    return Sampled(torch.where(greedy[:, 0] | (best < 0), best, drawn.to(torch.int32)), processed)


def _edit(logits: Tensor, plan: SamplingPlan, token_table: Tensor, upload: Upload, mask: npt.NDArray[np.uint32] | None) -> Tensor:
    """Transforms 1 to 3, on a copy where there are any."""
    if mask is None and not plan.features & (Feature.PENALTY | Feature.EDIT):
        return logits
    # What is masked out stays so whatever is added to it: the mask's pass is the one that copies.
    logits = logits.clone() if mask is None else row_ops.admit(logits, upload(mask.view(np.int32)))
    if plan.penalised is not None:
        _penalise(logits, plan, token_table, upload)
    if plan.bias is not None:
        rows, ids, values = (upload(part) for part in plan.bias)
        logits.index_put_((rows, ids), values, accumulate=True)
    if plan.allowed is not None:
        restricted, rows, ids = map(upload, plan.allowed)
        kept = torch.full_like(logits, -torch.inf)
        kept[rows, ids] = logits[rows, ids]
        logits[restricted] = kept[restricted]
    if plan.banned is not None:
        rows, ids = map(upload, plan.banned)
        logits[rows, ids] = -torch.inf
    return logits


def _penalise(logits: Tensor, plan: SamplingPlan, token_table: Tensor, upload: Upload) -> None:
    assert plan.penalised is not None and plan.penalties is not None and plan.prompt_lengths is not None
    rows, lengths = upload(plan.penalised), plan.lengths[plan.penalised]
    longest = int(lengths.max())
    history = token_table[upload(plan.slots[plan.penalised]), :longest].long()  # [m, longest]
    position = torch.arange(longest, device=logits.device)
    present = position < upload(lengths)[:, None]
    output = present & (position >= upload(plan.prompt_lengths)[:, None])
    history = history.where(present, 0)
    repetition, frequency, presence = upload(plan.penalties)[:, :, None].unbind(1)  # [m, 1] each
    chosen = logits[rows]  # [m, vocabulary]
    # Counts are made of this step's rows only: no table of [slots, vocabulary] lives between steps.
    seen = torch.zeros_like(chosen).scatter_add_(1, history, present.float()) > 0
    chosen = torch.where(seen, torch.where(chosen > 0, chosen / repetition, chosen * repetition), chosen)
    count = torch.zeros_like(chosen).scatter_add_(1, history, output.float())
    logits[rows] = chosen - frequency * count - presence * (count > 0)


def _filter(logits: Tensor, plan: SamplingPlan, upload: Upload) -> Tensor:
    """Transform 5 on logits already divided by the temperature."""
    if plan.top_k is None or plan.top_p is None or plan.min_p is None:
        return logits
    largest = min(int(plan.top_k.max()), logits.shape[1])
    if largest > 0:
        top_k = upload(np.minimum(plan.top_k, logits.shape[1]))[:, None]
        values = row_ops.top_k(logits, largest)[0]
        threshold = values.gather(1, (top_k - 1).clamp(min=0))
        logits = logits.masked_fill((logits < threshold) & (top_k > 0), -torch.inf)
    if (plan.min_p > 0).any():
        least = logits.amax(-1, keepdim=True) + upload(np.log(np.maximum(plan.min_p, np.finfo(np.float32).tiny)))[:, None]
        dropped = (logits < least) & (upload(plan.min_p)[:, None] > 0)
    else:
        dropped = None
    limited = np.flatnonzero(plan.top_p < 1)
    if len(limited):
        rows = upload(limited)
        threshold = row_ops.nucleus(logits[rows], upload(plan.top_p[limited]))
        outside = torch.zeros_like(logits, dtype=torch.bool)
        outside[rows] = logits[rows] < threshold[:, None]
        dropped = outside if dropped is None else dropped | outside
    return logits if dropped is None else logits.masked_fill(dropped, -torch.inf)


def score(logits: Tensor, targets: Tensor, plan: ScorePlan, upload: Upload) -> LogprobBlock:
    """Logprobs of rows of logits. logits: [n, vocabulary] float32; targets: [n] ids. Same float for a token wherever it appears."""
    normaliser = row_ops.logsumexp(logits)[:, None]  # [n, 1]
    chosen = (logits.gather(1, targets[:, None].long()) - normaliser)[:, 0]
    top_values = top_ids = id_values = None
    if len(plan.top_index):
        values, ids = row_ops.top_k(logits, plan.k)
        index = upload(plan.top_index)
        top_values = (values - normaliser).flatten()[index]
        top_ids = ids.flatten()[index]
    if len(plan.id_rows):
        rows = upload(plan.id_rows)
        id_values = logits[rows, upload(plan.id_columns)] - normaliser[rows, 0]
    return LogprobBlock(chosen, top_values, top_ids, id_values)


def score_in_pieces(plan: ScorePlan, hidden: Tensor, lm_head: Callable[[Tensor], Tensor], vocabulary: int, upload: Upload) -> LogprobBlock:
    """Input logprobs of many rows without `[rows, vocabulary]` floats at once. hidden: [tokens, hidden] after the final norm."""
    assert plan.targets is not None
    size = max(1, LOGITS_PIECE_BYTES // (4 * vocabulary))
    blocks = []
    for start in range(0, len(plan.rows), size):
        piece = plan.piece(start, start + size)
        assert piece.targets is not None
        logits = lm_head(hidden[upload(piece.rows)])
        blocks.append(score(logits, upload(piece.targets), piece, upload))
    if len(blocks) == 1:
        return blocks[0]
    columns = ([part for part in column if part is not None] for column in zip(*blocks, strict=True))
    return LogprobBlock(*(torch.cat(parts) if parts else None for parts in columns))
