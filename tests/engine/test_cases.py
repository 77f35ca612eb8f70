"""Faults that users reported on other engines, replayed: the cases of shared/cases/README.md that need no server, by their numbers."""

from __future__ import annotations

import json
import math
import random
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import LlamaForCausalLM

from sidestream import Engine, Output, SamplingParams
from sidestream.errors import ContextLengthExceeded, InvalidRequest
from sidestream.messages import Submit
from sidestream.output import output_to_dict

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
Opener = Callable[..., Any]
Same = Callable[..., None]


def ids(count: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(2, 320) for _ in range(count)]


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, temperature=0.0, **more)


def solo(open_engine: Opener, prompt: Any, sampling: SamplingParams, model: Path | None = None, **outputs: Any) -> Any:
    """Alone on a fresh engine with an empty cache."""
    with open_engine(model, overlap=False, disable_radix_cache=True, kv_tokens=4096) as engine:
        return engine.generate(prompt, sampling, **outputs)


class Forced:
    """A grammar that admits one sequence of tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.left = list(tokens)

    def fill_mask(self, mask: npt.NDArray[np.uint32]) -> None:
        mask[:] = 0
        mask[self.left[0] // 32] = np.uint32(1 << (self.left[0] % 32))

    def advance(self, token_id: int) -> bool:
        assert token_id == self.left.pop(0), "a token that the mask did not admit"
        return not self.left


def scripted(scripts: dict[str, Sequence[int]]) -> Callable[[Submit], Forced | None]:
    return lambda message: Forced(scripts[message.rid]) if message.rid in scripts else None


def bytewise(engine: Engine, text: str) -> list[int]:
    """One token for each byte of `text`."""
    by_bytes = {engine.tokenizer.token_bytes(token): token for token in range(2, 320)}
    return [by_bytes[bytes([byte])] for byte in text.encode()]


@OVERLAP
def test_case_01_hidden_states_of_a_batch_of_different_lengths(open_engine: Opener, assert_same: Same, overlap: bool) -> None:
    prompts = [ids(length, length) for length in (3, 17, 40, 9)]
    want = [solo(open_engine, prompt, greedy(1), return_hidden_states=True) for prompt in prompts]
    with open_engine(overlap=overlap) as engine:
        for _ in range(10):
            for prompt, got, alone in zip(prompts, engine.generate(prompts, greedy(1), return_hidden_states=True), want, strict=True):
                assert got.hidden_states.data.shape == (len(prompt), 1, 64)
                assert_same(got, alone)


@OVERLAP
def test_case_02_chunked_prompts_return_every_row(
    open_engine: Opener, assert_same: Same, tiny_llama: Path, tmp_path: Path, overlap: bool
) -> None:
    model = shutil.copytree(tiny_llama, tmp_path / "long")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    prompts = [ids(1500, seed) for seed in range(16)]
    want = [solo(open_engine, prompt, greedy(1), model, return_hidden_states=True) for prompt in prompts[:2]]
    options = {"overlap": overlap, "chunked_prefill_size": 512, "disable_radix_cache": True, "kv_tokens": 16 * 1504}
    with open_engine(model, **options) as engine:
        answers = engine.generate(prompts, greedy(1), return_hidden_states=True)
    for answer in answers:
        assert list(answer.hidden_states.positions) == list(range(1500))
        assert answer.hidden_states.data.shape == (1500, 1, 64)
    # No row twice, none of a neighbour: the rows of any two answers differ.
    assert len({answer.hidden_states.data[700].numpy().tobytes() for answer in answers}) == 16
    for got, alone in zip(answers, want, strict=False):
        assert_same(got, alone)


@OVERLAP
def test_case_03_a_prefix_in_the_cache_takes_no_rows_away(open_engine: Opener, assert_same: Same, overlap: bool) -> None:
    prompt = ids(64)
    longer = prompt + ids(8, 1)
    want = [solo(open_engine, each, greedy(2), return_hidden_states=True) for each in (prompt, longer)]
    with open_engine(overlap=overlap) as engine:
        for each, alone in ((prompt, want[0]), (prompt, want[0]), (longer, want[1])):
            got = engine.generate(each, greedy(2), return_hidden_states=True)
            assert len(got.hidden_states.positions) == len(each) + 1
            assert got.cached_tokens == 0, "the cached prefix is used only up to the first row wanted"
            assert_same(got, alone)
        # From the middle on, the cache serves what comes before.
        tail = engine.generate(longer, greedy(2), return_hidden_states=True, hidden_states_start=40)
        assert tail.cached_tokens == 32
        torch.testing.assert_close(tail.hidden_states.data, want[1].hidden_states.data[40:], atol=1e-4, rtol=0)


@OVERLAP
def test_case_04_no_row_of_a_token_past_the_stop(open_engine: Opener, assert_same: Same, overlap: bool) -> None:
    prompt = ids(12, 4)
    free = solo(open_engine, prompt, greedy(41, ignore_eos=True), return_hidden_states=True)
    with open_engine(overlap=overlap) as engine:
        script = [*free.token_ids[:9], *bytewise(engine, "~~END~~")]
    with open_engine(overlap=overlap, constraint=scripted({"forced": script + free.token_ids[:20]})) as engine:
        got = engine.generate(prompt, greedy(40, stop="~~END"), rid="forced", return_hidden_states=True)
        assert (got.finish_reason, got.matched_stop) == ("stop", "~~END")
        assert got.token_ids == script[:14]  # up to the token that completed the stop string
        assert list(got.hidden_states.positions) == list(range(12 + 14 - 1))
        # The rows of the first 9 tokens are those of the same tokens without a stop.
        torch.testing.assert_close(got.hidden_states.data[:20], free.hidden_states.data[:20], atol=1e-4, rtol=0)
        for count in (1, 2, 3):
            few = engine.generate(prompt, greedy(count, ignore_eos=True), return_hidden_states=True)
            last = engine.generate(prompt, greedy(count, ignore_eos=True), return_hidden_states="last")
            assert few.token_ids == free.token_ids[:count]
            assert len(few.hidden_states.positions) == 12 + count - 1
            assert list(last.hidden_states.positions) == [12 + count - 2]
            torch.testing.assert_close(few.hidden_states.data, free.hidden_states.data[: 12 + count - 1], atol=1e-4, rtol=0)
            torch.testing.assert_close(last.hidden_states.data, few.hidden_states.data[-1:], atol=1e-4, rtol=0)


@OVERLAP
@pytest.mark.parametrize("page_size", [1, 16])
def test_case_05_prompt_logprobs_are_complete_with_a_warm_cache(
    open_engine: Opener, assert_same: Same, overlap: bool, page_size: int
) -> None:
    prompt = ids(33)
    outputs = {"logprob_start_len": 0, "top_logprobs_num": 2}
    want = solo(open_engine, prompt, greedy(4), **outputs)
    with open_engine(overlap=overlap, page_size=page_size) as engine:
        engine.generate(prompt, greedy(4))  # everything is cached now
        answers = [engine.generate(prompt, greedy(4), **outputs) for _ in range(2)]
    for got in answers:
        assert len(got.logprobs.input) == len(got.logprobs.input_top) == 33
        assert got.logprobs.input[0] is None and got.logprobs.input_top[0] is None
        assert all(isinstance(value, float) for value in got.logprobs.input[1:])
        assert_same(got, want)
    assert answers[0].logprobs == answers[1].logprobs


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_case_06_every_answer_is_strictly_valid_json(open_engine: Opener, mode: str) -> None:
    prompt = ids(10)
    with open_engine(constraint=scripted({"grammar": [77]})) as engine:
        asked = {
            "cold": SamplingParams(max_new_tokens=6, temperature=0.01, seed=1, ignore_eos=True),
            "top_k": SamplingParams(max_new_tokens=6, top_k=1, seed=1, ignore_eos=True),
            "grammar": SamplingParams(max_new_tokens=6),
            "bias": SamplingParams(max_new_tokens=6, seed=3, logit_bias=dict.fromkeys(range(300), -100.0), ignore_eos=True),
            "allowed": SamplingParams(max_new_tokens=6, temperature=0.0, allowed_token_ids=[8], ignore_eos=True),
        }
        infinite = {}
        for name, sampling in asked.items():
            output = engine.generate(prompt, sampling, rid=name, top_logprobs_num=5, token_ids_logprob=[9, 8], logprobs_mode=mode)
            body = json.dumps(output_to_dict(output), allow_nan=False)
            answer = json.loads(body, parse_constant=pytest.fail)
            logprobs = answer["logprobs"]
            assert len(logprobs["output"]) == len(answer["token_ids"]) == (1 if name == "grammar" else 6)
            for token, chosen, top in zip(answer["token_ids"], logprobs["output"], logprobs["output_top"], strict=True):
                assert len(top) == 5
                assert chosen > -9999.0, f"{name}: the sampled token cannot be impossible"
                if mode == "processed" or name in ("top_k", "cold"):
                    assert [chosen, token] in top
            infinite[name] = sum(value == -9999.0 for top in logprobs["output_top"] for value, _ in top)
            for values, raw in zip(logprobs["output_ids"], output.logprobs.output_ids, strict=True):
                assert [token for _, token in values] == [9, 8]
                assert [value for value, _ in values] == [-9999.0 if value == -math.inf else value for value, _ in raw]
        if mode == "processed":
            assert infinite["grammar"] == 4 and infinite["allowed"] == 24 and infinite["top_k"] == 24
        else:
            assert set(infinite.values()) == {0}


@OVERLAP
def test_case_08_bad_ids_are_refused_and_nobody_notices(open_engine: Opener, assert_same: Same, overlap: bool) -> None:
    prompt, neighbour = ids(8), ids(9, 1)
    want = solo(open_engine, neighbour, greedy(60, ignore_eos=True), return_logprob=True)
    with open_engine(overlap=overlap) as engine:
        beside: list[Output] = []
        thread = threading.Thread(
            target=lambda: beside.append(engine.generate(neighbour, greedy(60, ignore_eos=True), return_logprob=True))
        )
        thread.start()
        bad: list[tuple[str, str, Callable[[], Any]]] = [
            ("token_ids_logprob", "-1", lambda: engine.generate(prompt, greedy(1), token_ids_logprob=[-1])),
            ("token_ids_logprob", "10000000", lambda: engine.generate(prompt, greedy(1), token_ids_logprob=[10**7])),
            ("logit_bias", "999999", lambda: engine.generate(prompt, greedy(1, logit_bias={"999999": 5}))),
            ("logit_bias", "AI", lambda: engine.generate(prompt, greedy(1, logit_bias={"AI": 1}))),
            ("stop_token_ids", "10000000", lambda: engine.generate(prompt, greedy(1, stop_token_ids=[10**7]))),
            ("prompt", "320", lambda: engine.generate([5, 320], greedy(1))),
            ("prompt", "-1", lambda: engine.generate([5, -1], greedy(1))),
        ]
        for field, value, call in bad:
            with pytest.raises(InvalidRequest) as refused:
                call()
            assert refused.value.status == 400
            assert field in str(refused.value) and value in str(refused.value)
        assert engine.generate(prompt, greedy(3)).completion_tokens == 3
        thread.join(timeout=60)
    assert_same(beside[0], want)


@OVERLAP
def test_case_09_a_stop_string_is_never_shown_in_part(open_engine: Opener, join_choices: Callable[..., Any], overlap: bool) -> None:
    prompt = "Here is the English alphabet: ABC"
    texts = {
        "hit": "DEFGHIJKLM",
        "false alarm": "DEFGHI DEFGH, DEFGHIK, and so on",
        "ends in a prefix": "ABC DEFGH",
        "restart": "DEFDEFGDEFGHIJ!",
    }
    with open_engine() as engine:
        scripts = {name: bytewise(engine, text) for name, text in texts.items()}
    stop = "DEFGHIJ"
    right = {"hit": "", "false alarm": texts["false alarm"], "ends in a prefix": "ABC DEFGH", "restart": "DEFDEFG"}
    with open_engine(overlap=overlap, constraint=scripted(scripts)) as engine:
        for name, text in right.items():
            sampling = greedy(60, stop=stop)
            parts = list(engine.stream(prompt, sampling, rid=name, return_logprob=True))
            shown = ""
            for part in parts[:-1]:
                shown += part.text
                assert not any(shown.endswith(stop[:length]) for length in range(1, len(stop))), (name, shown)
            joined = join_choices(parts)[0]
            whole = engine.generate(prompt, sampling, rid=name, return_logprob=True)
            assert joined.text == whole.text == text
            assert joined.token_ids == whole.token_ids
            assert len(joined.logprobs.output) == len(whole.logprobs.output) == len(whole.token_ids)
            hit = name in ("hit", "restart")
            assert (joined.finish_reason, joined.matched_stop) == ("stop", stop if hit else None)
            if hit:  # the token that completed the stop string counts
                assert whole.token_ids == scripts[name][: texts[name].index(stop) + len(stop)]
            else:
                assert whole.token_ids == scripts[name]


@OVERLAP
def test_case_10_no_part_of_a_character_is_ever_shown(open_engine: Opener, join_choices: Callable[..., Any], overlap: bool) -> None:
    texts = {"emoji": "a😀🎉👩‍👩‍👧b", "czech": "Příliš žluťoučký kůň", "hangul": "안녕하세요 세계"}
    with open_engine() as engine:
        scripts = {name: bytewise(engine, text) for name, text in texts.items()}
        scripts["incomplete"] = bytewise(engine, "ab😀")[:-1]
        merged = {name + " merged": engine.tokenizer.encode(text) for name, text in texts.items()}
    assert any(len(merged[name + " merged"]) < len(scripts[name]) for name in texts)
    texts |= {name + " merged": text for name, text in texts.items()}
    with open_engine(overlap=overlap, constraint=scripted(scripts | merged), jump=False) as engine:
        for name, text in texts.items():
            parts = list(engine.stream(ids(5), greedy(99), rid=name))
            assert not any("\ufffd" in part.text for part in parts), name
            assert "".join(part.text for part in parts) == text
            assert len(parts) > 3
            assert engine.generate(ids(5), greedy(99), rid=name).text == text
        parts = list(engine.stream(ids(5), greedy(99), rid="incomplete"))
        assert [part.text for part in parts if part.text] == ["a", "b", "\ufffd"]
        assert join_choices(parts)[0].token_ids == scripts["incomplete"]
        assert engine.generate(ids(5), greedy(99), rid="incomplete").text == "ab\ufffd"


@OVERLAP
def test_case_10_the_rows_of_a_step_are_cut_where_its_text_is(open_engine: Opener, overlap: bool) -> None:
    """A step that brings several tokens may end within a character: the rows of those that are held wait with them."""
    text = "ab😀cé👧"
    with open_engine() as engine:
        script = bytewise(engine, text)
    with open_engine(overlap=overlap, constraint=scripted({"emoji": script})) as engine:
        engine.loop.max_jump = 2
        parts = list(engine.stream(ids(5), greedy(99), rid="emoji", top_logprobs_num=2, return_hidden_states=True, hidden_states_start=-1))
        whole = engine.generate(ids(5), greedy(99), rid="emoji", top_logprobs_num=2, return_hidden_states=True, hidden_states_start=-1)
    assert any(len(part.token_ids) > 1 for part in parts) and "".join(part.text for part in parts) == text
    before = 4
    for part in parts:
        assert len(part.logprobs.output) == len(part.logprobs.output_top) == len(part.token_ids)
        assert part.hidden_states.positions == list(range(before, before + len(part.token_ids)))
        before += len(part.token_ids)
    assert [value for part in parts for value in part.logprobs.output] == pytest.approx(whole.logprobs.output, abs=1e-4)


class EveryOther:
    """A grammar that leaves no choice of each second token."""

    def __init__(self) -> None:
        self.tokens = 0

    def fill_mask(self, mask: npt.NDArray[np.uint32]) -> None:
        mask[:] = 0xFFFFFFFF
        if self.tokens % 2:
            mask[:] = 0
            mask[1] = 2  # token 33

    def advance(self, token_id: int) -> bool:
        assert token_id == 33 or self.tokens % 2 == 0
        self.tokens += 1
        return False


@pytest.mark.parametrize(("overlap", "steps"), [(False, 5), (True, 8)])
def test_without_overlap_a_single_token_without_choice_needs_no_step(open_engine: Opener, overlap: bool, steps: int) -> None:
    with open_engine(overlap=overlap, constraint=lambda _: EveryOther()) as engine:
        output = engine.generate(ids(5), greedy(8, ignore_eos=True))
        assert output.token_ids[1::2] == [33] * 4
        assert engine.stats()["steps"] == steps


@OVERLAP
def test_case_11_a_seed_repeats_itself_and_another_differs(open_engine: Opener, join_choices: Callable[..., Any], overlap: bool) -> None:
    prompt = ids(7)

    def sampling(seed: int | None, n: int = 1) -> SamplingParams:
        return SamplingParams(max_new_tokens=20, temperature=1.0, seed=seed, ignore_eos=True, n=n)

    with open_engine(overlap=overlap) as engine:
        first = engine.generate(prompt, sampling(1))
        assert engine.generate(prompt, sampling(1)).token_ids == first.token_ids
        assert join_choices(engine.stream(prompt, sampling(1)))[0].token_ids == first.token_ids
        beside = engine.generate([ids(30, 2), prompt, prompt], [sampling(None), sampling(1), sampling(2)])
        assert beside[1].token_ids == first.token_ids
        assert beside[2].token_ids != first.token_ids
        # By (seed, choice index): the first of three choices is the same, the others differ.
        choices = engine.generate(prompt, sampling(1, n=3))
        assert choices[0].token_ids == first.token_ids
        assert len({tuple(choice.token_ids) for choice in choices}) == 3
        # Without a seed, requests differ.
        unseeded = engine.generate([prompt] * 4, sampling(None))
        assert len({tuple(output.token_ids) for output in unseeded}) == 4


def penalised_reference(
    model: LlamaForCausalLM, prompt: list[int], count: int, repetition: float, frequency: float, presence: float
) -> list[int]:
    """Greedy decoding with the penalties as documented: repetition on prompt and output, frequency and presence on output."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        for token in set(tokens):
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        output = tokens[len(prompt) :]
        for token in set(output):
            logits[token] -= frequency * output.count(token) + presence
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("penalties", [(1.3, 0.0, 0.0), (1.0, 1.0, 0.0), (1.0, 0.0, 1.5), (1.2, 0.6, 0.4)], ids=str)
def test_case_12_a_penalty_is_applied_exactly_once(open_engine: Opener, tiny_llama: Path, penalties: tuple[float, float, float]) -> None:
    model = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    prompt = [11, 12] * 8
    repetition, frequency, presence = penalties
    want = penalised_reference(model, prompt, 16, *penalties)
    assert want != solo(open_engine, prompt, greedy(16, ignore_eos=True)).token_ids
    sampling = greedy(16, repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence, ignore_eos=True)
    neighbours = [ids(9 + i, i) for i in range(7)]
    plain = [solo(open_engine, each, greedy(16, ignore_eos=True)).token_ids for each in neighbours]
    for overlap in (False, True):
        with open_engine(overlap=overlap) as engine:
            assert engine.generate(prompt, sampling).token_ids == want
            batch = engine.generate(
                [*neighbours[:3], prompt, *neighbours[3:]],
                [greedy(16, ignore_eos=True)] * 3 + [sampling] + [greedy(16, ignore_eos=True)] * 4,
            )
            assert batch[3].token_ids == want
            assert [output.token_ids for output in batch[:3] + batch[4:]] == plain


