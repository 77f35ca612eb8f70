"""A server that speaks just enough of OpenAI's chat completions, and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


def chunk(text: str = "", finish: str | None = None, **delta: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text, **delta}, "finish_reason": finish}]})


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.seen.append((self.path, None, self.headers["Authorization"]))
        if self.path != f"{self.server.prefix}/models":
            self._answer(404, {"detail": "Not Found"})
        elif self.server.models_status != 200:
            self._answer(self.server.models_status, {"error": {"message": "no", "type": "x", "code": None}})
        else:
            self._answer(200, {"object": "list", "data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body, self.headers["Authorization"]))
        status, events = self.server.answers.pop(0)
        if status != 200:
            self._answer(status, events)
            return
        self.send_response(200)
        self.send_header("Content-Type", self.server.content_type)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for event in events:
                if event == "WAIT":
                    self.server.waiting.set()
                    self.server.go_on.wait(30)
                elif event == "BREAK":
                    self.close_connection = True
                    return
                else:
                    self._chunk(event if event.startswith(":") else f"data: {event}\n\n")
            self._chunk("data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.server.left.set()
            self.close_connection = True

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _answer(self, status: int, value: Any) -> None:
        data = (value if isinstance(value, str) else json.dumps(value)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if 300 <= status < 400:
            self.send_header("Location", "http://elsewhere/")
        self.end_headers()
        self.wfile.write(data)


class FakeServer(ThreadingHTTPServer):
    """`answers` are pairs of a status and events, or the body of an error; WAIT and BREAK are not sent but done."""

    daemon_threads = True
    chunk = staticmethod(chunk)

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, Any, str | None]] = []
        self.answers: list[tuple[int, Any]] = []
        self.models, self.models_status, self.prefix, self.content_type = ["tiny"], 200, "/v1", "text/event-stream"
        self.waiting, self.go_on, self.left = threading.Event(), threading.Event(), threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def say(self, *texts: str, finish: str = "stop") -> None:
        """Script one answer."""
        self.answers.append((200, [*map(chunk, texts), chunk(finish=finish)]))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.go_on.set()
        server.shutdown()
        thread.join()
