"""What comes over a connection besides good requests: halves, floods, and clients that leave."""

from __future__ import annotations

import json
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
