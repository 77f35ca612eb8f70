"""Requests with a grammar, and everything else one may ask for with it: the answer is the same alone and in a batch, with overlap and
without, whether tokens that the grammar leaves no choice of are sampled or appended, and it obeys the grammar."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from sidestream import Engine, Output, SamplingParams
from sidestream.engine import scheduler
from sidestream.engine.streams import open_streams
from sidestream.kernels import cpu

SCHEMA = {
    "type": "object",
    "properties": {"code": {"enum": ["A7", "B8"]}, "count": {"type": "integer", "minimum": 10, "maximum": 99}, "good": {"const": True}},
    "required": ["code", "count", "good"],
    "additionalProperties": False,
}
FORCED = r"(AB|CD)-[0-9]{4}-WXYZ0123456789-(QX7|WZ9)"  # no piece of the vocabulary has two characters of it
TAG = {"structures": [{"begin": "<Q>", "schema": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "end": "</Q>"}]}


@dataclass(frozen=True)
class Ask:
    name: str
    sampling: SamplingParams
    outputs: dict[str, Any] = field(default_factory=dict)
    obeys: str = "(?s:.*)"  # what a finished text matches
    ends: str = "stop"

    @property
    def prompt(self) -> list[int]:
        return [2 + (7 * len(self.name) + 13 * place) % 300 for place in range(5 + len(self.name))]


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_new_tokens": 70} | fields)


ASKS = [
    Ask("rows", params(regex=FORCED), {"return_hidden_states": True, "top_logprobs_num": 3, "logprob_start_len": 0}, FORCED),
    Ask("three", params(json_schema=SCHEMA, temperature=1.0, seed=5, n=3), {"return_hidden_states": "last", "return_logprob": True}),
    Ask("penalties", params(choice=["AAAAAAAAAA", "BABABABABA"], repetition_penalty=1.3, frequency_penalty=0.5), {"return_logprob": True}),
    Ask("processed", params(regex=FORCED), {"logprobs_mode": "processed", "top_logprobs_num": 4, "token_ids_logprob": [5, 9]}, FORCED),
    Ask("one layer", params(regex=FORCED), {"return_hidden_states": True, "hidden_states_start": -1, "hidden_states_layers": [2]}, FORCED),
    Ask(
        "late rows",
        params(regex=FORCED),
        {"return_hidden_states": True, "hidden_states_start": 30, "hidden_states_layers": [0, -1]},
        FORCED,
    ),
    Ask("stop string", params(regex="[A-Z]{3}STOPZZ[0-9]{5}", stop=["STOP"]), {"return_hidden_states": True}, "[A-Z]{3}"),
    Ask("stop regex", params(regex="[0-9]{30}Q", stop_regex=["Q"], temperature=1.0, seed=3), {"return_logprob": True}, "[0-9]{30}"),
    Ask("minimum", params(regex="[a-z ]{1,40}", min_new_tokens=12, temperature=1.0, seed=9), {"return_logprob": True}, "[a-z ]+"),
    Ask("cut off", params(regex="[A-Z]{200}", max_new_tokens=17), {"return_hidden_states": "last"}, ends="length"),
    Ask(
        "cut off where forced",
        params(regex=FORCED, max_new_tokens=12),
        {"return_hidden_states": True, "return_logprob": True},
        ends="length",
    ),
    Ask("biased", params(regex="[0-9]{8}", logit_bias={17: 5.0}, bad_token_ids=[18]), {"top_logprobs_num": 2}, "[0-9]{8}"),
    Ask("eos passes", params(regex=FORCED, ignore_eos=True), {"return_hidden_states": "last"}, FORCED),
    Ask("lark", params(ebnf='start: "X" (A | B)\nA: /[0-9]{3}/ "YYYYYY"\nB: "Z"', temperature=1.0, seed=2), {"top_logprobs_num": 1}),
    Ask("tag", params(structural_tag=TAG | {"triggers": ["<Q>"]}, max_new_tokens=20), {"return_logprob": True}, ends="length"),
    Ask("free", params(ignore_eos=True, max_new_tokens=30), {"return_hidden_states": True, "logprob_start_len": 0}, ends="length"),
    Ask("free and random", params(temperature=1.0, seed=7, n=2, max_new_tokens=25), {"top_logprobs_num": 2}, ends=""),
]


def answers(engine: Engine, asks: list[Ask]) -> dict[str, list[Output]]:
    outputs = engine.generate([ask.prompt for ask in asks], [ask.sampling for ask in asks], **_columns(asks))
    made = {}
    for ask in asks:
        made[ask.name], outputs = outputs[: ask.sampling.n], outputs[ask.sampling.n :]
    return made


def _columns(asks: list[Ask]) -> dict[str, list[Any]]:
    defaults = {
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "logprobs_mode": "raw",
        "return_hidden_states": False,
        "hidden_states_start": 0,
        "hidden_states_layers": [-1],
    }
    return {name: [ask.outputs.get(name, default) for ask in asks] for name, default in defaults.items()}


@pytest.fixture(scope="module", params=["float32", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and cpu.native() is None:
        pytest.skip(f"no native backend: {cpu.WHY_NOT}")
    return str(request.param)


@pytest.fixture(scope="module")
def open_engine(open_engine: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return partial(open_engine, dtype="bfloat16" if backend == "native" else "float32")


@pytest.fixture(scope="module")
def assert_same(assert_same: Callable[..., None], backend: str) -> Callable[..., None]:
    def same_bits(got: Output, want: Output, what: str) -> None:
        assert_same(got, want, what)
        if got.logprobs is not None and want.logprobs is not None:
            assert (got.logprobs.input, got.logprobs.output) == (want.logprobs.input, want.logprobs.output), what
        if got.hidden_states is not None and want.hidden_states is not None:
            assert torch.equal(got.hidden_states.data, want.hidden_states.data), f"{what}: rows"

    return same_bits if backend == "native" else assert_same


@pytest.fixture(scope="module")
def want(open_engine: Callable[..., Any]) -> dict[str, list[Output]]:
    """Each alone, without overlap, with nothing cached, every token sampled."""
    made = {}
    with open_engine(disable_radix_cache=True, overlap=False, jump=False) as engine:
        for ask in ASKS:
            made |= answers(engine, [ask])
    return made


def test_the_answers_obey(want: dict[str, list[Output]]) -> None:
    for ask in ASKS:
        for output in want[ask.name]:
            assert output.finish_reason in ([ask.ends] if ask.ends else ["stop", "length"]), (ask.name, output)
            assert ask.ends != "stop" or re.fullmatch(ask.obeys, output.text), (ask.name, output.text)
            assert output.completion_tokens <= ask.sampling.max_new_tokens
    codes = [json.loads(output.text) for output in want["three"]]
    assert all(code["code"] in ("A7", "B8") and 10 <= code["count"] <= 99 and code["good"] is True for code in codes)
    assert len({output.text for output in want["three"]}) > 1
    assert want["stop string"][0].matched_stop == "STOP" and want["stop regex"][0].matched_stop == "Q"
    assert want["minimum"][0].completion_tokens >= 12
    assert want["penalties"][0].text in ("AAAAAAAAAA", "BABABABABA")
    assert not {18} & set(want["biased"][0].token_ids)


def test_rows_are_complete(want: dict[str, list[Output]]) -> None:
    """One logprob for each token; a row for each position but the last token's."""
    for ask in ASKS:
        for output in want[ask.name]:
            last = output.prompt_tokens + output.completion_tokens - 2
            if output.hidden_states is not None:
                start = ask.outputs.get("hidden_states_start", 0)
                first = last if ask.outputs["return_hidden_states"] == "last" else start if start >= 0 else output.prompt_tokens + start
                assert list(output.hidden_states.positions) == list(range(first, last + 1)), ask.name
            if output.logprobs is not None:
                assert len(output.logprobs.output) == output.completion_tokens, ask.name


