"""Sampling and scoring against straightforward references: loops over one row in float64, and transformers' logits processors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sidestream.engine import rows as row_ops
from sidestream.engine import sampling as module
from sidestream.engine.outputs import LogprobBlock, ScorePlan
from sidestream.engine.request import Feature, Request
from sidestream.engine.rows import NOT_FINITE, NOTHING_ADMITTED, NUCLEUS_CANDIDATES
from sidestream.engine.sampling import (
    Sampled,
    SamplingPlan,
    plan_sampling,
    sample,
    score,
    score_in_pieces,
    uniform,
)
from sidestream.kernels import cpu
from sidestream.params import OutputParams, SamplingParams

INFINITY = float("inf")
EOS = 2
SMALLEST, LARGEST = 0.0, 1 - 2**-53  # of the numbers that `uniform` gives
Floats = npt.NDArray[np.float64]


@pytest.fixture(autouse=True, params=["native", "torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs with both implementations of what is asked of a row."""
    if request.param == "torch":
        monkeypatch.setattr(row_ops, "_is_native", lambda logits: False)
    elif cpu.native() is None:
        pytest.skip("the native CPU backend is not installed")
    return str(request.param)


@dataclass(frozen=True)
class Row:
    sampling: SamplingParams
    prompt: tuple[int, ...] = (1,)
    output: tuple[int, ...] = ()
    index: int = 0
    constrained: bool = False


def row(prompt: Sequence[int] = (1,), output: Sequence[int] = (), *, index: int = 0, constrained: bool = False, **params: Any) -> Row:
    sampling = SamplingParams(**({"temperature": 0.0, "max_new_tokens": 100, "seed": 1} | params))
    return Row(sampling, tuple(prompt), tuple(output), index, constrained)


def request_of(each: Row, vocabulary: int = 1000) -> Request:
    request = Request(
        key=1,
        rid="r",
        index=each.index,
        prompt=np.array(each.prompt, np.int32),
        sampling=each.sampling,
        plan=OutputParams().check(vocab_size=vocabulary, num_layers=2, prompt_len=len(each.prompt)),
        max_tokens=each.sampling.max_new_tokens,
        eos_token_ids=frozenset([EOS]),
        matcher=None,
        constraint=object() if each.constrained else None,  # type: ignore[arg-type]
        primary=None,
    )
    request.num_tokens += len(each.output)
    return request


def plan_of(rows: Sequence[Row]) -> SamplingPlan:
    """The rows sit in slots 3, 1, 5, ...: a slot is not a row."""
    requests = [request_of(each) for each in rows]
    features = 0
    for request in requests:
        features |= request.features
    ends = np.array([len(each.prompt) + len(each.output) for each in rows], np.int64)
    return plan_sampling(requests, slots_of(rows), ends, features)


def slots_of(rows: Sequence[Row]) -> npt.NDArray[np.int64]:
    return (np.arange(len(rows), dtype=np.int64) ^ 1) * 2 + 1


def table_of(rows: Sequence[Row], vocabulary: int) -> Tensor:
    """The token table; what a slot's last user has left behind follows the tokens of each row."""
    longest = max(len(each.prompt) + len(each.output) for each in rows)
    table = torch.from_numpy(np.random.default_rng(9).integers(0, vocabulary, (2 * len(rows) + 4, longest + 5), np.int32))
    for slot, each in zip(slots_of(rows).tolist(), rows, strict=True):
        tokens = torch.tensor([*each.prompt, *each.output], dtype=torch.int32)
        table[slot, : len(tokens)] = tokens
    return table


def run(logits: Tensor, rows: Sequence[Row], *, points: Sequence[float] | None = None, mask: Any = None) -> Sampled:
    """Sample; `points` replace the uniform numbers. The logits must stay as they are."""
    plan = plan_of(rows)
    if points is not None:
        assert plan.uniform is not None
        plan = replace(plan, uniform=np.array(points, np.float64))
    before = logits.clone()
    sampled = sample(logits, plan, table_of(rows, logits.shape[1]), torch.from_numpy, mask)
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32)), "the logits were changed: raw logprobs are made of them"
    assert sampled.tokens.dtype == torch.int32 and sampled.processed.shape == logits.shape and sampled.processed.dtype == torch.float32
    return sampled


