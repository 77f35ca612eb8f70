"""What comes over a connection besides good requests: halves, floods, and clients that leave."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

ASKED = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}


def connect(server: Any) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def request(body: dict[str, Any] | bytes, path: str = "/generate") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(data), data)


def all_of(connection: socket.socket) -> bytes:
    """What the server says until it closes the connection."""
    with connection.makefile("rb") as answer:
        return answer.read()


def until(true: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_client_that_leaves_in_the_middle_of_its_request_is_no_error(serve: Callable[..., Any]) -> None:
    server = serve()
    with connect(server) as connection:
        connection.sendall(request(ASKED)[:-10])
    left = 'status="499"'
    until(lambda: left in server.http.get("/metrics").text)
    assert "error" not in server.log


def heads(server: Any, *pieces: bytes, count: int = 200) -> bytes:
    """What the server says to a request whose head has no end: the first piece once, then the others again and again."""
    with connect(server) as connection:
        try:
            connection.sendall(pieces[0])
            for _ in range(count):
                connection.sendall(pieces[1])
        except ConnectionError:
            pass
        try:
            return connection.recv(4096)
        except ConnectionError:  # the answer was lost: more was on its way than the server had read
            return b"HTTP/1.1 431"


def test_a_head_without_an_end_is_refused(server: Any) -> None:
    line = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    for first, more in (
        (line, b"X-Flood: " + b"a" * 1000 + b"\r\n"),
        (line + b"X-Flood: ", b"a" * 1000),
        (b"GET /", b"a" * 1000),
        (b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"X-Trailer: " + b"a" * 1000 + b"\r\n"),
    ):
        assert heads(server, first, more)[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400"), first
    assert server.http.get("/health", headers={"X-Long": "a" * 50_000}).status_code == 200


def test_what_is_no_http_gets_the_error_object(server: Any) -> None:
    for words in (b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST /generate HTTP/1.1\r\nContent-Length: -5\r\n\r\n"):
        with connect(server) as connection:
            connection.sendall(words)
            answer = all_of(connection)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ") and b"connection: close" in head, words
        assert json.loads(body)["error"]["code"] == "invalid_http"
    assert "Invalid HTTP" not in server.log


def test_nonsense_behind_a_request_does_not_spoil_its_answer(server: Any) -> None:
    with connect(server) as connection:
        connection.sendall(request({**ASKED, "stream": True}) + b"nonsense\r\n\r\n")
        answer = all_of(connection)
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1 and b"data: [DONE]" in answer


def test_a_client_that_leaves_ends_all_that_it_asked(serve: Callable[..., Any]) -> None:
    """The request that is answered, and those behind it that wait for their turn on the connection."""
    server = serve()
    long = {**ASKED, "stream": True, "sampling_params": {"max_new_tokens": 450, "ignore_eos": True, "n": 8}}
    connection = connect(server)
    connection.sendall(request(long) * 3)
    assert connection.recv(12) == b"HTTP/1.1 200"
    connection.close()
    until(lambda: server.stats()["running"] == 0)
    stats = server.stats()
    assert stats["aborted"] == 8 and stats["requests"] == 8
    assert stats["kv_tokens_free"] + stats["kv_tokens_cached"] == stats["kv_tokens_total"]


def test_half_a_request_and_a_reader_that_is_stuck_do_not_delay_the_end(serve: Callable[..., Any]) -> None:
    server = serve()
    much = {"return_hidden_states": True, "hidden_states_layers": [0] * 32}
    stuck, half, silent = connect(server), connect(server), connect(server)
    long = {**ASKED, "stream": True, "sampling_params": {"max_new_tokens": 450, "ignore_eos": True}}
    stuck.sendall(request({**long, **much}))
    half.sendall(request(ASKED)[:-5])
    until(lambda: server.stats()["requests"] == 1)
    for _ in range(2):
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert server.process.wait(10) == 0
    assert "Traceback" not in server.log and "Cancel" not in server.log, server.log
    for connection in (stuck, half, silent):
        connection.close()


def test_signals_that_come_too_late_change_nothing(serve: Callable[..., Any]) -> None:
    server = serve()
    while server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    assert server.process.returncode == 0, server.log
