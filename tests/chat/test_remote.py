from __future__ import annotations

import json
from contextlib import closing

import pytest

from sidestream.chat.remote import RemoteError, ServerTalker, _bases, _chosen
from sidestream.chat.talker import Part

HI = [{"role": "user", "content": "Hi"}]


def talker(server, url=None, key=None, model=None, **sampling) -> ServerTalker:
    return ServerTalker(url or server.url, key=key, model=model, sampling=sampling)


def test_an_answer_in_parts(server):
    chunk = server.chunk
    events = [": keep-alive\n\n", chunk(role="assistant"), chunk(reasoning_content="hm"), chunk("Hel"), chunk("lo", finish="stop")]
    server.answers = [(200, [*events, json.dumps({"choices": [], "usage": {}})])]
    asked = talker(server, key="secret", max_new_tokens=5, min_new_tokens=1, top_k=3, stop=("x",), logit_bias={5: 1.0})
    assert (asked.model, asked.title) == ("tiny", f"tiny at {server.url}/v1")
    assert list(asked.stream(HI)) == [Part("", None), Part("", None, "hm"), Part("Hel"), Part("lo", "stop")]
    path, body, key = server.seen[-1]
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert body == {
        "model": "tiny",
        "messages": HI,
        "stream": True,
        "max_tokens": 5,
        "min_tokens": 1,
        "top_k": 3,
        "stop": ["x"],
        "logit_bias": {"5": 1.0},
    }


def test_no_key_and_no_field_is_sent_unless_it_was_given(server):
    server.say("x")
    assert [part.text for part in talker(server).stream(HI)] == ["x", ""]
    assert [seen[2] for seen in server.seen] == [None, None]
    assert sorted(server.seen[-1][1]) == ["messages", "model", "stream"]


@pytest.mark.parametrize(
    ("url", "bases"),
    [
        ("http://h:1", ["http://h:1/v1"]),
        ("http://h:1/", ["http://h:1/v1"]),
        ("https://h/v1", ["https://h/v1"]),
        ("https://h/v1/", ["https://h/v1"]),
        ("https://h/api/v1/chat/completions", ["https://h/api/v1"]),
        ("https://h/openai", ["https://h/openai/v1", "https://h/openai"]),
    ],
)
def test_with_or_without_v1(url, bases):
    assert _bases(url) == bases


@pytest.mark.parametrize("prefix", ["/openai/v1", "/openai"])
def test_routes_below_another_path(server, prefix):
    server.prefix = prefix
    assert talker(server, f"{server.url}/openai").title == f"tiny at {server.url}{prefix}"


def test_models(server):
    server.models = ["a", "b"]
    assert talker(server).title == f"a, one of 2 (--model takes another) at {server.url}/v1"
    assert talker(server, model="b").title == f"b at {server.url}/v1"
    with pytest.raises(RemoteError) as refused:
        talker(server, model="bb")
    assert (str(refused.value), refused.value.code) == ("the server has no model 'bb'\nDid you mean b?", "model_not_found")
    with pytest.raises(RemoteError, match=r"It has m0, m1, m2, m3, m4, m5, m6, m7 and others\."):
        _chosen("x", [f"m{i}" for i in range(9)])
    server.models = []
    with pytest.raises(RemoteError, match=r"the server has no model\nName one with --model\."):
        talker(server)
    server.models_status = 404  # a server that lists none
    assert talker(server, model="mine").title == f"mine at {server.url}/v1"
    with pytest.raises(RemoteError, match=r"/v1/models answers 404: no"):
        talker(server)


@pytest.mark.parametrize(
    ("status", "body", "message", "code"),
    [
        (400, {"error": {"message": "too long", "code": "context_length_exceeded"}}, "answers 400: too long", "context_length_exceeded"),
        (400, {"object": "error", "message": "flat", "code": 400}, "answers 400: flat", "400"),
        (422, {"detail": "detailed"}, "answers 422: detailed", "server_error"),
        (422, {"detail": [{"loc": ["n"]}]}, "answers 422: [{'loc': ['n']}]", "server_error"),
        (500, {"error": "just text"}, "answers 500: just text", "server_error"),
        (502, "<html>bad\ngateway</html>", "answers 502: <html>bad gateway</html>", "server_error"),
        (503, "", "answers 503: Service Unavailable", "server_error"),
        (401, {"error": {"message": "who?"}}, "answers 401: who?\nGive the key with --api-key or SIDESTREAM_API_KEY.", "server_error"),
        (307, "", "answers 307: it moved to http://elsewhere/\nGive that address.", "server_error"),
    ],
)
def test_a_refusal(server, status, body, message, code):
    server.answers = [(status, body)]
    with pytest.raises(RemoteError) as refused:
        list(talker(server, key="k").stream(HI))
    assert str(refused.value) == f"{server.url}/v1/chat/completions {message}"
    assert (refused.value.code, refused.value.status) == (code, status)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (["BREAK"], r"ended the connection|broke off the answer"),
        (['{"choices": [{"delta": {"content": "x"}}]}'], r"ended the connection before the answer was complete"),
        (['{"error": {"message": "out of memory", "code": "engine_error"}}'], r"^out of memory$"),
        (["not json"], r"the server sent an event that is not JSON: not json"),
    ],
)
def test_an_answer_that_breaks_off(server, events, message):
    server.answers = [(200, events)]
    with pytest.raises(RemoteError, match=message):
        list(talker(server).stream(HI))


def test_what_is_no_such_server(server):
    server.content_type = "application/json"
    server.answers = [(200, [])]
    with pytest.raises(RemoteError, match="answers with application/json, must be a stream of events"):
        list(talker(server).stream(HI))
    server.models = [5]
    server.prefix = "/v1"
    assert talker(server).model == "5"
    server.server_close()
    server.shutdown()
    with pytest.raises(RemoteError, match=r"cannot be reached: .*refused"):
        talker(server)
    with pytest.raises(RemoteError, match="cannot be reached"):
        talker(server, "http://")


def test_closing_a_stream_leaves_the_server(server):
    server.answers = [(200, [server.chunk("a"), "WAIT", *[server.chunk("b")] * 1000])]
    with closing(talker(server).stream(HI)) as parts:
        assert next(parts).text == "a"
    server.go_on.set()
    assert server.left.wait(30)


def test_this_machine_is_not_reached_through_a_proxy(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert talker(server).model == "tiny"
