from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading

import pytest
from starlette.responses import JSONResponse, Response

from sidestream.bench import serve
from sidestream.bench.load import Load
from sidestream.bench.serve import STREAM_OPTIONS, measure
from sidestream.errors import SidestreamError


def measured(server, **options):
    return measure(Load(url=server.url, num_prompts=options.pop("num_prompts", 6), output_len=options.pop("output_len", 5), **options))


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_every_request_is_sent_and_read(openai_server, endpoint):
    run = measured(openai_server, endpoint=endpoint, concurrency=2, api_key="secret", extra='{"top_p": 0.5}')
    assert run.model == "first"
    assert len(openai_server.counted) == 6
    assert {body["model"] for body in openai_server.counted} == {"first"}
    assert {body["top_p"] for body in openai_server.counted} == {0.5}
    assert {headers["authorization"] for headers in openai_server.headers} == {"Bearer secret"}
    assert len({json.dumps(body.get("messages") or body["prompt"]) for body in openai_server.bodies}) == 7
    for answer in run.answers:
        assert answer.failure is None
        assert (answer.completion_tokens, answer.prompt_tokens, answer.cached_tokens, answer.finish_reason) == (5, 11, 3, "length")
        assert [arrival.tokens for arrival in answer.arrivals] == [1, 1, 1, 1, 1]
        assert 0 <= answer.sent < answer.arrivals[0].at <= answer.arrivals[-1].at <= answer.ended <= run.seconds
    assert run.client.processor_seconds > 0


def test_no_more_are_under_way_than_may_be(openai_server):
    under_way, most = 0, 0
    events = openai_server.events

    async def counting(*arguments):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        async for event in events(*arguments):
            yield event
        under_way -= 1

    openai_server.events = counting
    run = measured(openai_server, concurrency=3, num_prompts=9)
    assert most == 3
    assert [answer.failure for answer in run.answers] == [None] * 9


def test_a_rate_does_not_wait_for_answers(openai_server):
    waiting = 0

    async def together(*arguments):
        nonlocal waiting
        waiting += 1
        while waiting < 8:
            await asyncio.sleep(0.001)
        yield 'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\n'

    events = openai_server.events
    openai_server.events = lambda body, *rest: events(body, *rest) if body["max_tokens"] == 2 else together(body)
    run = measured(openai_server, request_rate=200.0, num_prompts=8)
    assert [answer.failure for answer in run.answers] == [None] * 8
    sent = [answer.sent for answer in run.answers]
    assert sent == sorted(sent)


@pytest.mark.parametrize(
    ("refused", "gives_usage", "taken", "counted", "tokens"),
    [
        (set(), True, STREAM_OPTIONS[0], True, 5),
        ({"continuous_usage_stats"}, True, STREAM_OPTIONS[1], False, 5),
        ({"continuous_usage_stats", "include_usage"}, True, None, False, 3),
        (set(), False, STREAM_OPTIONS[0], False, 3),
    ],
)
def test_what_a_server_tells_about_tokens(openai_server, refused, gives_usage, taken, counted, tokens):
    openai_server.refused_options, openai_server.gives_usage, openai_server.tokens_per_chunk = refused, gives_usage, 2
    run = measured(openai_server, model="named")
    assert {json.dumps(body.get("stream_options")) for body in openai_server.counted} == {json.dumps(taken)}
    assert {body["model"] for body in openai_server.bodies} == {"named"}
    for answer in run.answers:
        assert (answer.counted, answer.completion_tokens, len(answer.arrivals)) == (counted, tokens, 3)


def test_failures_are_counted_by_kind(openai_server):
    def answer(number, body):
        return [
            JSONResponse({"error": {"message": "full", "code": "queue_full"}}, 429),
            Response("<html>", 502),
            'data: {"error": {"message": "gone", "code": "engine_error"}}\n\ndata: [DONE]\n\n',
            'data: {"choices": [{"text": "a"}]}\n\n',
            "data: [DONE]\n\n",
            "data: <html>\n\n",
            JSONResponse({"choices": [{"text": "a"}]}),
            None,
        ][number - 1]

    openai_server.answers = answer
    run = measured(openai_server, num_prompts=8, concurrency=1)
    assert [(answer.failure and answer.failure.kind) for answer in run.answers] == [
        "HTTP 429 queue_full",
        "HTTP 502",
        "error in the stream engine_error",
        "stream cut short",
        "empty answer",
        "malformed answer",
        "not a stream",
        None,
    ]
    assert len(run.answers[3].arrivals) == 1


def test_a_timeout_and_a_broken_connection(openai_server):
    broken = threading.Event()

    async def never(*arguments):
        yield 'data: {"choices": [{"text": "a"}]}\n\n'
        if broken.is_set():
            raise RuntimeError("the connection breaks")
        broken.set()
        await asyncio.sleep(60)

    events = openai_server.events
    openai_server.events = lambda body, *rest: events(body, *rest) if body["max_tokens"] == 2 else never()
    run = measured(openai_server, num_prompts=2, concurrency=1, timeout=1.0)
    assert [answer.failure.kind for answer in run.answers] == ["timeout", "connection broken"]
    assert run.answers[0].failure.message == "no end after 1 s"


def test_no_server():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(SidestreamError, match=f"^http://127.0.0.1:{port}/v1: no answer \\(ConnectionRefusedError") as refused:
        measure(Load(url=f"http://127.0.0.1:{port}"))
    assert refused.value.hint == "Is a server running there?"
    with pytest.raises(SidestreamError, match="/v1/completions: the first request failed: no connection: ConnectionRefusedError"):
        measure(Load(url=f"http://127.0.0.1:{port}", model="m"))


def test_a_server_that_refuses_the_first_request(openai_server, monkeypatch):
    monkeypatch.setattr(openai_server, "refused_options", {"include_usage"})
    monkeypatch.setattr(serve, "STREAM_OPTIONS", STREAM_OPTIONS[:1] + (None,))
    openai_server.events = lambda *arguments: iter(())
    with pytest.raises(SidestreamError, match="the first request failed: stream cut short"):
        measured(openai_server)
    assert openai_server.counted == []


def test_without_aiohttp_there_is_a_clear_message(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(SidestreamError) as refused:
        measure(Load())
    assert refused.value.message == "sidestream bench serve needs aiohttp"
    assert refused.value.hint == "pip install 'sidestream[bench]'"


def test_without_uvloop_it_runs_as_well(openai_server, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert [answer.failure for answer in measured(openai_server, num_prompts=2).answers] == [None, None]
