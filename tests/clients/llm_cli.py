"""`llm openai endpoint`, the command, which needs no configuration."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import KEY, MODEL, PROMPT, UNICODE, URL, equal, run

LLM = str(Path(sys.executable).parent / "llm")


def llm(*words: str, status: int = 0, url: str = f"{URL}/v1", key: str = KEY) -> str:
    """What the command prints; on standard error where it fails."""
    with tempfile.TemporaryDirectory() as home:
        command = [LLM, "openai", "endpoint", url, "--key", key, *words]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "LLM_USER_PATH": home})
    equal((finished.returncode, finished.stderr if status == 0 else ""), (status, ""))
    return (finished.stdout if status == 0 else finished.stderr).rstrip("\n")


def ask(*words: str) -> str:
    return llm("-m", MODEL, "-o", "temperature", "0", "-o", "max_tokens", "24", *words)


def check_models() -> None:
    assert MODEL in llm("--models").split()


def check_chat() -> None:
    streamed, whole = ask(PROMPT), ask(PROMPT, "--no-stream")
    assert streamed
    equal(streamed, whole)
    assert ask(PROMPT, "-s", "Be brief.")


def check_unicode() -> None:
    equal(ask(f"Repeat after me: {UNICODE}"), ask(f"Repeat after me: {UNICODE}", "--no-stream"))


def check_responses() -> None:
    words = ("-m", MODEL, "-o", "temperature", "0", "-o", "max_tokens", "24", "--responses", PROMPT)
    streamed = llm(*words)
    assert streamed
    equal(streamed, llm(*words, "--no-stream"))


def check_errors() -> None:
    assert "no-such" in llm("-m", "no-such", PROMPT, status=1)
    assert "top_p" in llm("-m", MODEL, "-o", "top_p", "0", PROMPT, status=1)
    assert llm("-m", MODEL, PROMPT, status=1, key="wrong")


def check_double_slash() -> None:
    assert MODEL in llm("--models", url=f"{URL}/v1/").split()


if __name__ == "__main__":
    run(globals())
