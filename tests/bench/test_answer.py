from __future__ import annotations

import json

import msgspec
import pytest

from sidestream.bench.answer import Answer, Arrival, Failure, Reader, refusal


def event(text: str | None = None, *, usage: int | None = None, finish: str | None = None, **choice: object) -> bytes:
    made = {"choices": [{"index": 0, "text": text, "finish_reason": finish, **choice}]}
    if usage is not None:
        made["usage"] = {"prompt_tokens": 7, "completion_tokens": usage}
    return b"data: " + json.dumps(made).encode() + b"\n\n"


def end(usage: int | None = None) -> bytes:
    told = {"prompt_tokens": 7, "completion_tokens": usage, "prompt_tokens_details": {"cached_tokens": 4}}
    return (b"" if usage is None else b"data: " + json.dumps({"choices": [], "usage": told}).encode() + b"\n\n") + b"data: [DONE]\n\n"


def read(*parts: bytes) -> Answer:
    """The parts come at 1, 2, 3 ... seconds; the request was sent at 0.5."""
    reader = Reader(0.5)
    for at, part in enumerate(parts, 1):
        reader.feed(part, float(at))
    return reader.answer(float(len(parts)) + 0.5)


def test_without_usage_each_chunk_with_text_counts_as_a_token():
    answer = read(b": hello\n\n", event("a"), event(""), event("b", finish="length"), end())
    assert answer.arrivals == [Arrival(2.0, 1.0), Arrival(4.0, 1.0)]
    assert (answer.completion_tokens, answer.prompt_tokens, answer.counted) == (2, None, False)
    assert (answer.ttft, answer.gaps, answer.tpot, answer.e2e) == (1.5, [2.0], 2.0, 5.0)
    assert (answer.finish_reason, answer.failure) == ("length", None)


def test_usage_of_each_chunk_tells_its_tokens_also_those_without_text():
    answer = read(event("", usage=0), event("ab", usage=2), event("", usage=3), event("cde", usage=6, finish="stop"), end(6))
    assert answer.arrivals == [Arrival(2.0, 2), Arrival(3.0, 1), Arrival(4.0, 3)]
    assert answer.counted
    assert (answer.completion_tokens, answer.prompt_tokens, answer.cached_tokens) == (6, 7, 4)
    assert answer.tpot == 2.0 / 4  # the first chunk's two tokens took no time between them
    assert answer.gaps == [1.0, 1.0]


def test_usage_at_the_end_is_spread_over_the_chunks():
    answer = read(event("a"), event("b"), event("", finish="length"), end(6))
    assert answer.arrivals == [Arrival(1.0, 3.0), Arrival(2.0, 3.0)]
    assert (answer.completion_tokens, answer.counted) == (6, False)
    assert answer.tpot == 1.0 / 3


def test_usage_beside_the_last_choice_alone_does_not_count_chunks():
    answer = read(event("a"), event("b"), event("", finish="length", usage=2), end())
    assert answer.arrivals == [Arrival(1.0, 1.0), Arrival(2.0, 1.0)]
    assert not answer.counted


@pytest.mark.parametrize("field", ["content", "reasoning_content", "reasoning"])
def test_chat_deltas(field):
    role = {"role": "assistant", "content": ""}
    answer = read(event(delta=role), event(delta={field: "x"}), event(delta={"tool_calls": [{"index": 0}]}), event(delta={}, finish="stop"))
    assert [arrival.at for arrival in answer.arrivals] == [2.0, 3.0]
    assert answer.failure is None


def test_events_may_be_cut_anywhere():
    whole = b": ping\r\n\r\n" + event("\u00e9").replace(b"\n", b"\r\n") + event("b", finish="stop") + end(2)
    answer = read(*(whole[i : i + 1] for i in range(len(whole))))
    assert len(answer.arrivals) == 2
    assert answer.completion_tokens == 2
    assert answer.received == len(whole)
    assert len(read(whole).arrivals) == 2


@pytest.mark.parametrize(
    ("parts", "failure"),
    [
        ([event("a")], Failure("stream cut short", "it ended after 1 chunks without a finish_reason")),
        ([], Failure("stream cut short", "it ended after 0 chunks without a finish_reason")),
        ([end(0)], Failure("empty answer", "no text came; finish_reason None")),
        ([event("", finish="stop"), end()], Failure("empty answer", "no text came; finish_reason stop")),
        (
            [event("a"), b'data: {"error": {"message": "gone\\nfor ever", "code": "engine_error"}}\n\n', end()],
            Failure("error in the stream engine_error", "gone for ever"),
        ),
        ([b'data: {"error": "gone", "choices": null}\n\n'], Failure("error in the stream", "gone")),
    ],
)
def test_failures(parts, failure):
    assert read(*parts).failure == failure


def test_what_is_no_chunk_is_refused():
    with pytest.raises(msgspec.DecodeError):
        Reader(0.0).feed(b"data: <html>\n", 1.0)


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        (b'{"error": {"message": "full", "code": "queue_full"}}', Failure("HTTP 429 queue_full", "full")),
        (b'{"object": "error", "message": "full", "code": 429}', Failure("HTTP 429", "full")),
        (b'{"error": "full"}', Failure("HTTP 429", "full")),
        (b"[1]", Failure("HTTP 429", "[1]")),
        (b"<html>\xff", Failure("HTTP 429", "<html>\ufffd")),
    ],
)
def test_refusals(body, failure):
    assert refusal(429, body) == failure


def test_one_token_has_no_time_per_token():
    answer = read(event("a", finish="length"), end(1))
    assert (answer.tpot, answer.gaps) == (None, [])
