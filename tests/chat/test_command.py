"""The command as users run it: with a server at a URL, over a pipe and in a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sidestream
from sidestream import cli
from sidestream.chat.session import CUT
from sidestream.config import declared_options
from sidestream.params import SamplingParams


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for field in declared_options():
        monkeypatch.delenv(field.variable, raising=False)


@pytest.fixture
def engine(monkeypatch):
    """Stands in for `Engine`: answers every conversation with its last message in capitals."""

    class FakeEngine:
        context_length, calls = 100, []

        def __init__(self, model, **options):
            self.config = type("Config", (), {"model": model})
            self.calls.append(("Engine", model, options))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.calls.append(("close",))

        def encode_chat(self, messages):
            return messages

        def stream(self, messages, sampling):
            self.calls.append(("stream", messages, sampling))
            part = type("Part", (), {"text": messages[-1]["content"].upper(), "finish_reason": "length"})
            return type("Stream", (), {"__enter__": lambda self: iter([part]), "__exit__": lambda *_: None})()

    monkeypatch.setitem(vars(sidestream), "Engine", FakeEngine)
    return FakeEngine


def pipe(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode("utf-8", "surrogateescape")), encoding="utf-8"))


def test_a_pipe_to_an_engine(engine, monkeypatch, capsys):
    pipe(monkeypatch, "one\ntwo\n")
    words = ["chat", "m.gguf", "--system", "s", "--temperature", "0", "--kv-tokens", "64"]
    assert cli.main(words) == 0
    captured = capsys.readouterr()
    assert captured.out == "ONE\nTWO\n"
    assert captured.err == f"sidestream: {CUT}\n" * 2
    assert engine.calls[0][:2] == ("Engine", "m.gguf")
    assert engine.calls[0][2]["kv_tokens"] == 64
    assert engine.calls[2][1] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "ONE"},
        {"role": "user", "content": "two"},
    ]
    # As many tokens as there is room for, unless a number is given.
    assert engine.calls[2][2] == SamplingParams(temperature=0, max_new_tokens=2**31 - 1)
    assert engine.calls[3] == ("close",)
    pipe(monkeypatch, "")
    assert cli.main(["chat", "--model", "n.gguf", "--max-new-tokens", "5"]) == 0
    assert engine.calls[4][1] == "n.gguf"


def test_a_pipe_to_a_server(server, monkeypatch, capsys):
    monkeypatch.setenv("SIDESTREAM_API_KEY", "first, second")
    pipe(monkeypatch, "Hi\nMore\n")
    server.say("Hel", "lo")
    server.say("Yes")
    assert cli.main(["chat", server.url, "--system", "s", "--max-new-tokens", "5", "--seed", "1"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("Hello\nYes\n", "")
    assert [seen[2] for seen in server.seen] == ["Bearer first"] * 3
    body = server.seen[-1][1]
    assert (body["max_tokens"], body["seed"], "temperature" in body) == (5, 1, False)
    assert [message["content"] for message in body["messages"]] == ["s", "Hi", "Hello", "More"]
    pipe(monkeypatch, "Hi\n")
    server.answers = [(400, {"error": {"message": "too long", "code": "context_length_exceeded"}})]
    assert cli.main(["chat", f"{server.url}/v1", "--api-key", "third"]) == 1
    assert (
        capsys.readouterr().err
        == f"sidestream: {server.url}/v1/chat/completions answers 400: too long. Only the server can be given a longer context.\n"
    )
    assert server.seen[-1][2] == "Bearer third"


def test_a_conversation_that_outgrows_the_context(default_model, monkeypatch, capsys):
    pipe(monkeypatch, "How many days are in a week?\nTell me all about each of them.\nGo on.\n")
    assert cli.main(["chat", "--temperature", "0", "--ignore-eos", "--context-length", "64", "--threads", "1"]) == 2
    captured = capsys.readouterr()
    assert captured.out.startswith("A week is approximately 7 days.")
    cut, refused = captured.err.splitlines()
    assert cut == f"sidestream: {CUT}"
    assert re.fullmatch(
        r"sidestream: prompt: This model's maximum context length is 64 tokens\. However, the prompt has \d+ tokens\. "
        r"A larger --context-length or --kv-memory gives more room\.",
        refused,
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b"], "sidestream chat: got 2 models. Give one\n"),
        (["--n", "2"], "sidestream chat: --n: got 2, must be 1: a conversation goes on with one answer\n"),
        (["--api-key", "k"], "sidestream chat: --api-key needs the URL of a server\n"),
        (["http://h", "--threads", "1"], "sidestream chat: --threads is for a model that runs here; the engine behind a URL has its own"),
        (["http://h", "b"], "sidestream chat: got 2 words. Give one URL\n"),
        (["--temprature", "1"], "sidestream chat: unknown flag --temprature. Did you mean --temperature?\n"),
        (["--min-new-tokens", "6", "--max-new-tokens", "5"], "sidestream: --min-new-tokens: got 6, must be at most --max-new-tokens, 5\n"),
    ],
)
def test_mistakes_are_one_line(engine, capsys, words, message):
    assert cli.main(["chat", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(message)
    assert engine.calls == []


def test_a_server_that_is_not_there(capsys):
    assert cli.main(["chat", "HTTP://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("sidestream: HTTP://127.0.0.1:1/v1/models cannot be reached: ")


def test_input_that_is_not_text(engine, monkeypatch, capsys):
    pipe(monkeypatch, "\udcff\n")
    assert cli.main(["chat"]) == 2
    assert capsys.readouterr().err == "sidestream: prompt: got standard input that is not UTF-8, must be UTF-8 text\n"


class Terminal:
    """A process in a terminal of its own."""

    def __init__(self, *words):
        self.main, child = pty.openpty()
        command = [sys.executable, "-m", "sidestream", *words]
        path = str(Path(sidestream.__file__).parent.parent)
        environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "PROMPT_TOOLKIT_NO_CPR": "1", "PYTHONPATH": path}
        self.process = subprocess.Popen(
            command, stdin=child, stdout=child, stderr=child, env=environ, start_new_session=True, preexec_fn=_take_terminal
        )
        os.close(child)
        self.seen = ""

    def type(self, text):
        os.write(self.main, text.encode())

    def expect(self, text):
        """Wait for the text, and forget all up to it."""
        until = time.monotonic() + 60
        while text not in self.seen:
            assert time.monotonic() < until, f"{text!r} did not come, but {self.seen!r}"
            if select.select([self.main], [], [], 1)[0]:
                try:
                    self.seen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", os.read(self.main, 65536).decode())
                except OSError:  # the process has ended
                    until = 0
        self.seen = self.seen.partition(text)[2]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        os.close(self.main)


def _take_terminal():
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal


@pytest.mark.parametrize("flag", ["--plain", None])
def test_a_chat_in_a_terminal(server, flag):
    if flag is None:
        pytest.importorskip("rich")
        pytest.importorskip("prompt_toolkit")
    server.say("Hel", "lo there")
    server.answers.append((200, [server.chunk("Once"), server.chunk(" upon"), "WAIT"]))
    server.say("Again")
    with Terminal("chat", server.url, *([flag] if flag else [])) as terminal:
        terminal.expect("tiny at")
        terminal.expect(">")
        terminal.type("Hi\r")
        terminal.expect("Hello there")
        terminal.expect(">")
        terminal.type("Tell me\r")
        terminal.expect("Once upon")
        assert server.waiting.wait(30)
        terminal.type("\x03")
        terminal.expect("stopped; what came is kept, /retry asks again")
        terminal.expect(">")
        server.go_on.set()
        terminal.type("/retry\r")
        terminal.expect("Again")
        terminal.expect(">")
        terminal.type("\x04")
        assert terminal.process.wait(30) == 0
    assert [message["content"] for message in server.seen[-1][1]["messages"]] == ["Hi", "Hello there", "Tell me"]
