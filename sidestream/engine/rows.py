"""What sampling asks of rows of logits: [rows, vocabulary] float32. Native on a CPU that has the kernels, else PyTorch.

The native functions treat every row on its own, in one order: a row has the same result whatever the others are. PyTorch's may split a
single row over its threads and several rows one by one, and then round differently.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sidestream.kernels import cpu

# In place of a token, for a row from which none can be taken: the failure travels with the tokens, at no cost.
NOTHING_ADMITTED = -1  # every token is masked out
NOT_FINITE = -2  # the best logit is NaN or infinity

NUCLEUS_CANDIDATES = 256  # top-p looks at this many best tokens first; a full sort follows only for rows whose nucleus is larger


def _is_native(logits: Tensor) -> bool:
    return logits.device.type == "cpu" and cpu.native() is not None and logits.dtype == torch.float32 and logits.is_contiguous()


def admit(logits: Tensor, masks: Tensor) -> Tensor:
    """A copy with -inf where a mask has no bit: id i is bit i % 32 of word i // 32. masks: [rows, ceil(vocabulary/32)] int32."""
    if _is_native(logits):
        return cpu.admit(logits, masks)
    bits = masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)
    admitted = (bits & 1).bool().flatten(1)[:, : logits.shape[1]]  # [rows, vocabulary]
    return logits.masked_fill(~admitted, -torch.inf)


def greedy(logits: Tensor) -> Tensor:
    """The best token of each row, NOTHING_ADMITTED or NOT_FINITE where there is none. [rows] int32"""
    if _is_native(logits):
        return cpu.greedy(logits, NOTHING_ADMITTED, NOT_FINITE)
    best, tokens = logits.max(-1)
    failure = torch.where(best.isneginf(), NOTHING_ADMITTED, NOT_FINITE)
    return torch.where(best.isfinite(), tokens, failure).to(torch.int32)


def logsumexp(logits: Tensor) -> Tensor:
    """[rows]"""
    return cpu.logsumexp(logits) if _is_native(logits) else logits.logsumexp(-1)


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of each row, best first. [rows, k] float32, [rows, k] int32."""
    if _is_native(logits):
        return cpu.top_k(logits, k)
    values, ids = logits.topk(k, -1)
    return values, ids.to(torch.int32)


def nucleus(logits: Tensor, top_p: Tensor) -> Tensor:
    """The smallest logit of the nucleus of each row: its best tokens that have at least `top_p` of the mass. [rows] -> [rows]."""
    if _is_native(logits):
        return cpu.nucleus(logits, top_p)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    goal = weights.sum(-1, keepdim=True, dtype=torch.float64) * top_p[:, None]
    if logits.device.type != "cpu" or logits.shape[1] <= NUCLEUS_CANDIDATES:
        # On a GPU a sort of a few rows is cheap, and looking whether it is needed would wait for the device.
        return _nucleus_among(logits.sort(-1, descending=True).values, goal)
    candidates = logits.topk(NUCLEUS_CANDIDATES, -1).values
    threshold = _nucleus_among(candidates, goal)
    mass = (candidates - candidates[:, :1]).exp().sum(-1, dtype=torch.float64)
    larger = (mass < goal[:, 0]).nonzero()[:, 0]
    if len(larger):
        threshold[larger] = _nucleus_among(logits[larger].sort(-1, descending=True).values, goal[larger])
    return threshold


def _nucleus_among(descending: Tensor, goal: Tensor) -> Tensor:
    weights = (descending - descending[:, :1]).exp()
    before = torch.cumsum(weights, -1, dtype=torch.float64) - weights  # mass of the better tokens
    kept = (before < goal).sum(-1, keepdim=True).clamp(min=1)
    return descending.gather(1, kept - 1)[:, 0]


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """One token of each row by inverse CDF in the order of ids. A token of weight 0 is never drawn. uniform: [rows] float64 in [0, 1)."""
    if _is_native(logits):
        return cpu.draw(logits, uniform)
    # Unnormalised weights, summed in float64: a token masked out adds exactly nothing, wherever it stands.
    weights = (logits - logits.amax(-1, keepdim=True)).exp()  # [rows, vocabulary]
    cdf = torch.cumsum(weights, -1, dtype=torch.float64)
    if cdf.device.type != "cpu":
        cdf = _rising(cdf, weights)
    total = cdf[:, -1:]
    point = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, point, right=True)[:, 0]


def _rising(cdf: Tensor, weights: Tensor) -> Tensor:
    """A cumulative sum that never falls, and rises only where a weight is. Summed in parallel, it may fall by its rounding or rise at a
    token of weight 0: a search would miss tokens, or draw one that is masked out. One token after another, as on a CPU, it does neither.
    """
    return cdf.where(weights > 0, 0).cummax(-1).values
