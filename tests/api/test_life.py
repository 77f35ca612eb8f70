"""A server's life: bound before it has a model, drained by one signal, ended by two, and never longer than its engine's."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

LONG = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 450, "temperature": 0, "ignore_eos": True}}


class Asking(threading.Thread):
    """A request under way: `parts` of its stream so far, `answer` or `error` when it has ended."""

    def __init__(self, server: Any, body: dict[str, Any], path: str = "/generate") -> None:
        super().__init__(daemon=True)
        self._server, self._body, self._path = server, body, path
        self.parts: list[dict[str, Any]] = []
        self.status = 0
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with httpx2.Client(base_url=self._server.url, timeout=60) as http:
                with http.stream("POST", self._path, json=self._body) as answer:
                    self.status = answer.status_code
                    if not self._body.get("stream"):
                        self.parts.append(json.loads(answer.read()))
                        return
                    for line in answer.iter_lines():
                        if line.startswith("data: ") and line != "data: [DONE]":
                            self.parts.append(json.loads(line[6:]))
        except Exception as error:
            self.error = error

    def until_begun(self) -> Asking:
        until = time.monotonic() + 30
        while not self.parts and self.is_alive() and time.monotonic() < until:
            time.sleep(0.01)
        return self

    def last(self) -> dict[str, Any]:
        self.join(30)
        assert not self.is_alive() and self.error is None and self.parts, self.error
        return self.parts[-1]


def until_running(server: Any, count: int) -> None:
    until = time.monotonic() + 30
    while server.stats()["running"] < count and time.monotonic() < until:
        time.sleep(0.01)
    assert server.stats()["running"] == count, "the requests ended before they could be watched"


def gone(pid: int, seconds: float = 2.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_while_the_model_loads_every_route_says_so(serve: Callable[..., Any]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = serve("--port", str(port), wait=False)
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}") as http:
        while True:
            try:
                first = http.get("/health")
                break
            except httpx2.ConnectError:
                time.sleep(0.01)
        assert first.status_code == 503 and first.json()["status"] == "loading" and int(first.headers["retry-after"]) > 0
        refused = http.post("/generate", json=LONG)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "loading"
        assert http.get("/health/live").status_code == 200
        server.wait_until_ready()
        assert http.get("/health").status_code == 200
    assert server.stop() == 0


def test_the_first_signal_lets_requests_end(serve: Callable[..., Any]) -> None:
    server = serve()
    stream = Asking(server, {**LONG, "stream": True}).until_begun()
    whole = Asking(server, LONG)
    until_running(server, 2)
    server.process.send_signal(signal.SIGTERM)
    until = time.monotonic() + 5
    while server.http.get("/health").status_code != 503 and time.monotonic() < until:
        time.sleep(0.01)
    assert server.http.get("/health").json()["status"] == "draining"
    refused = server.post("/generate", LONG)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
    assert stream.last()["meta_info"]["finish_reason"]["type"] == "length"
    assert whole.last()["meta_info"]["finish_reason"]["type"] == "length"
    assert server.process.wait(10) == 0, server.log
    assert "draining 2 open requests" in server.log


def test_the_second_signal_aborts_them(serve: Callable[..., Any]) -> None:
    server = serve("--context-length", "512")
    stream = Asking(server, {**LONG, "stream": True, "sampling_params": {**LONG["sampling_params"], "n": 4}}).until_begun()
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(10) == 0, server.log
    stream.join(10)
    assert not stream.is_alive()
    last = stream.parts[-1]
    assert "error" in last or last["meta_info"]["finish_reason"]["type"] == "abort", last


def test_a_killed_engine_ends_the_server_and_its_requests(serve: Callable[..., Any]) -> None:
    server = serve()
    stream = Asking(server, {**LONG, "stream": True}).until_begun()
    whole = Asking(server, LONG)
    until_running(server, 2)
    os.kill(server.engine_pid, signal.SIGKILL)
    assert stream.last()["error"]["code"] == "engine_error"
    assert whole.last()["error"]["code"] == "engine_error" and whole.status == 500
    assert server.process.wait(10) == 1
    assert "signal 9" in server.log.splitlines()[-1]


def test_a_killed_server_takes_its_engine_along(serve: Callable[..., Any]) -> None:
    server = serve()
    stream = Asking(server, {**LONG, "stream": True}).until_begun()
    engine = server.engine_pid
    server.process.kill()
    assert gone(engine)
    stream.join(10)
    assert isinstance(stream.error, httpx2.TransportError)


def test_a_server_that_cannot_start_ends_with_the_cause(tmp_path: Path, chat_model: Path) -> None:
    def start(*words: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, "-m", "sidestream", "serve", *words], capture_output=True, text=True, timeout=60)
        return done.returncode, done.stderr.strip().splitlines()[-1]

    status, last = start(str(tmp_path / "nowhere"), "--port", "0")
    assert status == 78 and "nowhere" in last
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, last = start(str(chat_model), "--port", port)
    assert status == 78 and f"127.0.0.1:{port}" in last and "in use" in last
    status, last = start(str(chat_model), "--port", "0", "--kv-tokens", "1")
    assert status == 78 and "kv_tokens" in last


def test_a_unix_socket_serves_and_goes_away(serve: Callable[..., Any], tmp_path: Path, chat_model: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    command = [sys.executable, "-m", "sidestream", "serve", str(chat_model), "--uds", str(path), "--kv-tokens", "1024"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "ready" in line:
                break
        transport = httpx2.HTTPTransport(uds=str(path))
        with httpx2.Client(transport=transport, base_url="http://server") as http:
            assert http.get("/health").status_code == 200
            assert http.post("/flush_cache").status_code == 200, "a process that may open the socket is on this machine"
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
    assert process.returncode == 0 and not path.exists()


@pytest.mark.parametrize("given", ["abc-123", None])
def test_request_ids_are_echoed(server: Any, given: str | None) -> None:
    answer = server.http.get("/health", headers={"X-Request-Id": given} if given else {})
    assert answer.headers["x-request-id"] == given if given else len(answer.headers["x-request-id"]) >= 16
