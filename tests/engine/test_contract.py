"""The sentences of the contract (docs/outputs.md) one by one, on the tiny model."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sidestream import Engine, Output, SamplingParams
from sidestream.engine.loop import EngineLoop
from sidestream.errors import EngineDead, InvalidRequest, NoToken, QueueFull
from sidestream.messages import Submit
from sidestream.models.decoder import Decoder

LAYERS, HIDDEN, VOCAB, END = 4, 64, 320, 1
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
Opener = Callable[..., Any]
Same = Callable[..., None]


def ids(count: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(2, VOCAB) for _ in range(count)]


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, temperature=0.0, **more)


def on(count: int, **more: Any) -> SamplingParams:
    """Greedy, and not ended by EOS."""
    return greedy(count, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def solo(open_engine: Opener) -> Iterator[Callable[..., Any]]:
    """Alone, without cache and overlap."""
    with open_engine(overlap=False, disable_radix_cache=True) as engine:
        yield engine.generate


@pytest.fixture(scope="module")
def ending(solo: Callable[..., Any]) -> tuple[list[int], Output]:
    """A prompt whose greedy answer ends with EOS after some tokens, and that answer with all its rows."""
    for seed in range(200):
        prompt = ids(13, seed)
        answer = solo(prompt, greedy(25), return_hidden_states=True, return_logprob=True)
        if answer.finish_reason == "stop" and answer.completion_tokens > 5:
            assert answer.token_ids[-1] == END and END not in answer.token_ids[:-1]
            return prompt, answer
    raise AssertionError("the tiny model never ends")


class Forced:
    """A grammar that admits one sequence of tokens, and fails where it is told to."""

    def __init__(self, tokens: Sequence[int], fails: str = "") -> None:
        self.left = list(tokens)
        self.fails = fails

    def fill_mask(self, mask: npt.NDArray[np.uint32]) -> None:
        if self.fails == "fill_mask" and len(self.left) < 3:
            raise RuntimeError("the grammar is broken")
        mask[:] = 0
        mask[self.left[0] // 32] = np.uint32(1 << (self.left[0] % 32))

    def advance(self, token_id: int) -> bool:
        if self.fails == "advance" and len(self.left) < 3:
            raise RuntimeError("the grammar is broken")
        assert token_id == self.left.pop(0), "a token that the mask did not admit"
        return not self.left


def rows_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


# Rows.


@OVERLAP
@pytest.mark.parametrize("length", [1, 2, 19])
def test_rows_exist_up_to_the_last_token_that_was_fed_back(
    open_engine: Opener, solo: Callable[..., Any], overlap: bool, length: int
) -> None:
    prompt = ids(length)
    everything = solo(prompt, on(9), return_hidden_states=True).hidden_states.data
    with open_engine(overlap=overlap) as engine:
        for count in (0, 1, 2, 7):
            last_position = max(length - 1, length + count - 2)
            output = engine.generate(prompt, on(count), return_hidden_states=True)
            assert output.completion_tokens == len(output.token_ids) == count
            assert list(output.hidden_states.positions) == list(range(last_position + 1))
            rows_close(output.hidden_states.data, everything[: last_position + 1])
            last = engine.generate(prompt, on(count), return_hidden_states="last")
            assert list(last.hidden_states.positions) == [last_position]
            rows_close(last.hidden_states.data, everything[last_position : last_position + 1])


@OVERLAP
def test_nothing_is_sampled_with_max_new_tokens_0(open_engine: Opener, overlap: bool) -> None:
    with open_engine(overlap=overlap) as engine:
        outputs = engine.generate(ids(20), SamplingParams(max_new_tokens=0, n=2), logprob_start_len=0, return_hidden_states="last")
        assert len(outputs) == 2
        for output in outputs:
            assert (output.text, output.token_ids, output.finish_reason, output.matched_stop) == ("", [], "length", None)
            assert (len(output.logprobs.input), output.logprobs.output) == (20, [])
            assert list(output.hidden_states.positions) == [19]
        assert engine.stats()["d2h"]["token"]["copied_bytes"] == 0


@OVERLAP
def test_hidden_states_start(open_engine: Opener, solo: Callable[..., Any], overlap: bool) -> None:
    prompt, length, count = ids(30), 30, 6
    everything = solo(prompt, on(count), return_hidden_states=True, hidden_states_layers=[1, -1]).hidden_states.data
    rows = length + count - 1
    assert everything.shape == (rows, 2, HIDDEN)
    with open_engine(overlap=overlap, chunked_prefill_size=8) as engine:
        for start, first in ((0, 0), (7, 7), (29, 29), (32, 32), (rows - 1, rows - 1), (-1, 29), (-12, 18), (-30, 0)):
            for _ in range(2):  # the second time from a warm cache
                states = engine.generate(
                    prompt, on(count), return_hidden_states=True, hidden_states_start=start, hidden_states_layers=[1, -1]
                ).hidden_states
                assert list(states.positions) == list(range(first, rows)), start
                rows_close(states.data, everything[first:])
        for start in (rows, rows + 1, 10**6):
            states = engine.generate(
                prompt, on(count), return_hidden_states=True, hidden_states_start=start, hidden_states_layers=[1, -1]
            ).hidden_states
            assert list(states.positions) == []
            assert states.data.shape == (0, 2, HIDDEN)
        with pytest.raises(InvalidRequest, match=r"hidden_states_start.*-31.*-30"):
            engine.generate(prompt, on(count), return_hidden_states=True, hidden_states_start=-31)
        with pytest.raises(InvalidRequest, match="hidden_states_start"):
            engine.generate(prompt, on(count), return_hidden_states="last", hidden_states_start=3)


@OVERLAP
def test_layers_come_in_the_order_asked_and_as_often(open_engine: Opener, overlap: bool) -> None:
    with open_engine(overlap=overlap) as engine:

        def states(layers: list[int], mode: Any = True) -> Any:
            return engine.generate(ids(9), on(5, stop="no such text"), return_hidden_states=mode, hidden_states_layers=layers).hidden_states

        every = states([0, 1, 2, 3, 4]).data
        assert every.shape == (13, 5, HIDDEN)
        assert len({every[3, layer].numpy().tobytes() for layer in range(5)}) == 5
        for layers in ([-1, 0, 2], [4, 4, -1, 4], [-5, -4, -3, -2, -1], [3]):
            got = states(layers)
            assert got.layers == tuple(layers)
            rows_close(got.data, every[:, [layer % 5 for layer in layers]])
            last = states(layers, "last")
            assert last.layers == tuple(layers)
            rows_close(last.data, every[-1:, [layer % 5 for layer in layers]])
        rows_close(engine.generate(ids(9), on(5), return_hidden_states=True).hidden_states.data, every[:, 4:])  # the default
        for layer in (5, -6):
            with pytest.raises(InvalidRequest, match=rf"hidden_states_layers.*{layer}"):
                states([0, layer])


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_rows_are_converted_to_the_dtype_asked_for(open_engine: Opener, compute: str) -> None:
    with open_engine(dtype=compute, overlap=True) as engine:
        for mode in (True, "last"):
            outputs = engine.generate(
                [ids(9)] * 4,
                on(5),
                return_hidden_states=mode,
                hidden_states_dtype=["model", "float32", "float16", "bfloat16"],
                hidden_states_layers=[2, -1],
            )
            model, wide, *others = (output.hidden_states.data for output in outputs)
            assert model.dtype == getattr(torch, compute) and wide.dtype == torch.float32
            for data, dtype in zip((model, *others), (model.dtype, torch.float16, torch.bfloat16), strict=True):
                assert data.dtype == dtype
                if compute == "float32":
                    torch.testing.assert_close(data.float(), wide, atol=1e-4, rtol={torch.bfloat16: 2**-7}.get(dtype, 2**-10))
                else:
                    assert torch.equal(data, wide.to(dtype)), dtype  # from the very same row: native rows are float32 inside a forward
            itemsizes = [model.element_size(), 4, 2, 2]
            assert [output.copied_bytes["hidden"] for output in outputs] == [len(model) * 2 * HIDDEN * size for size in itemsizes]


@OVERLAP
def test_an_output_owns_its_rows(open_engine: Opener, overlap: bool) -> None:
    with open_engine(overlap=overlap, disable_radix_cache=True) as engine:
        outputs = engine.generate(ids(20), SamplingParams(max_new_tokens=6, seed=1, n=3, ignore_eos=True), return_hidden_states=True)
        before = [output.hidden_states.data.clone() for output in outputs]
        arena = [(block.data_ptr(), block.data_ptr() + block.nbytes) for block in engine.loop.copies.arena._blocks]
        for output in outputs:
            assert output.hidden_states.data.device.type == "cpu"
            assert not any(low <= output.hidden_states.data.data_ptr() < high for low, high in arena)
        for seed in range(1, 5):  # whatever runs later leaves them as they are
            engine.generate([ids(25, seed), ids(9, seed)], on(6), return_hidden_states=True, logprob_start_len=0)
        assert all(torch.equal(output.hidden_states.data, data) for output, data in zip(outputs, before, strict=True))
        outputs[0].hidden_states.data.fill_(7.0)  # the prompt's rows were computed once, and are nobody else's
        assert torch.equal(outputs[1].hidden_states.data, before[1]) and torch.equal(outputs[2].hidden_states.data, before[2])
        again = engine.generate(ids(20), SamplingParams(max_new_tokens=6, seed=1, n=3, ignore_eos=True), return_hidden_states=True)
        assert torch.equal(again[0].hidden_states.data, before[0])


@OVERLAP
def test_last_is_right_however_the_request_ends(
    open_engine: Opener, solo: Callable[..., Any], ending: tuple[list[int], Output], wait_until_idle: Callable[..., Any], overlap: bool
) -> None:
    prompt, whole = ending
    count, length = whole.completion_tokens, len(prompt)
    free = solo(prompt, on(60), return_hidden_states=True)
    rows = free.hidden_states.data
    place = next(at for at in range(count, 60) if free.token_ids[at] not in free.token_ids[:at])
    third = free.token_ids[place]
    script = ids(4, 1)
    with open_engine(overlap=overlap, constraint=lambda message: Forced(script) if message.rid == "grammar" else None) as engine:
        cut = next(at for at in range(4, 30) if solo(prompt, on(at)).text[-1].isascii())
        text = solo(prompt, on(cut)).text
        stop = text[-2:]
        asked = {
            "EOS": (greedy(40), "stop", END, count),
            "length": (on(7), "length", None, 7),
            "length, with EOS possible": (greedy(count - 1), "length", None, count - 1),
            "EOS as the last token allowed": (greedy(count), "stop", END, count),
            "EOS while the last step is under way": (greedy(count + 1), "stop", END, count),
            "stop token": (on(40, stop_token_ids=[third]), "stop", third, place + 1),
            "stop string": (on(60, stop=stop), "stop", stop, None),
            "one token": (greedy(1), "length", None, 1),
            "grammar": (on(9), "stop", None, 4),
        }
        for name, (sampling, reason, matched, tokens) in asked.items():
            output = engine.generate(prompt, sampling, rid=name, return_hidden_states="last")
            assert (output.finish_reason, output.matched_stop) == (reason, matched), name
            assert tokens is None or output.completion_tokens == tokens, name
            position = max(length - 1, length + output.completion_tokens - 2)
            assert list(output.hidden_states.positions) == [position], name
            assert output.copied_bytes["hidden"] == HIDDEN * 4, name
            if name == "grammar":
                want = solo(prompt + script[:3], greedy(0), return_hidden_states="last").hidden_states.data
            else:
                assert output.token_ids == free.token_ids[: output.completion_tokens], name
                want = rows[position : position + 1]
            rows_close(output.hidden_states.data, want)
        # An abort: the row of the last position computed for the tokens returned.
        parts = engine.stream(prompt, on(400), rid="abort", return_hidden_states="last")
        seen = [next(parts), next(parts)]
        engine.abort("abort")
        seen += parts
        tokens = [token for part in seen for token in part.token_ids]
        assert seen[-1].finish_reason == "abort" and 2 <= len(tokens) < 400
        assert [list(part.hidden_states.positions) for part in seen[:-1]] == [[]] * (len(seen) - 1)
        assert list(seen[-1].hidden_states.positions) == [length + len(tokens) - 2]
        want = solo(prompt + tokens[:-1], greedy(0), return_hidden_states="last").hidden_states.data
        rows_close(seen[-1].hidden_states.data, want)
        # One row per request, once; "last" never discards.
        hidden = wait_until_idle(engine)["d2h"]["hidden"]
        assert hidden["copied_bytes"] == (len(asked) + 1) * HIDDEN * 4
        assert hidden["discarded_bytes"] == 0


@OVERLAP
def test_last_for_all_choices_where_the_context_leaves_room_for_one_token(open_engine: Opener, overlap: bool) -> None:
    with open_engine(overlap=overlap, context_length=24) as engine:
        outputs = engine.generate(ids(23), on(5, n=3), return_hidden_states="last")
        assert [output.completion_tokens for output in outputs] == [1, 1, 1]
        assert [list(output.hidden_states.positions) for output in outputs] == [[22]] * 3
        assert torch.equal(outputs[1].hidden_states.data, outputs[0].hidden_states.data)


# Logprobs.


@OVERLAP
def test_logprob_entries_are_one_per_token(open_engine: Opener, overlap: bool) -> None:
    prompt = ids(21)
    with open_engine(overlap=overlap) as engine:
        for start, count in ((0, 5), (1, 5), (20, 5), (21, 3), (300, 3), (-1, 4), (7, 0), (7, 1)):
            logprobs = engine.generate(
                prompt, on(count), logprob_start_len=start, top_logprobs_num=3, token_ids_logprob=[9, 4, 300]
            ).logprobs
            entries = max(0, 21 - start) if start >= 0 else 0
            assert len(logprobs.input) == len(logprobs.input_top) == len(logprobs.input_ids) == entries
            assert len(logprobs.output) == len(logprobs.output_top) == len(logprobs.output_ids) == count
            for at, (value, top, asked) in enumerate(zip(logprobs.input, logprobs.input_top, logprobs.input_ids, strict=True)):
                if start + at == 0:  # nothing came before it
                    assert value is top is asked is None
                    continue
                assert isinstance(value, float)
                assert len(top) == 3 and [token for _, token in asked] == [9, 4, 300]
            assert [[token for _, token in asked] for asked in logprobs.output_ids] == [[9, 4, 300]] * count
        alone = engine.generate([5], on(2), logprob_start_len=0)
        assert alone.logprobs.input == [None] and len(alone.logprobs.output) == 2


def test_any_logprob_field_implies_return_logprob_and_nothing_else_does(open_engine: Opener) -> None:
    with open_engine() as engine:
        for field, value in (("logprob_start_len", 0), ("top_logprobs_num", 1), ("token_ids_logprob", [3]), ("logprobs_mode", "processed")):
            output = engine.generate(ids(5), on(3), **{field: value})
            assert len(output.logprobs.output) == 3, field
            assert bool(output.logprobs.output_top) == (field == "top_logprobs_num")
            assert bool(output.logprobs.output_ids) == (field == "token_ids_logprob")
            assert bool(output.logprobs.input) == (field == "logprob_start_len")
        assert engine.generate(ids(5), on(3)).logprobs is None
        before = engine.stats()["d2h"]["logprob"]["copied_bytes"]
        engine.generate(ids(5), on(3), return_hidden_states=True)
        assert engine.stats()["d2h"]["logprob"]["copied_bytes"] == before


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_alternatives_are_exactly_k_best_first_and_the_same_floats(open_engine: Opener, mode: str) -> None:
    """The chosen token's number is the very same float wherever it appears, beside requests with other numbers of alternatives."""
    numbers = [0, 1, 5, 100]
    sampling = SamplingParams(max_new_tokens=12, temperature=0.7, seed=5, frequency_penalty=0.5, ignore_eos=True)
    with open_engine() as engine:
        outputs = engine.generate(
            [ids(9)] * 4, sampling, top_logprobs_num=numbers, token_ids_logprob=list(range(VOCAB)), logprobs_mode=mode, logprob_start_len=0
        )
        for number, output in zip(numbers, outputs, strict=True):
            logprobs = output.logprobs
            assert output.token_ids == outputs[0].token_ids
            # The four may have come in steps of different sizes, which PyTorch rounds differently.
            assert logprobs.output == pytest.approx(outputs[0].logprobs.output, abs=1e-4)
            if not number:
                assert logprobs.output_top == logprobs.input_top == []
            pairs = [*zip(logprobs.output, logprobs.output_ids, logprobs.output_top or [[]] * 12, output.token_ids, strict=True)]
            pairs += zip(logprobs.input[1:], logprobs.input_ids[1:], logprobs.input_top[1:] or [[]] * 8, ids(9)[1:], strict=True)
            for chosen, asked, top, token in pairs:
                values = [value for value, _ in asked]
                assert values[token] == chosen
                assert len(top) == number
                assert [value for value, _ in top] == sorted(values, reverse=True)[:number]
                assert len({best for _, best in top}) == number
                assert all(values[best] == value for value, best in top)


