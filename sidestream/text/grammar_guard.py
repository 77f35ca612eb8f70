"""Tries grammars in a process of its own, which can be ended: the compiler knows no limit of time or memory for some of them.

`python -m sidestream.text.grammar_guard` is that process; whoever started it writes what to try to its standard input.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from sidestream.errors import EngineDead, EngineFault, InvalidRequest
from sidestream.messages import Grammar
from sidestream.text.tokenizer import TokenizerState

MAX_SECONDS = 5.0  # for one grammar, from when the process is ready
START_SECONDS = 30.0  # for the process to be ready
MAX_BYTES = 1 << 30  # of memory beside what the process has when it is ready


class Refusal(msgspec.Struct):
    """What the process says of a grammar; nothing for one that is right."""

    said: str | None = None
    hint: str | None = None


class GrammarGuard:
    """Started with the first grammar; again after one that it had to be ended for. To be used by one thread at a time."""

    def __init__(self, tokenizer: TokenizerState, vocab_size: int) -> None:
        self._start = msgspec.msgpack.encode((tokenizer, vocab_size))
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequest for what the compiler refuses, and for what takes too much time or memory."""
        self._check_open()
        if self._process is not None and self._process.poll() is not None:  # somebody else ended it
            self._end()
        process = self._process or self._started()
        refusal = _within(MAX_SECONDS, process, lambda: _asked(process, grammar))
        if refusal is None:
            self._end()
            self._check_open()
            too_much = f"more than {MAX_SECONDS:g} s or {MAX_BYTES >> 20} MiB to compile, must take less"
            raise InvalidRequest(grammar.field, f"the grammar takes {too_much}", hint="Make it simpler.")
        if refusal.said is not None:
            raise InvalidRequest(grammar.field, refusal.said, hint=refusal.hint)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead("the engine is closed")

    def _started(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "sidestream.text.grammar_guard"]
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path})
        self._process = process
        assert process.stdin is not None
        _write(process.stdin, self._start)
        if _within(START_SECONDS, process, lambda: _answer(process)) is None:
            self._end()
            raise EngineFault("the process that tries grammars does not start")
        return process

    def close(self) -> None:
        """From any thread: what is being tried ends, too."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()


def _within(seconds: float, process: subprocess.Popen[bytes], call: Callable[[], Refusal | None]) -> Refusal | None:
    """The process is ended when the time is over: then there is no answer."""
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        return call()
    finally:
        timer.cancel()


def _asked(process: subprocess.Popen[bytes], grammar: Grammar) -> Refusal | None:
    assert process.stdin is not None
    try:
        _write(process.stdin, msgspec.msgpack.encode(grammar))
    except OSError:
        return None
    return _answer(process)


def _answer(process: subprocess.Popen[bytes]) -> Refusal | None:
    assert process.stdout is not None
    data = _read(process.stdout)
    return None if data is None else msgspec.msgpack.decode(data, type=Refusal)


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(8, "little") + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes | None:
    """None at the end."""
    size = pipe.read(8)
    if len(size) < 8:
        return None
    data = pipe.read(int.from_bytes(size, "little"))
    return data if len(data) == int.from_bytes(size, "little") else None


# The process


def main() -> None:
    from sidestream.text.grammar import Grammars
    from sidestream.text.tokenizer import Tokenizer

    _be_modest()
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    start = _read(source)
    if start is None:
        return
    state, vocab_size = msgspec.msgpack.decode(start, type=tuple[TokenizerState, int])
    grammars = Grammars(Tokenizer.from_state(state), vocab_size)
    with suppress(InvalidRequest):  # the tokenizer admits none: said again of each
        grammars.compiled(Grammar("regex", "a"))  # the vocabulary is made ready before the limits begin
    _limit_memory()
    _write(answers, msgspec.msgpack.encode(Refusal()))
    while (asked := _read(source)) is not None:
        refusal = Refusal()
        _limit_time()
        try:
            grammars.compiled(msgspec.msgpack.decode(asked, type=Grammar))
        except InvalidRequest as error:
            refusal = Refusal(error.said, error.hint)
        except MemoryError:
            os._exit(1)
        _write(answers, msgspec.msgpack.encode(refusal))


def _be_modest() -> None:
    """The engine goes first; the signals that end a server are not for this process, whose standard input ends with it."""
    import signal

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError, AttributeError):
        os.nice(10)


def _limit_memory() -> None:
    """Where the system can: Linux. Elsewhere the time limits it."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit: Any = pages * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time() -> None:
    """For the case that whoever would end this process has ended itself."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + 2 * MAX_SECONDS), hard))


if __name__ == "__main__":
    main()