@pytest.mark.parametrize("jump", [True, False], ids=["jump", "every token sampled"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize(
    "options",
    [{}, {"page_size": 4, "chunked_prefill_size": 8}, {"page_size": 1, "kv_tokens": 128, "max_running_requests": 24}],
    ids=["default", "chunked", "retracting"],
)
def test_the_answers_are_the_same(
    open_engine: Any,
    assert_same: Any,
    want: dict[str, list[Output]],
    overlap: bool,
    jump: bool,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "kv_tokens" in options:  # requests are admitted that have no room to grow
        monkeypatch.setattr(scheduler, "HEADROOM_TOKENS", 0)
    with open_engine(overlap=overlap, jump=jump, **options) as engine:
        for warm in (False, True):
            got = answers(engine, ASKS)
            for ask in ASKS:
                for output, expected in zip(got[ask.name], want[ask.name], strict=True):
                    assert_same(output, expected, f"{ask.name}, warm={warm}")
        assert (engine.stats()["retracted"] > 0) == ("kv_tokens" in options)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_the_answers_are_the_same_if_anybody_is_retracted_at_any_moment(
    open_engine: Any, assert_same: Any, want: dict[str, list[Output]], overlap: bool
) -> None:
    streams = open_streams(torch.device("cpu"), 1)._replace(poison=True)
    with open_engine(overlap=overlap, page_size=4, streams=streams) as engine:
        scheduler_, choose, victims = engine.loop.scheduler, random.Random(3), 0
        next_batch = scheduler_.next_batch

        def retracting() -> Any:
            nonlocal victims
            for victim in [request for request in scheduler_.running if not request.launched_all and not request.aborting]:
                if choose.random() < 0.15:
                    victims += 1
                    scheduler_._retract(victim, scheduler._Step(0, 0))
            return next_batch()

        scheduler_.next_batch = retracting
        got = answers(engine, ASKS)
        for ask in ASKS:
            for output, expected in zip(got[ask.name], want[ask.name], strict=True):
                assert_same(output, expected, ask.name)
        assert victims >= 20


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_tokens_without_a_choice_take_fewer_steps(open_engine: Any, assert_same: Any, want: dict[str, list[Output]], overlap: bool) -> None:
    ask, steps = ASKS[0], {}
    for jump in (True, False):
        with open_engine(overlap=overlap, jump=jump) as engine:
            assert_same(answers(engine, [ask])[ask.name][0], want[ask.name][0], f"jump={jump}")
            steps[jump] = engine.stats()["steps"]
    # "-WXYZ0123456789-" is known as soon as the last of the four digits is, and what follows Q or W after that.
    assert steps[True] <= steps[False] - 15, steps


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_streams_bring_the_same_and_one_may_be_left(
    open_engine: Any, assert_same: Any, join_choices: Any, want: dict[str, list[Output]], overlap: bool
) -> None:
    with open_engine(overlap=overlap) as engine:
        streams = {ask.name: engine.stream(ask.prompt, ask.sampling, **ask.outputs) for ask in ASKS}
        left = engine.stream(ASKS[0].prompt, params(regex="[A-Z]{300}", max_new_tokens=300), return_hidden_states=True)
        next(left)
        left.close()
        for ask in ASKS:
            for output, expected in zip(join_choices(streams[ask.name]), want[ask.name], strict=True):
                assert_same(output, expected, ask.name)


def test_a_grammar_that_fails_in_the_middle_ends_its_request_alone(
    open_engine: Any, assert_same: Any, want: dict[str, list[Output]]
) -> None:
    """3,000 optional properties: nothing is wrong with the beginning."""
    neighbour = ASKS[0]
    rows = " ".join(['"A"?'] * 3000)
    for overlap in (True, False):
        with open_engine(overlap=overlap) as engine:
            stream = engine.stream(neighbour.prompt, neighbour.sampling, **neighbour.outputs)
            parts = [next(stream)]
            with pytest.raises(Exception, match="ebnf: the grammar is too complex") as raised:
                engine.generate([5, 6, 7], params(ebnf=f"start: /[A-Z]{{20}}/ {rows}"))
            assert raised.value.param == "ebnf"
            parts += stream
            joined = parts[0]
            assert joined.index == 0
            assert sum(len(part.token_ids) for part in parts) == want[neighbour.name][0].completion_tokens
            assert "".join(part.text for part in parts) == want[neighbour.name][0].text