def reference_distribution(raw: npt.NDArray[np.float64], sampling: SamplingParams, prompt: list[int], output: list[int]) -> Any:
    """Logprobs after penalties, bias, masks, temperature and filters, in the documented order. raw: [vocabulary] logits."""
    logits = raw.copy()
    for token in set(prompt) | set(output):
        logits[token] *= 1 / sampling.repetition_penalty if logits[token] > 0 else sampling.repetition_penalty
    for token in set(output):
        logits[token] -= sampling.frequency_penalty * output.count(token) + sampling.presence_penalty
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    banned = set(sampling.bad_token_ids)
    if len(output) < sampling.min_new_tokens:
        banned |= {END, *sampling.stop_token_ids}
    if sampling.allowed_token_ids is not None:
        banned |= set(range(VOCAB)) - set(sampling.allowed_token_ids)
    logits[list(banned)] = -math.inf
    if sampling.temperature:
        logits = logits / sampling.temperature
        order = np.argsort(-logits, kind="stable")
        if sampling.top_k > 0:
            logits[order[sampling.top_k :]] = -math.inf
        weights = np.exp(logits - logits.max())
        before = np.cumsum(weights[order]) - weights[order]
        dropped = order[before >= sampling.top_p * weights.sum()]
        logits[weights < sampling.min_p] = -math.inf
        logits[dropped] = -math.inf
    peak = logits.max()
    return logits - peak - np.log(np.exp(logits - peak).sum())


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0, top_k=1, top_p=0.1, min_p=0.9, ignore_eos=True),
        SamplingParams(temperature=0.0, logit_bias={9: 3.0, 8: -2.0}, frequency_penalty=0.7, ignore_eos=True),
        SamplingParams(temperature=0.6, top_k=12, seed=1, ignore_eos=True),
        SamplingParams(temperature=1.3, top_p=0.6, seed=2, presence_penalty=1.0, ignore_eos=True),
        SamplingParams(temperature=0.9, min_p=0.2, seed=3, bad_token_ids=[7, 8, 9], ignore_eos=True),
        SamplingParams(temperature=0.8, top_k=30, top_p=0.8, min_p=0.05, seed=4, repetition_penalty=1.4, ignore_eos=True),
        SamplingParams(seed=5, allowed_token_ids=range(20, 40), min_new_tokens=4, stop_token_ids=[22, 23]),
    ],
    ids=["greedy ignores filters", "greedy", "top_k", "top_p", "min_p", "everything", "masks"],
)
def test_processed_logprobs_are_those_of_the_distribution_sampled_from(open_engine: Opener, sampling: SamplingParams) -> None:
    prompt = ids(6)
    with open_engine() as engine:
        # The model's logits up to a constant would not do for the repetition penalty: take them from the last row itself.
        head = engine.loop.runner.decoder.weights["lm_head"].double()

        def answer(mode: str, beside: list[list[int]]) -> Output:
            outputs = engine.generate(
                [prompt, *beside],
                sampling,
                token_ids_logprob=list(range(VOCAB)),
                logprobs_mode=[mode, *["raw"] * len(beside)],
                return_hidden_states=True,
                hidden_states_start=-1,
                logprob_start_len=0,
            )
            return outputs[0]

        processed = answer("processed", [ids(4, 1), ids(5, 2)])
        raw = answer("raw", [])
    assert processed.token_ids == raw.token_ids
    for one, other in zip(processed.logprobs.input[1:], raw.logprobs.input[1:], strict=True):
        assert abs(one - other) < 1e-4  # input logprobs are always raw
    for step, token in enumerate(raw.token_ids):
        logits = (head @ raw.hidden_states.data[step, 0].double()).numpy()
        plain = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert abs(plain[token] - raw.logprobs.output[step]) < 1e-4
        want = reference_distribution(logits, sampling, prompt, raw.token_ids[:step])
        got = np.array([value for value, _ in processed.logprobs.output_ids[step]])
        assert (np.isinf(got) == np.isinf(want)).all(), step
        finite = np.isfinite(want)
        np.testing.assert_allclose(got[finite], want[finite], atol=1e-4)
        assert processed.logprobs.output[step] == got[token]
        assert math.isclose(np.exp(got).sum(), 1.0, abs_tol=1e-4)
        if sampling.temperature == 0:
            assert token == want.argmax()


