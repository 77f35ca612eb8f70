"""Messages survive the way between two processes, arrays and errors too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sidestream import wire
from sidestream.errors import ContextLengthExceeded, EngineFault, InvalidRequest, ModelError
from sidestream.frontend import Frontend, FrontendState
from sidestream.messages import (
    Abort,
    Answer,
    Ask,
    EngineFailed,
    Finish,
    HiddenRows,
    LogprobRows,
    Report,
    Rows,
    StepOutputs,
    Stop,
    Submit,
)
from sidestream.params import OutputParams, SamplingParams


def there(message: Any, **keywords: Any) -> Any:
    return wire.decode([bytes(frame) for frame in wire.encode(message)], **keywords)


def test_a_request_arrives_as_it_was_sent() -> None:
    sampling = SamplingParams(stop=("a", "b"), logit_bias={5: 1.5}, seed=2**64 - 1, allowed_token_ids=[1, 2], n=2)
    asked = OutputParams(return_hidden_states="last", hidden_states_layers=[1, -1], token_ids_logprob=[4], logprob_start_len=0)
    plan = asked.check(vocab_size=100, num_layers=3, prompt_len=2000)
    sent = Submit(7, "rid", 1, np.arange(2000, dtype=np.int32), sampling, plan, primary=6)
    got = there(sent, copy=True)
    assert (got.key, got.rid, got.index, got.primary) == (7, "rid", 1, 6)
    assert got.sampling == sampling and got.plan == plan
    assert got.prompt.dtype == np.int32 and np.array_equal(got.prompt, sent.prompt)
    got.prompt[0] = 5  # a copy that may be written to


def test_large_arrays_travel_beside_the_body_and_small_ones_in_it() -> None:
    large, small = np.arange(4096, dtype=np.uint8), np.arange(3, dtype=np.float32)
    rows = Rows(None, LogprobRows(3, small, None, None, None), HiddenRows(0, "float32", (1, 1, 1024), large))
    frames = wire.encode(StepOutputs([1], [2], {1: rows}, {}, {}))
    assert len(frames) == 3 and len(frames[1]) < 200
    assert np.shares_memory(np.frombuffer(frames[2], np.uint8), large), "it was copied"
    got = wire.decode(frames).rows[1]
    assert np.array_equal(got.hidden.data, large) and np.array_equal(got.output_logprobs.chosen, small)
    assert got.input_logprobs is None and got.hidden.shape == (1, 1, 1024)


@pytest.mark.parametrize("matched", [5, "stop", None])
def test_an_end_keeps_the_type_of_what_matched(matched: Any) -> None:
    got = there(StepOutputs([], [], {}, {}, {1: Finish("stop", matched, None, False, {"token": 4})}))
    assert got.finished[1].matched_stop == matched and type(got.finished[1].matched_stop) is type(matched)


@pytest.mark.parametrize("message", [Abort("a", frozenset({1, 2})), Abort("b"), Ask(3, "stats"), Stop(), Report({"steps": 2})])
def test_small_messages(message: Any) -> None:
    assert there(message) == message


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("top_p", "got 2", hint="Less."),
        ContextLengthExceeded("prompt", "too long"),
        ModelError("no such model", hint="Look."),
    ],
)
def test_our_own_errors_come_back_as_themselves(error: Any) -> None:
    got = there(Answer(1, None, error)).error
    assert type(got) is type(error) and str(got) == str(error) and got.hint == error.hint
    assert getattr(got, "param", None) == getattr(error, "param", None)


def test_other_errors_come_back_by_name_and_words() -> None:
    got = there(EngineFailed(ZeroDivisionError("division by zero"))).error
    assert type(got) is EngineFault and str(got) == "ZeroDivisionError: division by zero"


def test_what_cannot_cross_is_named() -> None:
    with pytest.raises(NotImplementedError, match="object does not cross"):
        wire.encode(Answer(1, object()))


def test_a_frontend_made_from_its_state_says_the_same(tiny_llama: Any) -> None:
    from sidestream import Engine

    with Engine(str(tiny_llama), dtype="float32", kv_tokens=1024) as engine:
        here = engine._frontend
    back = Frontend.from_state(there(here.state()))
    assert isinstance(there(here.state()), FrontendState)
    assert back.facts == here.facts
    text = "Once upon a time, příliš žluťoučký kůň 😀"
    assert back.tokenizer.encode(text) == here.tokenizer.encode(text)
    assert back.tokenizer.decode(back.tokenizer.encode(text)) == text