@OVERLAP
def test_case_13_the_context_is_a_limit_and_never_a_hang(open_engine: Opener, overlap: bool) -> None:
    with open_engine(overlap=overlap) as engine:
        limit = engine.context_length
        assert limit == 512
        almost = engine.generate(ids(limit - 1), greedy(5, ignore_eos=True))
        assert (almost.completion_tokens, almost.finish_reason) == (1, "length")
        for length in (limit, limit + 1):
            started = time.monotonic()
            with pytest.raises(ContextLengthExceeded) as refused:
                engine.generate(ids(length), greedy(5))
            assert time.monotonic() - started < 1
            assert refused.value.status == 400
            assert str(limit) in str(refused.value) and str(length) in str(refused.value)
        assert engine.generate(ids(limit), greedy(0)).finish_reason == "length"  # samples nothing, so it fits
        with pytest.raises(ContextLengthExceeded):
            engine.generate(ids(limit + 1), greedy(0))
        most = engine.generate(ids(limit * 9 // 10), greedy(limit // 2, ignore_eos=True))
        assert most.finish_reason == "length"
        assert most.completion_tokens == limit - limit * 9 // 10
        none, one = engine.generate(ids(20), greedy(0)), engine.generate(ids(20), greedy(1, ignore_eos=True))
        assert (none.token_ids, none.text, none.finish_reason) == ([], "", "length")
        assert (len(one.token_ids), one.finish_reason) == (1, "length")
        with pytest.raises(InvalidRequest, match=r"max_new_tokens.*-1"):
            greedy(-1)
        assert engine.generate(ids(20), greedy(1, ignore_eos=True)).token_ids == one.token_ids


@OVERLAP
@pytest.mark.parametrize("page_size", [1, 16])
def test_case_15_cold_and_warm_are_the_same(open_engine: Opener, assert_same: Same, overlap: bool, page_size: int) -> None:
    prompt, outputs = ids(70), {"top_logprobs_num": 3}
    with open_engine(overlap=overlap, page_size=page_size) as engine:
        answers = []
        for flush in (True, True, False):
            if flush:
                engine.flush_cache()
                assert engine.stats()["kv_tokens_cached"] == 0
            answers.append(engine.generate(prompt, greedy(30, ignore_eos=True), **outputs))
        assert [answer.cached_tokens for answer in answers] == [0, 0, 69 if page_size == 1 else 64]
    assert answers[0].logprobs == answers[1].logprobs  # bit for bit
    for answer in answers[1:]:
        assert_same(answer, answers[0])


@OVERLAP
def test_case_17_who_stops_listening_is_aborted(
    open_engine: Opener, assert_same: Same, wait_until_idle: Callable[..., Any], overlap: bool
) -> None:
    """Without a server: an iterator closed early, after some parts or before the first."""
    neighbour = ids(9, 1)
    want = solo(open_engine, neighbour, greedy(90, ignore_eos=True))
    with open_engine(overlap=overlap, disable_radix_cache=True) as engine:
        beside: list[Output] = []
        thread = threading.Thread(target=lambda: beside.append(engine.generate(neighbour, greedy(90, ignore_eos=True))))
        thread.start()
        for taken in (0, 3):
            parts = engine.stream(ids(200), greedy(300, ignore_eos=True), rid=f"left {taken}")
            for _ in range(taken):
                next(parts)
            parts.close()
        thread.join(timeout=60)
        stats = wait_until_idle(engine)
        assert stats["kv_tokens_free"] == stats["kv_tokens_total"]
        # Far fewer steps than the 300 tokens of an answer nobody waits for.
        assert stats["steps"] < 250
        assert engine.generate(ids(5), greedy(2, ignore_eos=True), rid="left 0").completion_tokens == 2  # its id is free again
    assert_same(beside[0], want)


@OVERLAP
def test_case_19_nobody_asks_and_no_hidden_byte_moves(open_engine: Opener, overlap: bool) -> None:
    prompts = [ids(5 + i, i) for i in range(6)]
    with open_engine(overlap=overlap) as engine:
        engine.generate(prompts, greedy(20))
        engine.generate(prompts, SamplingParams(max_new_tokens=8, seed=1, n=2), top_logprobs_num=2, logprob_start_len=0)
        hidden = engine.stats()["d2h"]["hidden"]
        assert (hidden["copied_bytes"], hidden["discarded_bytes"]) == (0, 0)
        assert hidden["skipped_bytes"] == engine.stats()["forward_tokens"] * 64 * 4
        # One request that asks does not make its neighbours pay.
        answers = engine.generate(prompts, greedy(20, ignore_eos=True), return_hidden_states=["last", *[False] * 5])
        hidden = engine.stats()["d2h"]["hidden"]
        assert hidden["copied_bytes"] == 64 * 4
        assert [answer.copied_bytes["hidden"] for answer in answers] == [64 * 4, 0, 0, 0, 0, 0]
        assert [answer.hidden_states is None for answer in answers] == [False, *[True] * 5]