# Ends.


@OVERLAP
def test_the_end_counts_and_only_the_text_is_trimmed(
    open_engine: Opener, solo: Callable[..., Any], ending: tuple[list[int], Output], overlap: bool
) -> None:
    prompt, whole = ending
    with open_engine(overlap=overlap) as engine:
        got = engine.generate(prompt, greedy(40), return_logprob=True, return_hidden_states=True)
        assert got.token_ids[-1] == END and (got.finish_reason, got.matched_stop) == ("stop", END)
        assert got.completion_tokens == len(got.token_ids) == len(got.logprobs.output)
        assert got.text == engine.tokenizer.decode(got.token_ids[:-1])
        shown = engine.generate(prompt, greedy(40, skip_special_tokens=False))
        assert shown.text == got.text  # the token that ended the request has no text
        # EOS as an ordinary token.
        past = engine.generate(prompt, on(whole.completion_tokens + 4))
        assert past.token_ids[: whole.completion_tokens] == whole.token_ids
        assert (past.finish_reason, past.completion_tokens) == ("length", whole.completion_tokens + 4)
        assert "<|end|>" not in past.text
        assert "<|end|>" in engine.generate(prompt, on(whole.completion_tokens + 4, skip_special_tokens=False)).text
        # A stop token ends it even where EOS does not.
        stopped = engine.generate(prompt, on(40, stop_token_ids=[END]))
        assert (stopped.token_ids, stopped.finish_reason, stopped.matched_stop) == (whole.token_ids, "stop", END)


