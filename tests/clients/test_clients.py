"""Clients that others use, unchanged, against a server of ours: one process of the server for all, an environment for each client."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
KEY = "test-key"
START_SECONDS, STOP_SECONDS, CLIENT_SECONDS = 120, 30, 300

pytestmark = [pytest.mark.clients, pytest.mark.timeout(CLIENT_SECONDS + 60)]


def installer() -> Any:
    loader = SourceFileLoader("clients_install", str(HERE / "install"))
    module = module_from_spec(spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    sys.modules[loader.name] = module  # a NamedTuple looks its module up
    loader.exec_module(module)
    return module


INSTALL = installer()


class Server:
    """`sidestream serve` in a process of its own."""

    def __init__(self, log: Path, *words: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        command = [sys.executable, "-m", "sidestream", "serve", "smollm2", "--port", str(port), "--api-key", KEY, *words]
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT)

    def wait_until_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while self.status("/health") != 200:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log.read_text()}"
            assert time.monotonic() < end, f"the server is not ready:\n{self.log.read_text()}"
            time.sleep(0.05)

    def status(self, path: str) -> int | None:
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    @property
    def model(self) -> str:
        asked = urllib.request.Request(f"{self.url}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(asked, timeout=5) as answer:
            return str(json.load(answer)["data"][0]["id"])

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not end {STOP_SECONDS} s after SIGTERM:\n{self.log.read_text()}") from None


@contextmanager
def serving(log: Path, *words: str) -> Iterator[Server]:
    made = Server(log, *words)
    try:
        yield made
    finally:
        status = made.stop()
    assert status == 0, made.log.read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server") / "log.txt") as made:
        made.wait_until_ready()
        yield made


def run_client(name: str, url: str, model: str, *checks: str, script: str | None = None) -> None:
    """Run a client's script; skipped where it is not installed."""
    if INSTALL.CLIENTS[name].node and shutil.which("node") is None:
        pytest.skip("there is no node")
    command = INSTALL.command(name)
    if command is None:
        pytest.skip(f"not installed: tests/clients/install {name}")
    file = HERE / (script or f"{name}.{'mjs' if INSTALL.CLIENTS[name].node else 'py'}")
    if INSTALL.CLIENTS[name].node:  # modules of Node look for packages beside themselves
        shutil.copy(HERE / "checks.mjs", INSTALL.HOME / name)
        file = Path(shutil.copy(file, INSTALL.HOME / name))
    plain = {variable: value for variable, value in os.environ.items() if not variable.startswith(("PYTHON", "OPENAI_", "ANTHROPIC_"))}
    words = [*command, str(file), url, model, KEY, *checks]
    finished = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=CLIENT_SECONDS, env=plain | {"NO_PROXY": "127.0.0.1"}
    )
    if finished.returncode != 0:
        pytest.fail(finished.stdout, pytrace=False)


@pytest.mark.parametrize("name", [name for name in INSTALL.CLIENTS if name != "schemathesis_fuzz"])
def test_client(name: str, server: Server) -> None:
    run_client(name, server.url, server.model)
    assert server.status("/health") == 200


TOOL_SCRIPTS = {"openai_python": "openai_tools.py", "anthropic_python": "anthropic_tools.py", "ai_sdk": "ai_sdk_tools.mjs"}


@pytest.fixture(scope="module")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The default model's own template takes no tools."""
    template = ROOT / "docs" / "templates" / "chatml_tools.jinja"
    with serving(tmp_path_factory.mktemp("tools") / "log.txt", "--chat-template", str(template)) as made:
        made.wait_until_ready()
        yield made


@pytest.mark.parametrize("name", TOOL_SCRIPTS)
def test_tools(name: str, tool_server: Server) -> None:
    run_client(name, tool_server.url, tool_server.model, script=TOOL_SCRIPTS[name])


def test_bodies_made_from_the_schema(tmp_path: Path) -> None:
    with serving(tmp_path / "log.txt", "--context-length", "64") as made:
        made.wait_until_ready()
        run_client("schemathesis_fuzz", made.url, made.model)
        assert made.status("/health") == 200


def test_a_client_waits_while_the_model_loads_and_while_the_queue_is_full(tmp_path: Path) -> None:
    """The port is bound before the model loads: a client that tries again on 503 and 429 gets through."""
    with serving(tmp_path / "log.txt", "--max-running-requests", "1", "--max-queued-requests", "1") as made:
        end = time.monotonic() + START_SECONDS
        while (status := made.status("/health")) is None:
            assert time.monotonic() < end and made.process.poll() is None, made.log.read_text()
            time.sleep(0.01)
        assert status == 503, "the port is bound before the model is loaded"
        run_client("openai_python", made.url, "smollm2", script="openai_retries.py")