def random_logits(rows: int, vocabulary: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


# The reference: one row, loops, float64


def edited(logits: Tensor, each: Row, admitted: set[int] | None = None) -> Floats:
    """Transforms 1 to 3."""
    s, out = each.sampling, logits.double().numpy().copy()
    for token in {*each.prompt, *each.output}:
        out[token] = out[token] / s.repetition_penalty if out[token] > 0 else out[token] * s.repetition_penalty
    for token in each.output:
        out[token] -= s.frequency_penalty
    for token in set(each.output):
        out[token] -= s.presence_penalty
    for token, value in s.logit_bias.items():
        out[token] += value
    banned = set(s.bad_token_ids)
    if len(each.output) < s.min_new_tokens:
        banned |= {*s.stop_token_ids, *([] if s.ignore_eos else [EOS])}
    for token in range(len(out)):
        if token in banned or (s.allowed_token_ids is not None and token not in s.allowed_token_ids):
            out[token] = -INFINITY
        if admitted is not None and token not in admitted:
            out[token] = -INFINITY
    return out


def processed(logits: Tensor, each: Row, admitted: set[int] | None = None) -> Floats:
    """Transforms 1 to 5."""
    s, out = each.sampling, edited(logits, each, admitted)
    if s.temperature == 0:
        return out
    out = out / s.temperature
    if s.top_k > 0:
        smallest = sorted(out, reverse=True)[min(s.top_k, len(out)) - 1]
        out[out < smallest] = -INFINITY
    weights = np.exp(out - out.max())
    dropped = weights < s.min_p
    if s.top_p < 1:
        mass, order = 0.0, np.argsort(-weights, kind="stable")
        for token in order:
            if mass >= s.top_p * weights.sum():
                break
            mass += weights[token]
            smallest = weights[token]
        dropped |= weights < smallest
    out[dropped] = -INFINITY
    return out


def draw(logits: Floats, point: float) -> int:
    """Transform 6: the token at which the running sum in the order of ids passes `point`."""
    weights = np.exp(logits - logits.max())
    running, last = 0.0, 0
    for token, weight in enumerate(weights.tolist()):
        if weight > 0:
            running, last = running + weight, token
            if running > point * weights.sum():
                return token
    return last


def assert_like(got: Tensor, want: Sequence[Floats], atol: float = 1e-4) -> None:
    expected = torch.from_numpy(np.stack(want)).float()
    assert torch.equal(got.isneginf(), expected.isneginf()), "other tokens are masked out"
    torch.testing.assert_close(got, expected, atol=atol, rtol=1e-5)


# Penalties


PENALISED = [
    row([4, 4, 7], [9, 9, 9, 4], repetition_penalty=1.7, frequency_penalty=0.6, presence_penalty=0.4),
    row([4, 4, 7], [], repetition_penalty=1.7, frequency_penalty=0.6, presence_penalty=0.4),
    row([0], [0, 0], frequency_penalty=1.5),
    row([5, 6], [0, 7], presence_penalty=-1.2),
    row([3, 8], [11, 3], repetition_penalty=0.5),
    row([12] * 30, [12] * 11, frequency_penalty=-0.3, repetition_penalty=1.1),
]


@pytest.mark.parametrize("sign", [-1, 1])
def test_penalties(sign: int) -> None:
    rows = [row([1, 2], [3]), *PENALISED, row([2] * 60, [5])]  # the first and the last have none
    logits = sign * random_logits(len(rows), 50).abs()
    sampled = run(logits, rows)
    want = [edited(logits[i], each) for i, each in enumerate(rows)]
    assert_like(sampled.processed, want)
    assert torch.equal(sampled.processed[0], logits[0]) and torch.equal(sampled.processed[-1], logits[-1])
    assert sampled.tokens.tolist() == [int(each.argmax()) for each in want]


def test_the_meaning_of_penalties_in_numbers() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 1.0, -1.0]])
    got = run(logits, [row([0, 1], [2, 2, 4], repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5)]).processed
    # Prompt tokens: divided or multiplied only. Token 2 was produced twice, token 4 once, token 3 never.
    assert got.tolist() == [[1.0, -4.0, 0.5 - 0.5 - 0.5, 1.0, -2.0 - 0.25 - 0.5]]


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = random_logits(3, 40, 5)
    rows = [row([3, 3, 9, 11], [2, 2, 39], repetition_penalty=value) for value in (1.3, 0.8, 1.0)]
    got = run(logits, rows).processed
    for i, value in enumerate((1.3, 0.8, 1.0)):
        want = RepetitionPenaltyLogitsProcessor(value)(torch.tensor([[3, 3, 9, 11, 2, 2, 39]]), logits[i : i + 1].clone())
        torch.testing.assert_close(got[i : i + 1], want)


def test_penalties_reach_the_draw() -> None:
    logits = torch.zeros(2, 8)
    rows = [row([1], [5], frequency_penalty=2.0, temperature=0.01), row([1], [0, 1, 2, 3, 4, 6, 7], presence_penalty=2.0, temperature=0.01)]
    sampled = run(logits, rows, points=[0.8, 0.8])
    assert sampled.tokens.tolist() == [6, 5]  # row 0: seven tokens are left, this is the sixth of them; row 1: one is left


# Bias and masks


def test_bias_allowed_and_bad_tokens() -> None:
    rows = [
        row(),
        row(logit_bias={0: 5.0, 39: -7.5, 4: 0.25}),
        row(allowed_token_ids=[3, 39, 0]),
        row(bad_token_ids=[0, 1, 39]),
        row(allowed_token_ids=[3, 4, 5], bad_token_ids=[4], logit_bias={5: 100.0, 6: 100.0}),
        row(allowed_token_ids=[7]),
    ]
    logits = random_logits(len(rows), 40)
    sampled = run(logits, rows)
    assert_like(sampled.processed, [edited(logits[i], each) for i, each in enumerate(rows)])
    assert sampled.tokens[4] == 5 and sampled.tokens[5] == 7


def test_bias_on_a_token_that_the_model_excludes() -> None:
    logits = torch.tensor([[0.0, -INFINITY, 1.0]])
    assert run(logits, [row(logit_bias={1: 100.0})]).processed.tolist() == [[0.0, -INFINITY, 1.0]]