@OVERLAP
def test_min_new_tokens_masks_the_tokens_that_would_end_it(open_engine: Opener, ending: tuple[list[int], Output], overlap: bool) -> None:
    prompt, whole = ending
    count = whole.completion_tokens
    with open_engine(overlap=overlap) as engine:
        for least in (count - 1, count, count + 6):
            got = engine.generate(
                prompt,
                greedy(least + 12, min_new_tokens=least, stop_token_ids=[50, 51]),
                token_ids_logprob=[END, 50, 51],
                logprobs_mode="processed",
            )
            assert got.completion_tokens >= least
            assert not {END, 50, 51} & set(got.token_ids[: least - 1])
            for step, pairs in enumerate(got.logprobs.output_ids):
                assert all((value == -math.inf) == (step < least) for value, _ in pairs), step
            # Nothing was in the way before EOS, and nothing is any more after min_new_tokens.
            assert got.token_ids[: count - 1] == whole.token_ids[: count - 1]
            assert (got.token_ids == whole.token_ids) == (least < count)


@OVERLAP
def test_min_new_tokens_passes_over_an_early_stop_string(open_engine: Opener, overlap: bool) -> None:
    text = "ab STOP cd STOP ef"
    with open_engine() as engine:
        by_bytes = {engine.tokenizer.token_bytes(token): token for token in range(2, VOCAB)}
    script = [by_bytes[byte.encode()] for byte in text]
    with open_engine(overlap=overlap, constraint=lambda _: Forced(script)) as engine:
        for least, shown, tokens in ((0, "ab ", 7), (7, "ab ", 7), (8, "ab STOP cd ", 15), (15, "ab STOP cd ", 15), (16, text, 18)):
            output = engine.generate(ids(5), greedy(30, stop="STOP", min_new_tokens=least))
            assert (output.text, output.completion_tokens) == (shown, tokens), least
            assert (output.finish_reason, output.matched_stop) == ("stop", None if least == 16 else "STOP")
            assert "".join(part.text for part in engine.stream(ids(5), greedy(30, stop="STOP", min_new_tokens=least))) == shown


@OVERLAP
def test_the_earliest_stop_string_is_reported(open_engine: Opener, overlap: bool) -> None:
    with open_engine() as engine:
        by_bytes = {engine.tokenizer.token_bytes(token): token for token in range(2, VOCAB)}
    script = [by_bytes[byte.encode()] for byte in "one two three four"]
    with open_engine(overlap=overlap, constraint=lambda _: Forced(script)) as engine:
        for stops, matched, shown in (
            (("four", "three"), "three", "one two "),
            (("wo thr", "three"), "wo thr", "one t"),
            (("e",), "e", "on"),
        ):
            output = engine.generate(ids(5), greedy(30, stop=stops), return_logprob=True)
            assert (output.matched_stop, output.text) == (matched, shown)
            assert output.completion_tokens == len(output.logprobs.output) == "one two three four".index(matched) + len(matched)


@OVERLAP
def test_the_end_of_the_context_is_length(open_engine: Opener, overlap: bool) -> None:
    with open_engine(overlap=overlap, context_length=40) as engine:
        assert engine.context_length == 40
        output = engine.generate(ids(33), on(128), return_logprob=True, return_hidden_states="last")
        assert (output.completion_tokens, output.finish_reason) == (7, "length")
        assert list(output.hidden_states.positions) == [38]
        assert len(output.logprobs.output) == 7


# Several prompts, several choices.


@OVERLAP
def test_choices_come_in_order(open_engine: Opener, solo: Callable[..., Any], assert_same: Same, overlap: bool) -> None:
    prompts = [ids(9), ids(14, 1)]
    sampling = SamplingParams(max_new_tokens=8, seed=3, n=3, ignore_eos=True)
    with open_engine(overlap=overlap) as engine:
        outputs = engine.generate(prompts, sampling, rid=["a", "b"], logprob_start_len=0, return_hidden_states=True)
        assert [(output.rid, output.index) for output in outputs] == [(rid, index) for rid in "ab" for index in range(3)]
        assert [output.prompt_tokens for output in outputs] == [9] * 3 + [14] * 3
        for prompt, group in ((prompts[0], outputs[:3]), (prompts[1], outputs[3:])):
            assert len({tuple(output.token_ids) for output in group}) == 3
            for got, want in zip(group, solo(prompt, sampling, logprob_start_len=0, return_hidden_states=True), strict=True):
                assert_same(got, want)
        # One prompt gives one Output, with n > 1 a list; a list of prompts always a list.
        assert isinstance(engine.generate(prompts[0], on(1)), Output)
        assert isinstance(engine.generate(prompts[0], on(1, n=2)), list)
        assert isinstance(engine.generate([prompts[0]], on(1)), list)
        assert engine.generate([], on(1)) == []
        # Greedy choices are all the same.
        assert len({tuple(output.token_ids) for output in engine.generate(prompts[0], on(9, n=4))}) == 1


def test_a_later_choice_may_arrive_when_the_first_has_ended(open_engine: Opener, assert_same: Same, solo: Callable[..., Any]) -> None:
    """The caller's thread may stall between the choices it submits."""
    sampling = SamplingParams(max_new_tokens=2, seed=1, n=3, ignore_eos=True)
    aborts: list[threading.Thread] = []
    outputs = {"return_hidden_states": True, "logprob_start_len": 0}
    want = solo(ids(20), sampling, **outputs)
    with open_engine() as engine:
        inbox = engine.loop.inbox

        class Slow:
            def put(self, message: Any) -> None:
                inbox.put(message)
                if isinstance(message, Submit):
                    if message.rid == "aborted" and message.index == 0:
                        aborts.append(threading.Thread(target=engine.abort, args=("aborted",)))
                        aborts[0].start()
                    time.sleep(0.1)

            def __getattr__(self, name: str) -> Any:
                return getattr(inbox, name)

        engine.loop.inbox = Slow()
        for got, alone in zip(engine.generate(ids(20), sampling, **outputs), want, strict=True):
            assert_same(got, alone)
        # An abort that comes meanwhile ends all of them.
        ended = engine.generate(ids(20), on(400, n=3), rid="aborted")
        assert [output.finish_reason for output in ended] == ["abort"] * 3
        aborts[0].join()
        engine.loop.inbox = inbox


