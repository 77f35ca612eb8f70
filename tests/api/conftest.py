"""A server in a process of its own on the tiny model, as a user starts it, and a client for it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from sidestream import Engine

CHAT_TEMPLATE = (
    "{{ style ~ '\n' if style }}{% for message in messages %}<|start|>{{ message.role }}{{ ' ' ~ message.name if message.name }}\n"
    "{{ '(' ~ message.reasoning ~ '|' ~ message.reasoning_content ~ ')' if message.reasoning }}{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# Of a model that calls tools in Hermes' notation, and thinks.
TOOL_TEMPLATE = (
    "{% if tools %}tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}{% endif %}"
    "{% for message in messages %}<|start|>{{ message.role }}\n"
    "{{ '<think>' ~ message.reasoning_content ~ '</think>' if message.reasoning_content }}"
    "{{ message.tool_call_id ~ ':' if message.tool_call_id }}{{ message.content if message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{{ '' if enable_thinking is undefined else '<think>' if enable_thinking else '<think></think>' }}{% endif %}"
)
START_SECONDS = 60


class Server:
    """`sidestream serve` until `stop`. `http` asks it; `log` is what it wrote so far."""

    def __init__(self, model: Path | str, *flags: str, environ: dict[str, str] | None = None, wait: bool = True) -> None:
        self._directory = tempfile.mkdtemp()
        self._log = Path(self._directory) / "log"
        env = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
        command = [sys.executable, "-m", "sidestream", "serve", str(model), "--port", "0", *flags]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        self.url = ""
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        until = time.monotonic() + START_SECONDS
        while (found := re.search(r"ready +(http://\S+)", self.log)) is None:
            assert self.process.poll() is None and time.monotonic() < until, self.log
            time.sleep(0.02)
        self.url = found[1]
        self.http = httpx2.Client(base_url=self.url, timeout=60)

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def engine_pid(self) -> int:
        """The engine's process: the server's only child."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1, children
        return int(children[0])

    def post(self, path: str, body: Any, **keywords: Any) -> httpx2.Response:
        return self.http.post(path, json=body, **keywords)

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream that ends as it should."""
        with self.http.stream("POST", path, json=body | {"stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        return [json.loads(event, parse_constant=pytest.fail) for event in events]

    def stats(self) -> dict[str, Any]:
        return dict(self.http.get("/server_info").json()["stats"])

    def stop(self, number: int = signal.SIGTERM) -> int:
        """The exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            status = self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the server did not end: {self.log}") from None
        return status

    def close(self) -> None:
        """End it however it is, and leave nothing behind."""
        if self.process.poll() is None:
            self.stop(signal.SIGKILL)
        with suppress(AttributeError):
            self.http.close()
        shutil.rmtree(self._directory)


@pytest.fixture(scope="session")
def chat_model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a chat template."""
    directory = tmp_path_factory.mktemp("chat") / "tiny-chat"
    shutil.copytree(tiny_llama, directory)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory


def _serving(model: Path) -> Iterator[Server]:
    """A server until the tests are done with it. Afterwards its memory must be at rest, and it ends by itself."""
    made = Server(model, "--dtype", "float32", "--kv-tokens", "8192", "--max-running-requests", "16")
    yield made
    try:
        stats = made.stats()
    finally:
        status, log = made.stop(), made.log
        made.close()
    assert status == 0, log
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["kv_tokens_free"] + stats["kv_tokens_cached"] == stats["kv_tokens_total"]


@pytest.fixture(scope="session")
def made_server() -> Callable[[Path], Iterator[Server]]:
    """For fixtures that need a server on a model of their own: `yield from made_server(model)`."""
    return _serving


@pytest.fixture(scope="session")
def server(chat_model: Path) -> Iterator[Server]:
    """One for all tests that change nothing about it."""
    yield from _serving(chat_model)


@pytest.fixture(scope="session")
def tool_model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tools") / "tiny-tools"
    shutil.copytree(tiny_llama, directory)
    (directory / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return directory


@pytest.fixture(scope="session")
def tool_server(tool_model: Path) -> Iterator[Server]:
    """One whose model takes tools and reasons."""
    yield from _serving(tool_model)


@pytest.fixture(scope="session")
def engine(chat_model: Path) -> Iterator[Engine]:
    """The model of `server` in this process, with the same options: what one answers, the other must answer too."""
    options = {"dtype": "float32", "threads": 1, "kv_tokens": 8192, "max_running_requests": 16, "log_level": "warning"}
    with Engine(str(chat_model), **options) as engine:
        yield engine


@pytest.fixture(scope="session")
def exact_server(chat_model: Path) -> Iterator[Server]:
    """One on the native kernels, where a request gets the same bytes whatever runs beside it and whatever is cached."""
    made = Server(chat_model, "--dtype", "bfloat16", "--kv-tokens", "8192", "--max-running-requests", "16")
    yield made
    status = made.stop()
    made.close()
    assert status == 0


@pytest.fixture
def serve(chat_model: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers of a test's own, which end with it."""
    started: list[Server] = []

    def start(*flags: str, model: Path = chat_model, **keywords: Any) -> Server:
        started.append(Server(model, "--dtype", "float32", "--kv-tokens", "4096", *flags, **keywords))
        return started[-1]

    yield start
    for each in started:
        each.close()