def packed(admitted: Sequence[set[int] | None], vocabulary: int) -> npt.NDArray[np.uint32]:
    """Bit `i % 32` of word `i // 32`; all ones (even beyond the vocabulary) where there is no grammar."""
    masks = np.full((len(admitted), -(-vocabulary // 32)), 0xFFFFFFFF, np.uint32)
    for i, tokens in enumerate(admitted):
        if tokens is not None:
            masks[i] = 0
            for token in tokens:
                masks[i, token // 32] |= np.uint32(1 << (token % 32))
    return masks


@pytest.mark.parametrize("vocabulary", [5, 31, 32, 33, 64, 100])
def test_grammar_masks(vocabulary: int) -> None:
    random = np.random.default_rng(vocabulary)
    some = set(np.flatnonzero(random.random(vocabulary) < 0.4).tolist()) | {vocabulary - 1}
    admitted = [None, {vocabulary - 1}, some, {0}, set(range(vocabulary)), None, {min(31, vocabulary - 1), 0}]
    rows = [row(constrained=tokens is not None, temperature=temperature) for tokens in admitted for temperature in (0.0, 1.0)]
    doubled = [tokens for tokens in admitted for _ in range(2)]
    logits = random_logits(len(rows), vocabulary)
    sampled = run(logits, rows, mask=packed(doubled, vocabulary))
    assert_like(sampled.processed, [processed(logits[i], each, doubled[i]) for i, each in enumerate(rows)])
    for token, tokens in zip(sampled.tokens.tolist(), doubled, strict=True):
        assert token in (tokens if tokens is not None else range(vocabulary))


def test_a_mask_comes_on_top_of_the_other_edits() -> None:
    logits = torch.zeros(1, 40)
    rows = [row(constrained=True, bad_token_ids=[33], logit_bias={35: 1.0}, allowed_token_ids=[33, 34, 35, 36])]
    got = run(logits, rows, mask=packed([{33, 34, 35, 1}], 40))
    assert got.processed[0].isfinite().nonzero()[:, 0].tolist() == [34, 35] and got.tokens.tolist() == [35]


def test_min_new_tokens_bans_what_would_end_the_request_until_reached() -> None:
    logits = torch.zeros(1, 10)
    logits[0, [EOS, 6]] = 5.0

    def left(count: int, **params: Any) -> set[int]:
        got = run(logits, [row(output=[7] * count, min_new_tokens=3, **params)]).processed
        return set(range(10)) - set(got[0].isfinite().nonzero()[:, 0].tolist())

    for count in (0, 1, 2):
        assert left(count) == {EOS}
        assert left(count, stop_token_ids=[6, 8]) == {EOS, 6, 8}
        assert left(count, stop_token_ids=[6], ignore_eos=True) == {6}
        assert left(count, bad_token_ids=[4]) == {EOS, 4}
    for count in (3, 4):
        assert left(count, stop_token_ids=[6, 8]) == set()
        assert left(count, bad_token_ids=[4]) == {4}


# Filters


def kept(got: Tensor) -> list[list[int]]:
    return [each.isfinite().nonzero()[:, 0].tolist() for each in got]


def test_top_k_keeps_all_that_tie() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 0.0]]).repeat(8, 1)
    counts = [1, 2, 3, 4, 5, 6, 100, -1]
    got = run(logits, [row(temperature=1.0, top_k=k) for k in counts])
    everything = list(range(6))
    assert kept(got.processed) == [[1, 3], [1, 3], [1, 2, 3, 4], [1, 2, 3, 4], [0, 1, 2, 3, 4], everything, everything, everything]


def test_top_k_among_tokens_that_are_masked_out() -> None:
    logits = torch.tensor([[5.0, 1.0, 4.0, 3.0]])
    assert kept(run(logits, [row(temperature=2.0, top_k=2, bad_token_ids=[0, 2])]).processed) == [[1, 3]]
    assert kept(run(logits, [row(temperature=2.0, top_k=3, bad_token_ids=[0, 2])]).processed) == [[1, 3]]


def test_top_p_is_the_smallest_set_that_reaches_the_mass() -> None:
    logits = torch.tensor([0.125, 0.5, 0.0625, 0.25, 0.0625]).log().repeat(9, 1)
    cases = [(1e-6, [1]), (0.49, [1]), (0.51, [1, 3]), (0.74, [1, 3]), (0.76, [0, 1, 3]), (0.874, [0, 1, 3])]
    cases += [(0.876, [0, 1, 2, 3, 4]), (0.95, [0, 1, 2, 3, 4]), (1.0, [0, 1, 2, 3, 4])]  # the two smallest tie
    got = run(logits, [row(temperature=1.0, top_p=p) for p, _ in cases])
    assert kept(got.processed) == [tokens for _, tokens in cases]


def test_top_p_that_is_met_exactly() -> None:
    half = math.log(0.5)
    logits = torch.tensor([[0.0, -INFINITY, 0.0, -INFINITY], [0.0, -200.0, half, -200.0], [half, half, half, half]])
    assert row_ops.nucleus(logits, torch.tensor([1.0, 0.6, 0.25])).tolist() == [0.0, 0.0, logits[2, 0]]


def test_top_p_when_one_token_has_all_the_mass() -> None:
    logits = torch.full((2, 400), -200.0)
    logits[0, 17] = 0.0
    got = run(logits, [row(temperature=1.0, top_p=0.999), row(temperature=1.0, top_p=0.5)])
    assert kept(got.processed) == [[17], list(range(400))]


@pytest.fixture
def full_sorts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows for which the whole vocabulary was sorted, call by call."""
    calls: list[int] = []
    among = row_ops._nucleus_among

    def spied(descending: Tensor, goal: Tensor) -> Tensor:
        if descending.shape[1] > NUCLEUS_CANDIDATES:
            calls.append(len(descending))
        return among(descending, goal)

    monkeypatch.setattr(row_ops, "_nucleus_among", spied)
    return calls


def test_top_p_of_large_vocabularies(full_sorts: list[int], implementation: str) -> None:
    """Peaked rows need the best candidates only, flat ones a sort of everything; rows of all kinds share a batch."""
    vocabulary = 3000
    generator = torch.Generator().manual_seed(4)
    flat = torch.randperm(vocabulary, generator=generator) * 1e-4
    peaked = random_logits(1, vocabulary, 5, 4.0)[0]
    equal = torch.zeros(vocabulary)
    rows = [
        row(temperature=1.0, top_p=0.9),
        row(temperature=1.0, top_p=0.9),
        row(temperature=1.0),
        row(temperature=0.0, top_p=0.9),
        row(temperature=0.7, top_p=0.3, top_k=500),
        row(temperature=3.0, top_p=0.99, min_p=0.01),
        row(temperature=1.0, top_p=0.5),
        row(temperature=1.0, min_p=0.8),
        row(temperature=1.0, top_p=0.05),
    ]
    logits = torch.stack([peaked, flat, flat, flat, flat, peaked, equal, flat, flat])
    got = run(logits, rows)
    assert_like(got.processed, [processed(logits[i], each) for i, each in enumerate(rows)])
    assert full_sorts == ([3] if implementation == "torch" else []), "row 1, 5 and 6 need the sort, nobody else"
    sizes = [len(each) for each in kept(got.processed)]
    assert 1 < sizes[0] < NUCLEUS_CANDIDATES < sizes[1] < vocabulary and sizes[2] == sizes[3] == sizes[6] == vocabulary
    assert 100 < sizes[4] < 200 and NUCLEUS_CANDIDATES < sizes[5] < vocabulary


@pytest.mark.parametrize("size", [1, 2, NUCLEUS_CANDIDATES - 1, NUCLEUS_CANDIDATES, NUCLEUS_CANDIDATES + 1, NUCLEUS_CANDIDATES + 2, 999])
def test_top_p_at_the_border_of_the_candidates(size: int) -> None:
    logits = torch.linspace(0, 2, 1000)[None]
    weights = logits[0].double().exp().sort(descending=True).values
    inside = float(weights[:size].sum() - weights[size - 1] / 2) / float(weights.sum())
    got = run(logits, [row(temperature=1.0, top_p=inside)])
    assert kept(got.processed) == [list(range(1000 - size, 1000))]


def test_min_p() -> None:
    logits = torch.tensor([1.0, 0.5, 0.25, 0.1, 0.01]).log().repeat(6, 1)
    cases = [(0.0, 5), (0.009, 5), (0.011, 4), (0.24, 3), (0.26, 2), (1.0, 1)]
    got = run(logits, [row(temperature=1.0, min_p=p) for p, _ in cases])
    assert kept(got.processed) == [list(range(count)) for _, count in cases]


@pytest.mark.parametrize("vocabulary", [60, 1200])
def test_filters_are_those_of_transformers(vocabulary: int) -> None:
    cases = [(0.7, 10, 0.8, 0.0), (1.3, 40, 0.95, 0.05), (1.0, -1, 0.5, 0.1), (2.0, 7, 1.0, 0.2), (0.5, -1, 0.9, 0.0), (1.5, -1, 1.0, 0.02)]
    logits = random_logits(len(cases), vocabulary, 6, 2.0)
    got = run(logits, [row(temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in cases]).processed
    for i, (temperature, top_k, top_p, min_p) in enumerate(cases):
        want = TemperatureLogitsWarper(temperature)(None, logits[i : i + 1])
        if top_k > 0:
            want = TopKLogitsWarper(top_k)(None, want)
        if top_p < 1:
            want = TopPLogitsWarper(top_p)(None, want)
        if min_p > 0:
            want = MinPLogitsWarper(min_p)(None, want)
        assert 1 < want.isfinite().sum() < vocabulary
        torch.testing.assert_close(got[i : i + 1], want)


def test_greedy_rows_among_random_ones() -> None:
    """The best token at temperature 0, whatever the filters say; its distribution is that of temperature 1 without them."""
    logits = random_logits(4, 50, 8)
    greedy = {"temperature": 0.0, "top_k": 3, "top_p": 0.2, "min_p": 0.9}
    rows = [row(**greedy), row(temperature=1.5), row(**greedy, logit_bias={9: 50.0}), row(temperature=0.8, top_k=2)]
    sampled = run(logits, rows, points=[0.99, 0.5, 0.99, 0.99])
    assert sampled.tokens[0] == logits[0].argmax() and sampled.tokens[2] == 9
    assert torch.equal(sampled.processed[0], logits[0])
    assert sampled.processed[2, 9] == logits[2, 9] + 50 and sampled.processed[2].isfinite().all()
    assert_like(sampled.processed, [processed(logits[i], each) for i, each in enumerate(rows)])
    assert sampled.tokens[1] == draw(processed(logits[1], rows[1]), 0.5)
    assert sampled.tokens[3] == draw(processed(logits[3], rows[3]), 0.99)


def test_a_temperature_that_is_almost_zero() -> None:
    logits = random_logits(20, 300, 3)
    sampled = run(logits, [row(temperature=2e-5)] * 20, points=np.linspace(0, LARGEST, 20).tolist())
    assert torch.equal(sampled.tokens, logits.argmax(-1).int())


# The draw


def test_inverse_cdf() -> None:
    logits = torch.tensor([0.1, 0.0, 0.2, 0.3, 0.0, 0.4, 0.0]).log()
    points = [SMALLEST, 0.05, 0.0999, 0.1001, 0.2999, 0.3001, 0.5999, 0.6001, 0.9, LARGEST]
    sampled = run(logits.repeat(len(points), 1), [row(temperature=1.0)] * len(points), points=points)
    assert sampled.tokens.tolist() == [0, 0, 0, 2, 2, 3, 3, 5, 5, 5]


def test_inverse_cdf_in_the_order_of_token_ids() -> None:
    points = np.linspace(0, LARGEST, 500)
    logits = random_logits(1, 700, 11, 2.0)
    sampled = run(logits.repeat(500, 1), [row(temperature=1.0)] * 500, points=points.tolist())
    tokens = sampled.tokens.tolist()
    assert tokens == sorted(tokens)
    assert tokens == [draw(logits[0].double().numpy(), point) for point in points]


@pytest.mark.parametrize("point", [SMALLEST, 2**-53, 0.5, 1 - 2**-52, LARGEST])
def test_a_token_of_probability_zero_is_never_drawn(point: float) -> None:
    """At both ends, in between, by a mask, by a filter, by underflow; also where the sum is not exact."""
    generator = np.random.default_rng(2)
    rows, logits, alive = [], [], []
    for count in (1, 2, 30, 299):
        tokens = np.sort(generator.choice(np.arange(1, 299 if count < 299 else 300), min(count, 297), replace=False))
        masked = torch.full((300,), -INFINITY)
        masked[tokens] = torch.from_numpy(generator.normal(size=len(tokens))).float()
        faint = torch.where(masked.isneginf(), -150.0, masked)  # exp(-150) is 0 in float32
        for values, params in ((masked, {}), (faint, {}), (masked, {"top_p": 0.9}), (faint, {"top_k": 7})):
            logits.append(values)
            rows.append(row(temperature=1.0, **params))
            alive.append(set(tokens.tolist()))
    sampled = run(torch.stack(logits), rows, points=[point] * len(rows))
    weights = (sampled.processed - sampled.processed.amax(-1, keepdim=True)).exp()
    for i, token in enumerate(sampled.tokens.tolist()):
        assert token in alive[i] and weights[i, token] > 0
        living = weights[i].nonzero()[:, 0].tolist()
        if point == SMALLEST:
            assert token == living[0]
        if point == LARGEST:
            assert token == living[-1]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.1}])
def test_a_row_without_a_token_says_so(params: dict[str, Any]) -> None:
    nan, infinite, excluded = random_logits(3, 70, 15)
    nan[3], infinite[4], excluded[:] = math.nan, INFINITY, -INFINITY
    logits = torch.stack([random_logits(1, 70, 16)[0], nan, infinite, excluded, random_logits(1, 70, 17)[0], random_logits(1, 70, 18)[0]])
    rows = [row(seed=seed, **params) for seed in range(6)]
    mask = packed([None, None, None, None, set(), None], 70)
    sampled = run(logits, rows, mask=mask)
    assert sampled.tokens[1:5].tolist() == [NOT_FINITE, NOT_FINITE, NOTHING_ADMITTED, NOTHING_ADMITTED]
    for i in (0, 5):
        alone = run(logits[i : i + 1], rows[i : i + 1], mask=mask[i : i + 1])
        assert sampled.tokens[i] == alone.tokens[0] >= 0
        assert torch.equal(sampled.processed[i], alone.processed[0])


def test_a_sum_made_in_parallel_is_made_to_rise_where_there_is_mass() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1e-9, 0.0, 1.0, 0.0]])
    rounded = torch.tensor([[0.0, 1.0, 1.1, 3.0, 2.9, 3.1, 4.0, 4.1]], dtype=torch.float64)
    assert row_ops._rising(rounded, weights).tolist() == [[0.0, 1.0, 1.0, 3.0, 3.0, 3.0, 4.0, 4.0]]
    logits = random_logits(3, 5000, 19, 20.0)
    logits[1, ::3] = -INFINITY
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    exact = torch.cumsum(weights, -1, dtype=torch.float64)
    assert torch.equal(row_ops._rising(exact, weights), exact), "a sum made in order stays as it is"


@pytest.mark.gpu
def test_draws_on_a_gpu_are_those_of_the_cpu() -> None:
    """At the edges of the distribution too, and never a token of weight 0."""
    logits = random_logits(1, 49_152, 20, 6.0)
    logits[:, ::2] = -INFINITY
    points = [SMALLEST, 2**-53, *np.linspace(0.001, 0.999, 500).tolist(), 1 - 2**-52, LARGEST]
    plan = replace(plan_of([row(temperature=1.0)] * len(points)), uniform=np.array(points))
    logits, table = logits.repeat(len(points), 1), torch.zeros(1, 1)
    want = sample(logits, plan, table, torch.from_numpy, None).tokens
    got = sample(logits.cuda(), plan, table.cuda(), lambda array: torch.from_numpy(array).cuda(), None).tokens.cpu()
    assert (got % 2 == 1).all() and (got >= 0).all()
    assert (got == want).float().mean() > 0.99  # exp differs in its last bit


def test_faint_tokens_are_not_lost_in_the_sum() -> None:
    """In float32, 1 + 1e-8 is 1: a hundred thousand such tokens would never be drawn."""
    logits = torch.full((3, 100_001), math.log(1e-8))
    logits[:, 0] = 0.0
    points = [1 - 0.75e-3, 1 - 0.25e-3, LARGEST]  # they have 1e-3 of the mass
    tokens = run(logits, [row(temperature=1.0)] * 3, points=points).tokens.tolist()
    assert tokens[0] == pytest.approx(25_000, rel=0.01) and tokens[1] == pytest.approx(75_000, rel=0.01) and tokens[2] == 100_000


def test_draws_follow_the_softmax() -> None:
    """20,000 seeds, one position each."""
    count, vocabulary = 20_000, 40
    logits = random_logits(1, vocabulary, 12, 1.0)
    plan = plan_of([row(temperature=0.9, seed=seed) for seed in range(count)])
    tokens = sample(logits.repeat(count, 1), plan, torch.zeros(1, 1), torch.from_numpy, None).tokens
    expected = count * (logits[0].double() / 0.9).softmax(-1)
    assert expected.min() > 5
    chi_square = ((torch.bincount(tokens, minlength=vocabulary) - expected) ** 2 / expected).sum()
    assert 12 < chi_square < 83, "outside 0.9999 of the distribution with 39 degrees of freedom"


def test_draws_of_a_filtered_distribution() -> None:
    count = 20_000
    logits = random_logits(1, 600, 13, 2.0)
    params = {"temperature": 1.1, "top_k": 60, "top_p": 0.8}
    plan = plan_of([row(seed=7, index=index, prompt=[1] * (1 + position), **params) for index in range(200) for position in range(100)])
    tokens = sample(logits.repeat(count, 1), plan, torch.zeros(1, 1), torch.from_numpy, None).tokens
    want = torch.from_numpy(processed(logits[0], row(**params)))
    expected = count * want.softmax(-1)
    counts = torch.bincount(tokens, minlength=600)
    living = expected > 0
    assert 5 < living.sum() < 60 and counts[~living].sum() == 0 and expected[living].min() > 5
    degrees = int(living.sum()) - 1
    chi_square = ((counts - expected)[living] ** 2 / expected[living]).sum()
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees) + 8


# Uniform numbers


def numbers(seeds: Any, indices: Any, positions: Any) -> Floats:
    seeds, indices, positions = np.broadcast_arrays(*(np.asarray(x, np.uint64) for x in (seeds, indices, positions)))
    return uniform(seeds.ravel(), indices.ravel(), positions.ravel())


def test_uniform_numbers_stay_the_same_across_versions() -> None:
    """A user's seed must give the same text next year."""
    cases = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (42, 3, 17), (2**64 - 1, 127, 131071), (2**63, 0, 2)]
    assert [int(x * 2**53) for x in numbers(*zip(*cases, strict=True))] == [integer_uniform(*case) for case in cases]
    assert numbers(*zip(*cases, strict=True)).tolist() == [
        0.4366349489857285,
        0.2880131503429195,
        0.07059024789587831,
        0.28772527639018664,
        0.8167487944556356,
        0.782209561382833,
        0.2837842683255357,
    ]