def test_every_keyword_takes_one_value_or_one_per_prompt(open_engine: Opener) -> None:
    prompts = [ids(6, seed) for seed in range(3)]
    with open_engine() as engine:
        outputs = engine.generate(
            prompts,
            [on(1), on(2), SamplingParams(max_new_tokens=3, seed=1, ignore_eos=True)],
            rid=["x", "y", "z"],
            return_logprob=[False, True, False],
            top_logprobs_num=[0, 0, 2],
            token_ids_logprob=[None, [4, 5], [6]],
            return_hidden_states=[True, "last", False],
            hidden_states_layers=[[0], [1, 2], [3]],
            hidden_states_dtype="bfloat16",
        )
        assert [output.rid for output in outputs] == ["x", "y", "z"]
        assert [output.completion_tokens for output in outputs] == [1, 2, 3]
        assert outputs[0].logprobs is None
        assert [token for _, token in outputs[1].logprobs.output_ids[0]] == [4, 5] and outputs[1].logprobs.output_top == []
        assert [token for _, token in outputs[2].logprobs.output_ids[0]] == [6] and len(outputs[2].logprobs.output_top[0]) == 2
        assert [output.hidden_states and output.hidden_states.layers for output in outputs] == [(0,), (1, 2), None]
        assert outputs[0].hidden_states.data.shape == (6, 1, HIDDEN) and outputs[1].hidden_states.data.shape == (1, 2, HIDDEN)
        shared = engine.generate(prompts, on(1), token_ids_logprob=[4, 5], return_hidden_states=True, hidden_states_layers=[1, 2])
        assert all([token for _, token in output.logprobs.output_ids[0]] == [4, 5] for output in shared)
        assert all(output.hidden_states.layers == (1, 2) for output in shared)
        for keywords in (
            {"rid": ["x", "y"]},
            {"return_logprob": [True]},
            {"hidden_states_layers": [[1], [2]], "return_hidden_states": True},
            {"sampling_params": [on(1)]},
        ):
            with pytest.raises(InvalidRequest, match=rf"{next(iter(keywords))}.*3 prompts"):
                engine.generate(prompts, **{"sampling_params": on(1)} | keywords)


# Names of requests, aborts, the queue.


@OVERLAP
def test_an_open_request_keeps_its_id_to_itself(open_engine: Opener, overlap: bool) -> None:
    with open_engine(overlap=overlap) as engine:
        parts = engine.stream(ids(5), on(300), rid="mine")
        next(parts)
        with pytest.raises(InvalidRequest, match=r"rid.*mine"):
            engine.generate(ids(5), on(1), rid="mine")
        with pytest.raises(InvalidRequest, match=r"rid.*mine"):
            engine.stream(ids(5), on(1), rid="mine")
        before = engine.stats()["forward_tokens"]
        with pytest.raises(InvalidRequest, match=r"rid.*twice"):
            engine.generate([ids(200), ids(200, 1)], on(1), rid=["twice", "twice"])
        assert engine.stats()["forward_tokens"] - before < 150, "one of the two was queued"
        assert len(list(parts)) > 50  # the one that has the id was not disturbed
        assert engine.generate(ids(5), on(1), rid="mine").rid == "mine"
        first, second = engine.generate([ids(5)] * 2, on(1))
        assert first.rid and second.rid and first.rid != second.rid


@OVERLAP
def test_an_abort_returns_what_there_is_and_touches_nobody_else(
    open_engine: Opener, solo: Callable[..., Any], assert_same: Same, overlap: bool
) -> None:
    want = solo(ids(8), on(40), return_logprob=True)
    with open_engine(overlap=overlap, max_running_requests=2) as engine:
        engine.abort("nobody")  # ignored
        running = engine.stream(ids(9, 1), on(400), rid="running")
        neighbour = engine.stream(ids(8), on(40), rid="neighbour", return_logprob=True)
        waiting = engine.stream(ids(10, 2), on(400, n=2), rid="waiting", return_hidden_states="last", logprob_start_len=0)
        next(running)
        engine.abort("waiting")
        engine.abort("nobody")
        ends = list(waiting)
        assert sorted(part.index for part in ends) == [0, 1]
        for part in ends:
            assert (part.token_ids, part.text, part.finish_reason, part.completion_tokens) == ([], "", "abort", 0)
            assert part.hidden_states.data.shape == (0, 1, HIDDEN)
        engine.abort("running")
        assert [part.finish_reason for part in running][-1] == "abort"
        engine.abort("running")  # over already
        parts = list(neighbour)
        assert [token for part in parts for token in part.token_ids] == want.token_ids
        assert [part.finish_reason for part in parts][-1] == "length"
        assert_same(engine.generate(ids(8), on(40), return_logprob=True), want)