def integer_uniform(seed: int, index: int, position: int) -> int:
    """The same in Python's integers."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    state = mix((seed + golden) % 2**64)
    state = mix(state ^ ((index * golden + 0x632BE59BD9B4E019) % 2**64))
    state = mix(state ^ ((position * golden + 0xD1B54A32D192ED03) % 2**64))
    return state >> 11


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_uniform_numbers_are_uniform_and_do_not_repeat(axis: int) -> None:
    """Along seeds, along choices, along positions: mean, variance, 100 bins, neighbours, and no number twice."""
    count = 100_000
    where: list[Any] = [123, 4, 56]
    where[axis] = np.arange(count)
    got = numbers(*where)
    assert got.dtype == np.float64 and got.min() >= 0 and got.max() < 1
    assert abs(got.mean() - 0.5) < 4 / math.sqrt(12 * count)
    assert abs(got.var() - 1 / 12) < 0.001
    bins = np.bincount((got * 100).astype(int), minlength=100)
    assert 48 < ((bins - count / 100) ** 2 / (count / 100)).sum() < 170, "chi-square with 99 degrees of freedom"
    assert abs(np.corrcoef(got[:-1], got[1:])[0, 1]) < 0.015
    assert len(set(got.tolist())) == count


def test_uniform_numbers_differ_between_inputs() -> None:
    """Seed, choice and position do not stand for each other."""
    grid = np.arange(40)
    got = numbers(grid[:, None, None], grid[None, :, None], grid[None, None, :])
    assert len(set(got.tolist())) == 40**3


def test_a_request_gets_its_number_from_seed_choice_and_position() -> None:
    rows = [
        row([1, 2, 3], [4, 5], temperature=1.0, seed=77, index=3),
        row([9], [], temperature=0.5, seed=-5),
        row([1, 2, 3, 4, 5], [], temperature=1.0, seed=77, index=3),
        row([9], [], temperature=0.5, seed=2**64 - 5),
    ]
    plan = plan_of(rows)
    assert plan.uniform is not None
    assert plan.uniform.tolist() == numbers([77, 2**64 - 5, 77, 2**64 - 5], [3, 0, 3, 0], [5, 1, 5, 1]).tolist()
    assert plan.uniform[0] == plan.uniform[2] and plan.uniform[1] == plan.uniform[3]


# Plans


def test_a_plan_holds_only_what_a_row_needs() -> None:
    nothing = plan_of([row(), row()])
    assert nothing.features == 0
    for name in (
        "temperature",
        "uniform",
        "top_k",
        "top_p",
        "min_p",
        "penalised",
        "penalties",
        "prompt_lengths",
        "bias",
        "banned",
        "allowed",
    ):
        assert getattr(nothing, name) is None
    logits = random_logits(2, 20)
    assert run(logits, [row(), row()]).processed is logits, "nothing to do makes no copy"
    random = plan_of([row(), row(temperature=0.5)])
    assert random.temperature is not None and random.temperature.tolist() == [0, 0.5] and random.top_k is None
    reached = plan_of([row(output=[1, 1], min_new_tokens=2)])
    assert reached.features == Feature.EDIT and reached.banned is None


def test_a_plan_gathers_the_rows_in_order() -> None:
    plan = plan_of(
        [
            row([1, 2], [3], repetition_penalty=1.5, top_k=5, top_p=0.5, min_p=0.25),  # greedy: no filter
            row([1], temperature=0.5, top_k=4, top_p=0.75, min_p=0.5, logit_bias={7: 1.0, 3: -1.0}),
            row([1, 2, 3], [4], temperature=2.0, presence_penalty=0.5, frequency_penalty=0.25, bad_token_ids=[9], allowed_token_ids=[5, 9]),
        ]
    )
    arrays = [plan.slots, plan.lengths, plan.temperature, plan.top_k, plan.top_p, plan.min_p, plan.penalised, plan.prompt_lengths]
    assert [x.tolist() for x in arrays if x is not None] == [
        [3, 1, 7],
        [3, 1, 4],
        [0.0, 0.5, 2.0],
        [0, 4, 0],
        [1.0, 0.75, 1.0],
        [0.0, 0.5, 0.0],
        [0, 2],
        [2, 3],
    ]
    assert plan.penalties is not None and plan.penalties.tolist() == [[1.5, 0.0, 0.0], [1.0, 0.25, 0.5]]
    assert plan.bias is not None and [x.tolist() for x in plan.bias] == [[1, 1], [7, 3], [1.0, -1.0]]
    assert plan.banned is not None and [x.tolist() for x in plan.banned] == [[2], [9]]
    assert plan.allowed is not None and [x.tolist() for x in plan.allowed] == [[2], [2, 2], [5, 9]]


# Neighbours


def mixture() -> list[Row]:
    return [
        row(),
        row([4, 9], [9, 9], temperature=1.0, seed=3, repetition_penalty=1.4, top_p=0.7),
        row([5] * 20, [6, 6, 7], frequency_penalty=0.5, presence_penalty=0.2),
        row(temperature=0.6, seed=4, top_k=10),
        row(temperature=1.8, seed=5, top_p=0.97, min_p=0.01),
        row(temperature=1.0, seed=6, index=2, logit_bias={3: 4.0}),
        row([1, 2], [3], temperature=1.2, seed=7, allowed_token_ids=range(20, 300), min_new_tokens=4),
        row(bad_token_ids=[0, 1, 2]),
        row(temperature=5.0, seed=8, min_p=0.2),
        row(temperature=1.0, seed=9, top_p=0.9),
    ]


@pytest.mark.parametrize("seed", range(4))
def test_a_row_does_not_depend_on_its_neighbours(seed: int) -> None:
    rows = mixture()
    logits = random_logits(len(rows), 1111, seed, 0.2 + seed)  # from flat to peaked
    alone = [run(logits[i : i + 1], [each]) for i, each in enumerate(rows)]
    assert_like(torch.cat([each.processed for each in alone]), [processed(logits[i], each) for i, each in enumerate(rows)], 1e-3)
    order = np.random.default_rng(seed).permutation(len(rows))
    for some in (order, order[:5], order[5:]):
        together = run(logits[torch.from_numpy(some)], [rows[i] for i in some])
        assert together.tokens.tolist() == [int(alone[i].tokens) for i in some]
        assert torch.equal(together.processed, torch.cat([alone[i].processed for i in some]))


# Logprobs


def score_plan(wanted: Sequence[tuple[int, Sequence[int]]], *, rows: Any = None, targets: Any = None) -> ScorePlan:
    """wanted: of each row the number of alternatives and the ids asked for."""
    k = max((n for n, _ in wanted), default=0)
    top = [i * k + j for i, (n, _) in enumerate(wanted) for j in range(n)]
    ids = [(i, token) for i, (_, tokens) in enumerate(wanted) for token in tokens]
    return ScorePlan(
        rows=np.arange(len(wanted)) if rows is None else np.array(rows, np.int64),
        targets=None if targets is None else np.array(targets, np.int64),
        processed=None,
        k=k,
        top_index=np.array(top, np.int64),
        id_rows=np.array([i for i, _ in ids], np.int64),
        id_columns=np.array([token for _, token in ids], np.int64),
    )


WANTED = [(0, ()), (3, (4, 0)), (1, ()), (0, (99, 7, 5)), (5, (2,)), (0, ())]


def check_block(block: LogprobBlock, logits: Tensor, targets: Sequence[int], wanted: Sequence[tuple[int, Sequence[int]]]) -> None:
    want = logits.double().log_softmax(-1)
    assert block.chosen.dtype == torch.float32 and block.chosen.shape == (len(wanted),)
    close(block.chosen, want[torch.arange(len(wanted)), torch.tensor(targets)])
    top = [
        (i, value, token) for i, (n, _) in enumerate(wanted) for value, token in zip(*(x.tolist() for x in want[i].topk(n)), strict=True)
    ]
    if top:
        close(block.top_values, torch.tensor([value for _, value, _ in top]))
        assert block.top_ids.tolist() == [token for _, _, token in top] and block.top_ids.dtype == torch.int32
    else:
        assert block.top_values is None and block.top_ids is None
    ids = [want[i, token] for i, (_, tokens) in enumerate(wanted) for token in tokens]
    if ids:
        close(block.id_values, torch.stack(ids))
    else:
        assert block.id_values is None


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want.float(), atol=1e-5, rtol=1e-6)


def test_score_against_log_softmax() -> None:
    logits = random_logits(6, 100, 21)
    targets = [3, 4, int(logits[2].argmax()), 7, 2, 99]
    check_block(score(logits, torch.tensor(targets, dtype=torch.int32), score_plan(WANTED), torch.from_numpy), logits, targets, WANTED)
    nothing = [(0, ())] * 6
    check_block(score(logits, torch.tensor(targets), score_plan(nothing), torch.from_numpy), logits, targets, nothing)


def test_a_token_has_the_same_float_wherever_it_appears() -> None:
    logits = random_logits(64, 333, 22, 5.0)
    best = logits.argmax(-1)
    plan = score_plan([(2, (int(token), 5)) for token in best])
    block = score(logits, best, plan, torch.from_numpy)
    assert torch.equal(block.chosen, block.top_values[::2]) and torch.equal(block.chosen, block.id_values[::2])
    assert block.top_ids[::2].tolist() == best.tolist()


def test_score_of_tokens_that_are_masked_out() -> None:
    logits = torch.full((2, 6), -INFINITY)
    logits[0, 2], logits[1, [0, 5]] = 1.5, 0.0
    block = score(logits, torch.tensor([2, 1]), score_plan([(3, (1, 2)), (2, (5,))]), torch.from_numpy)
    assert block.chosen.tolist() == [0.0, -INFINITY]
    half = pytest.approx(-math.log(2))
    assert block.top_values.tolist() == [0.0, -INFINITY, -INFINITY, half, half]
    assert block.id_values.tolist() == [-INFINITY, 0.0, half]


@pytest.mark.parametrize("rows_at_once", [1, 2, 4, 5, 6, 1000])
def test_score_in_pieces(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = 100
    monkeypatch.setattr(module, "LOGITS_PIECE_BYTES", rows_at_once * 4 * vocabulary + 3)
    hidden, head = random_logits(9, 8, 23, 1.0), random_logits(vocabulary, 8, 24, 1.0)
    rows, targets = [8, 0, 2, 3, 4, 7], [3, 4, 99, 7, 2, 0]
    sizes = []

    def lm_head(some: Tensor) -> Tensor:
        sizes.append(len(some))
        return some @ head.T

    plan = score_plan(WANTED, rows=rows, targets=targets)
    block = score_in_pieces(plan, hidden, lm_head, vocabulary, torch.from_numpy)
    check_block(block, (hidden @ head.T)[rows], targets, WANTED)
    assert max(sizes) <= rows_at_once and sum(sizes) == 6
    nothing = [(0, ())] * 6
    check_block(
        score_in_pieces(score_plan(nothing, rows=rows, targets=targets), hidden, lm_head, vocabulary, torch.from_numpy),
        (hidden @ head.T)[rows],
        targets,
        nothing,
    )


def test_processed_logprobs_are_of_the_distribution_that_was_sampled() -> None:
    rows = mixture()
    logits = random_logits(len(rows), 400, 25, 1.5)
    sampled = run(logits, rows)
    block = score(sampled.processed, sampled.tokens, score_plan([(5, (2,))] * len(rows)), torch.from_numpy)
    for i, each in enumerate(rows):
        want = torch.from_numpy(processed(logits[i], each)).log_softmax(-1)
        torch.testing.assert_close(block.chosen[i].double(), want[int(sampled.tokens[i])], atol=1e-4, rtol=0)
        torch.testing.assert_close(block.top_values[5 * i : 5 * i + 5].double(), want.topk(5).values, atol=1e-4, rtol=0)
        torch.testing.assert_close(block.id_values[i].double(), want[2], atol=1e-4, rtol=0)
        assert block.chosen[i] > -INFINITY


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: a team of threads only gets in the way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