def test_generate_waits_for_room_in_the_queue_and_stream_is_refused(open_engine: Opener) -> None:
    with open_engine(max_queued_requests=8, max_running_requests=16) as engine:
        prompts = [[2 + i % 300, 2 + i // 300, 7] for i in range(2000)]
        outputs = engine.generate(prompts, on(1))
        assert len(outputs) == 2000
        assert outputs[1234].token_ids == engine.generate(prompts[1234], on(1)).token_ids
        assert len({tuple(output.token_ids) for output in outputs}) > 100
        parts = [engine.stream(ids(5, seed), on(400)) for seed in range(16 + 8)]
        before = engine.stats()
        with pytest.raises(QueueFull) as refused:
            engine.stream(ids(5), on(4), rid="refused")
        assert refused.value.status == 429 or refused.value.status == 503
        assert "24" in str(refused.value)
        assert before["running"] + before["waiting"] <= 24
        parts.pop().close()
        deadline = time.monotonic() + 20
        while True:  # a place comes back with an abort
            try:
                assert len(list(engine.stream(ids(5), on(4), rid="refused"))) >= 1
                break
            except QueueFull:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        for each in parts:
            each.close()


def test_calls_of_several_threads_do_not_mix(open_engine: Opener, solo: Callable[..., Any], assert_same: Same) -> None:
    prompts = [[ids(5 + i + j, i * 7 + j) for j in range(4)] for i in range(6)]
    want = [solo(group, on(15), return_logprob=True, return_hidden_states="last") for group in prompts]
    with open_engine(overlap=True, max_running_requests=8, max_queued_requests=2) as engine:
        got: dict[int, list[Output]] = {}

        def ask(i: int) -> None:
            got[i] = engine.generate(prompts[i], on(15), return_logprob=True, return_hidden_states="last")

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    for i in range(6):
        for one, other in zip(got[i], want[i], strict=True):
            assert_same(one, other)


# Bad input.

BAD: list[tuple[str, tuple[str, ...], Callable[[Engine], Any]]] = [
    ("prompt", ("empty",), lambda e: e.generate("", on(1))),
    ("prompt", ("empty",), lambda e: e.generate([[5, 6], []], on(1))),
    ("prompt", ("320", "319"), lambda e: e.generate([5, 320], on(1))),
    ("prompt", ("-3", "319"), lambda e: e.generate([-3], on(1))),
    ("prompt", ("2.5",), lambda e: e.generate([5, 2.5], on(1))),
    ("prompt", ("513", "512"), lambda e: e.generate(ids(513), on(0))),
    ("prompt", ("512",), lambda e: e.generate(ids(512), on(4))),
    ("sampling_params", ("dict",), lambda e: e.generate(ids(5), {"temperature": 0})),
    ("max_new_tokens", ("-1", "0"), lambda e: e.generate(ids(5), SamplingParams(max_new_tokens=-1))),
    ("min_new_tokens", ("9", "5"), lambda e: e.generate(ids(5), SamplingParams(max_new_tokens=5, min_new_tokens=9))),
    ("temperature", ("-0.5", "0"), lambda e: e.generate(ids(5), SamplingParams(temperature=-0.5))),
    ("temperature", ("nan",), lambda e: e.generate(ids(5), SamplingParams(temperature=math.nan))),
    ("top_p", ("0", "1"), lambda e: e.generate(ids(5), SamplingParams(top_p=0.0))),
    ("top_p", ("1.5", "1"), lambda e: e.generate(ids(5), SamplingParams(top_p=1.5))),
    ("top_k", ("-2", "-1"), lambda e: e.generate(ids(5), SamplingParams(top_k=-2))),
    ("min_p", ("2", "1"), lambda e: e.generate(ids(5), SamplingParams(min_p=2))),
    ("presence_penalty", ("3", "2"), lambda e: e.generate(ids(5), SamplingParams(presence_penalty=3))),
    ("repetition_penalty", ("0", "0.01"), lambda e: e.generate(ids(5), SamplingParams(repetition_penalty=0))),
    ("stop", ("",), lambda e: e.generate(ids(5), SamplingParams(stop=["a", ""]))),
    ("stop_token_ids", ("320", "319"), lambda e: e.generate(ids(5), on(1, stop_token_ids=[320]))),
    ("logit_bias", ("101", "100"), lambda e: e.generate(ids(5), on(1, logit_bias={5: 101}))),
    ("logit_bias", ("5000", "319"), lambda e: e.generate(ids(5), on(1, logit_bias={5000: 1}))),
    ("allowed_token_ids", ("320", "319"), lambda e: e.generate(ids(5), on(1, allowed_token_ids=[320]))),
    ("allowed_token_ids", ("empty",), lambda e: e.generate(ids(5), on(1, allowed_token_ids=[]))),
    ("bad_token_ids", ("320",), lambda e: e.generate(ids(5), on(1, bad_token_ids=range(320)))),
    ("n", ("0", "1"), lambda e: e.generate(ids(5), on(1, n=0))),
    ("n", ("129", "128"), lambda e: e.generate(ids(5), on(1, n=129))),
    ("seed", (str(2**64),), lambda e: e.generate(ids(5), on(1, seed=2**64))),
    ("top_logprobs_num", ("101", "100"), lambda e: e.generate(ids(5), on(1), top_logprobs_num=101)),
    ("top_logprobs_num", ("-1", "0"), lambda e: e.generate(ids(5), on(1), top_logprobs_num=-1)),
    ("logprob_start_len", ("-2", "-1"), lambda e: e.generate(ids(5), on(1), logprob_start_len=-2)),
    ("token_ids_logprob", ("320", "319"), lambda e: e.generate(ids(5), on(1), token_ids_logprob=[320])),
    ("token_ids_logprob", ("7",), lambda e: e.generate(ids(5), on(1), token_ids_logprob=[7, 7])),
    ("logprobs_mode", ("cooked", "raw"), lambda e: e.generate(ids(5), on(1), logprobs_mode="cooked")),
    ("return_hidden_states", ("first",), lambda e: e.generate(ids(5), on(1), return_hidden_states="first")),
    ("hidden_states_start", ("-6", "-5"), lambda e: e.generate(ids(5), on(1), return_hidden_states=True, hidden_states_start=-6)),
    ("hidden_states_layers", ("5", "4"), lambda e: e.generate(ids(5), on(1), return_hidden_states=True, hidden_states_layers=[5])),
    ("hidden_states_layers", ("empty",), lambda e: e.generate(ids(5), on(1), return_hidden_states=True, hidden_states_layers=[])),
    ("hidden_states_dtype", ("int8", "float16"), lambda e: e.generate(ids(5), on(1), hidden_states_dtype="int8")),
    ("hidden_state_layers", ("hidden_states_layers",), lambda e: e.generate(ids(5), on(1), hidden_state_layers=[1])),
    ("rid", ("''",), lambda e: e.generate(ids(5), on(1), rid="")),
    # Outputs that are too large: one row for the arena of 2,000 bytes, and all of them for the limit of 100,000.
    ("arena_memory", ("2052", "2000"), lambda e: e.generate(ids(5), return_hidden_states=True, hidden_states_layers=[0] * 8)),
    ("return_hidden_states", ("100000",), lambda e: e.generate(ids(400), on(1), return_hidden_states=True)),
]  # fmt: skip


def test_bad_input_is_refused_before_anything_is_queued(open_engine: Opener) -> None:
    """With the field, the value and the limit in the message."""
    with open_engine(arena_memory=2000, max_output_bytes=100_000, max_running_requests=4) as engine:
        good = engine.generate(ids(5), on(3)).token_ids
        before = engine.stats()
        for field, words, call in BAD:
            with pytest.raises(InvalidRequest) as refused:
                call(engine)
            message = str(refused.value)
            assert refused.value.status == 400
            assert field in message, message
            assert all(word in message for word in words), (words, message)
        # One bad prompt among good ones: none of them runs.
        with pytest.raises(InvalidRequest, match="token_ids_logprob"):
            engine.generate([ids(5), ids(6)], on(3), token_ids_logprob=[[1], [999]])
        assert engine.stats() == before
        assert engine.generate(ids(5), on(3)).token_ids == good


# The cache.


@OVERLAP
@pytest.mark.parametrize(("page_size", "whole", "started", "scored"), [(1, 47, 20, 19), (16, 32, 16, 16), (4, 44, 20, 16)])
def test_cached_tokens(open_engine: Opener, overlap: bool, page_size: int, whole: int, started: int, scored: int) -> None:
    """Never the last prompt token, and only up to the first row that is wanted."""
    prompt = ids(48)
    with open_engine(overlap=overlap, page_size=page_size) as engine:
        assert engine.generate(prompt, on(5)).cached_tokens == 0
        assert engine.generate(prompt, on(5)).cached_tokens == whole
        assert engine.generate(prompt, on(5), return_hidden_states="last").cached_tokens == whole
        assert engine.generate(prompt, on(5), return_hidden_states=True, hidden_states_start=20).cached_tokens == started
        assert engine.generate(prompt, on(5), return_hidden_states=True).cached_tokens == 0
        assert engine.generate(prompt, on(5), return_logprob=True).cached_tokens == whole
        assert engine.generate(prompt, on(5), logprob_start_len=20).cached_tokens == scored  # the row before the first entry
        assert engine.generate(prompt, on(5), logprob_start_len=0).cached_tokens == 0
        assert [output.cached_tokens for output in engine.generate(prompt, on(5, n=3))] == [whole] * 3
        other = ids(48, 1)
        assert [output.cached_tokens for output in engine.generate(other, on(5, n=3))] == [0] * 3  # not what the first choice left
        assert all(output.prompt_tokens == 48 for output in engine.generate([prompt, other], on(1)))
        stream = list(engine.stream(prompt, on(5)))
        assert {part.cached_tokens for part in stream} == {whole}


@OVERLAP
@pytest.mark.parametrize("page_size", [1, 16])
def test_requests_that_arrive_together_compute_a_shared_prefix_once(
    open_engine: Opener, solo: Callable[..., Any], assert_same: Same, overlap: bool, page_size: int
) -> None:
    base = ids(64)
    prompts = [base + ids(4, seed) for seed in range(1, 7)]
    want = [solo(prompt, on(1), return_logprob=True) for prompt in prompts]
    for chunk in (512, 16):
        with open_engine(overlap=overlap, page_size=page_size, chunked_prefill_size=chunk) as engine:
            outputs = engine.generate(prompts, on(1), return_logprob=True)
            for got, alone in zip(outputs, want, strict=True):
                assert_same(got, alone)
            assert engine.stats()["forward_tokens"] == 68 + 5 * 4
            assert [output.cached_tokens for output in outputs] == [0] + [64] * 5
            before = engine.stats()["forward_tokens"]
            other = ids(64, 99)
            engine.generate(other, on(1, n=4))
            # All but the last token come from the first choice, in whole pages.
            assert engine.stats()["forward_tokens"] - before == 64 + 3 * (1 if page_size == 1 else 16)


def test_one_token_takes_one_forward(open_engine: Opener) -> None:
    """Ends that are known by arithmetic get no further step."""
    with open_engine(overlap=True) as engine:
        for count in (0, 1, 2, 5):
            before = engine.stats()
            engine.generate(ids(10, count), on(count))
            after = engine.stats()
            assert after["steps"] - before["steps"] == max(1, count)
            assert after["forward_tokens"] - before["forward_tokens"] == 10 + max(0, count - 1)


def test_flush_cache_drops_what_no_running_request_uses(open_engine: Opener) -> None:
    with open_engine(page_size=4) as engine:
        assert engine.flush_cache() == 0
        engine.generate(ids(40), on(1))
        engine.generate(ids(20, 1), on(1))
        assert engine.stats()["kv_tokens_cached"] == 60
        parts = engine.stream(ids(40) + [9], on(300))
        next(parts)
        assert engine.flush_cache() == 20  # the prefix in use stays
        assert engine.stats()["kv_tokens_cached"] == 40
        parts.close()
        assert engine.generate(ids(40), on(1)).cached_tokens == 36
        assert engine.generate(ids(20, 1), on(1)).cached_tokens == 0
        engine.flush_cache()
        assert engine.stats()["kv_tokens_free"] == engine.stats()["kv_tokens_total"] == 4096


@OVERLAP
def test_memory_pressure_evicts_what_was_used_least_recently(
    open_engine: Opener, solo: Callable[..., Any], assert_same: Same, overlap: bool
) -> None:
    prompts = [ids(64, seed) for seed in range(3)]
    want = [solo(prompt, on(3), return_logprob=True) for prompt in prompts]
    with open_engine(overlap=overlap, page_size=16, kv_tokens=160) as engine:  # two of them fit

        def cached(which: int) -> int:
            output = engine.generate(prompts[which], on(3), return_logprob=True)
            assert_same(output, want[which])
            return output.cached_tokens

        assert [cached(0), cached(1)] == [0, 0]
        assert cached(0) == 48  # used again: now 1 is the older one
        assert cached(2) == 0
        assert cached(0) == 48
        assert cached(1) < 48, "the one used least recently should have gone"
        assert engine.stats()["retracted"] == 0


# The ledger.


@OVERLAP
def test_the_ledger_counts_every_byte(open_engine: Opener, wait_until_idle: Callable[..., Any], overlap: bool) -> None:
    def ledger(engine: Engine) -> dict[str, Any]:
        return wait_until_idle(engine)["d2h"]

    with open_engine(overlap=overlap, disable_radix_cache=True) as engine:
        output = engine.generate(ids(10), on(5))
        assert output.copied_bytes == {"token": 20, "logprob": 0, "hidden": 0}
        d2h = ledger(engine)
        assert d2h["token"] == {"copied_bytes": 20, "skipped_bytes": 0, "discarded_bytes": 0}
        assert d2h["logprob"] == {"copied_bytes": 0, "skipped_bytes": 20, "discarded_bytes": 0}
        assert d2h["hidden"] == {"copied_bytes": 0, "skipped_bytes": 14 * HIDDEN * 4, "discarded_bytes": 0}
    with open_engine(overlap=overlap, disable_radix_cache=True) as engine:
        output = engine.generate(ids(10), on(5), return_hidden_states=True, hidden_states_layers=[0, -1, -1], hidden_states_start=3)
        assert output.copied_bytes == {"token": 20, "logprob": 0, "hidden": 11 * 3 * HIDDEN * 4}
        d2h = ledger(engine)
        assert d2h["hidden"]["copied_bytes"] == 11 * 3 * HIDDEN * 4
        # Step by step, and not below 0: the prompt's 10 rows less twice 7, then each row less twice itself.
        assert d2h["hidden"]["skipped_bytes"] == 0
    with open_engine(overlap=overlap, disable_radix_cache=True) as engine:
        engine.generate(ids(10), on(5), return_hidden_states=True, hidden_states_layers=[0, 1])
        assert ledger(engine)["hidden"]["skipped_bytes"] == 14 * HIDDEN * 4  # the final layer never moved
        engine.generate(ids(10), on(5), return_hidden_states="last")
        assert ledger(engine)["hidden"]["skipped_bytes"] == (14 + 13) * HIDDEN * 4
        engine.generate(ids(10), on(5, stop="no such text"), return_hidden_states="last")  # a late copy
        assert ledger(engine)["hidden"]["skipped_bytes"] == (14 + 13 + 13) * HIDDEN * 4
    with open_engine(overlap=overlap, disable_radix_cache=True) as engine:
        output = engine.generate(ids(10), on(5), logprob_start_len=4, top_logprobs_num=3, token_ids_logprob=[8, 9])
        row = 4 + 3 * 8 + 2 * 4
        assert output.copied_bytes == {"token": 20, "logprob": (6 + 5) * row, "hidden": 0}
        assert ledger(engine)["logprob"] == {"copied_bytes": (6 + 5) * row, "skipped_bytes": 0, "discarded_bytes": 0}
    with open_engine(overlap=overlap) as engine:  # shared prompt rows once
        outputs = engine.generate(ids(10), on(5, n=3), return_hidden_states=True, logprob_start_len=0)
        assert [len(output.hidden_states.positions) for output in outputs] == [14] * 3
        assert [output.copied_bytes["hidden"] for output in outputs] == [14 * HIDDEN * 4, 4 * HIDDEN * 4, 4 * HIDDEN * 4]
        assert [output.copied_bytes["logprob"] for output in outputs] == [(9 + 5) * 4, 5 * 4, 5 * 4]
        assert ledger(engine)["hidden"]["copied_bytes"] == 22 * HIDDEN * 4


@OVERLAP
def test_what_is_computed_for_nothing_is_counted_as_discarded(
    open_engine: Opener, ending: tuple[list[int], Output], wait_until_idle: Callable[..., Any], overlap: bool
) -> None:
    prompt, whole = ending
    with open_engine(overlap=overlap) as engine:
        engine.generate(prompt, greedy(40), return_hidden_states=True, hidden_states_layers=[0, 1], top_logprobs_num=1)
        d2h = wait_until_idle(engine)["d2h"]
        extra = 1 if overlap else 0  # the step launched before the host saw EOS
        rows, tokens = len(whole.hidden_states.positions), whole.completion_tokens
        assert d2h["token"] == {"copied_bytes": 4 * (tokens + extra), "skipped_bytes": 0, "discarded_bytes": 4 * extra}
        assert d2h["hidden"]["copied_bytes"] == (rows + extra) * 2 * HIDDEN * 4
        assert d2h["hidden"]["discarded_bytes"] == extra * 2 * HIDDEN * 4
        assert d2h["logprob"]["copied_bytes"] == (tokens + extra) * 12
        assert d2h["logprob"]["discarded_bytes"] == extra * 12
        assert d2h["issue_seconds"] > 0 and d2h["wait_seconds"] > 0


def test_stats_have_the_names_of_the_contract(open_engine: Opener) -> None:
    with open_engine() as engine:
        stats = engine.stats()
        names = "d2h running waiting kv_tokens_total kv_tokens_free kv_tokens_cached steps forward_tokens retracted"
        assert set(stats) >= set(names.split())
        assert set(stats["d2h"]) == {"token", "logprob", "hidden", "issue_seconds", "wait_seconds"}
        assert (stats["running"], stats["waiting"], stats["steps"], stats["retracted"]) == (0, 0, 0, 0)
        assert stats["kv_tokens_total"] == stats["kv_tokens_free"] == 4096
        assert engine.generate(ids(16), on(1)).completion_tokens == 1
        assert engine.stats()["kv_tokens_cached"] == 16


# Failure.


@OVERLAP
@pytest.mark.parametrize("fails", ["make", "fill_mask", "advance"])
def test_a_request_that_fails_leaves_its_neighbours_alone(
    open_engine: Opener, solo: Callable[..., Any], assert_same: Same, overlap: bool, fails: str
) -> None:
    want = solo(ids(9), on(30), return_logprob=True)

    def constraint(message: Submit) -> Forced | None:
        if message.rid == "broken" and fails == "make":
            raise RuntimeError("the grammar is broken")
        return Forced([5, 6, 7, 8], fails) if message.rid == "broken" else None

    with open_engine(overlap=overlap, constraint=constraint) as engine:
        neighbour = engine.stream(ids(9), on(30), return_logprob=True, rid="neighbour")
        with pytest.raises(RuntimeError, match="the grammar is broken"):
            engine.generate(ids(7), on(10), rid="broken")
        with pytest.raises(RuntimeError, match="the grammar is broken"):
            list(engine.stream(ids(7), on(10, n=2), rid="broken"))
        assert [token for part in neighbour for token in part.token_ids] == want.token_ids
        assert_same(engine.generate(ids(9), on(30), return_logprob=True), want)


class DeadEnd:
    """A grammar that admits everything twice, and then only `left`."""

    def __init__(self, left: Sequence[int] = ()) -> None:
        self.left = left
        self.count = 0

    def fill_mask(self, mask: npt.NDArray[np.uint32]) -> None:
        mask[:] = 0 if self.count == 2 else 0xFFFFFFFF
        for token in self.left if self.count == 2 else ():
            mask[token // 32] |= np.uint32(1 << (token % 32))

    def advance(self, token_id: int) -> bool:
        self.count += 1
        return False


@OVERLAP
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_request_that_no_token_can_continue_ends_alone(
    open_engine: Opener, solo: Callable[..., Any], assert_same: Same, overlap: bool, temperature: float
) -> None:
    sampling = SamplingParams(max_new_tokens=30, temperature=0.8, seed=3, top_p=0.9, ignore_eos=True)
    want = solo(ids(9), sampling, top_logprobs_num=2)
    grammars = {"nothing": DeadEnd, "only the end": lambda: DeadEnd([END])}
    with open_engine(overlap=overlap, constraint=lambda message: grammars.get(message.rid, lambda: None)()) as engine:
        with torch.inference_mode():
            engine.loop.runner.decoder.embed[17] = math.nan
        broken = {
            "nothing": (ids(7), {}, "at position 9: grammar admits none"),
            "only the end": (ids(7), {"min_new_tokens": 5}, "at position 9: grammar, min_new_tokens admits none"),
            "no number": ([5, 17, 6], {}, "at position 3: the model's logits are not finite"),
        }
        for rid, (prompt, more, message) in broken.items():
            neighbour = engine.stream(ids(9), sampling, top_logprobs_num=2)
            first = next(neighbour)
            for outputs in ({}, {"top_logprobs_num": 2, "return_hidden_states": "last", "logprobs_mode": "processed"}):
                with pytest.raises(NoToken, match=message):
                    engine.generate(prompt, SamplingParams(max_new_tokens=9, temperature=temperature, seed=1, **more), rid=rid, **outputs)
            assert first.token_ids + [token for part in neighbour for token in part.token_ids] == want.token_ids
        assert_same(engine.generate(ids(9), sampling, top_logprobs_num=2), want)


@OVERLAP
def test_the_tokens_before_a_dead_end_are_streamed(open_engine: Opener, overlap: bool) -> None:
    with open_engine(overlap=overlap, constraint=lambda _: DeadEnd()) as engine:
        parts, seen = engine.stream(ids(7), on(9)), []
        with pytest.raises(NoToken):
            for part in parts:
                seen += part.token_ids
        assert len(seen) <= 2 and all(0 <= token < VOCAB for token in seen)


class HalfWritten:
    def fill_mask(self, mask: npt.NDArray[np.uint32]) -> None:
        mask[:3] = 0
        raise RuntimeError("half-way")

    def advance(self, token_id: int) -> bool:
        return False


@OVERLAP
def test_a_mask_that_fails_half_way_masks_nothing(open_engine: Opener, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    made = []
    fill_masks = EngineLoop.fill_masks

    def recorded(self: EngineLoop, batch: Any) -> Any:
        made.append(([request.rid for request in batch.requests], fill_masks(self, batch)))
        return made[-1][1]

    monkeypatch.setattr(EngineLoop, "fill_masks", recorded)
    script = ids(40, 4)
    grammars = {"broken": HalfWritten, "forced": lambda: Forced(script)}
    with open_engine(overlap=overlap, constraint=lambda message: grammars[message.rid]()) as engine:
        neighbour = engine.stream(ids(9), on(60), rid="forced")
        with pytest.raises(RuntimeError, match="half-way"):
            engine.generate(ids(7), on(10), rid="broken")
        assert [token for part in neighbour for token in part.token_ids] == script
    rows = [mask[rids.index("broken")] for rids, mask in made if "broken" in rids]
    assert rows and all((row == 0xFFFFFFFF).all() for row in rows)


class Broken(Exception):
    pass


@OVERLAP
def test_a_dead_engine_answers_everybody(open_engine: Opener, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    forward, calls = Decoder.forward, 0
    gate = threading.Event()

    def failing(self: Decoder, *args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 5:
            gate.wait(timeout=30)
            raise Broken("out of luck")
        return forward(self, *args)

    monkeypatch.setattr(Decoder, "forward", failing)
    errors: dict[str, BaseException] = {}

    def expecting(name: str, call: Callable[[], Any]) -> threading.Thread:
        def run() -> None:
            try:
                call()
            except BaseException as error:
                errors[name] = error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    with open_engine(overlap=overlap, max_running_requests=2, max_queued_requests=1, checked=False) as engine:
        stream = engine.stream(ids(5), on(100, n=2))
        threads = [
            expecting("stream", lambda: list(stream)),
            expecting("generate", lambda: engine.generate([ids(6)] * 2, on(100))),
        ]
        deadline = time.monotonic() + 20
        while calls < 6:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        # These wait for a place, or for the step that will never end.
        threads += [
            expecting("place", lambda: engine.generate([ids(7)] * 3, on(100))),
            expecting("another place", lambda: engine.generate(ids(8), on(100))),
            expecting("stats", engine.stats),
        ]
        time.sleep(0.1)
        gate.set()
        for thread in threads:
            thread.join(timeout=20)
            assert not thread.is_alive(), "somebody waits for an engine that is dead"
        assert set(errors) == {"stream", "generate", "place", "another place", "stats"}
        for later, call in {
            "generate": lambda: engine.generate(ids(5), on(1)),
            "stream": lambda: engine.stream(ids(5), on(1)),
            "stats": engine.stats,
            "flush": engine.flush_cache,
            "check": engine.check,
        }.items():
            with pytest.raises(EngineDead) as dead:
                call()
            errors["later " + later] = dead.value
        for name, error in errors.items():
            assert isinstance(error, EngineDead), (name, error)
            assert "out of luck" in str(error), name
        engine.abort("nobody")
        started = time.monotonic()
        engine.close()
        assert time.monotonic() - started < 5


@OVERLAP
def test_closing_aborts_what_is_open(open_engine: Opener, overlap: bool) -> None:
    with open_engine(overlap=overlap, checked=False) as engine:
        parts = engine.stream(ids(5), on(400))
        next(parts)
        engine.close()
        assert [part.finish_reason for part in parts][-1] == "abort"
        engine.close()
        for call in (lambda: engine.generate(ids(5), on(1)), lambda: engine.stream(ids(5), on(1)), engine.stats):
            with pytest.raises(EngineDead, match="closed"):
                call()
    assert not any(thread.is_alive() for thread in engine._threads)
