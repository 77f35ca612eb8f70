"""How the script of a Python client runs: `python CLIENT.py URL MODEL KEY [CHECK ...]`, every check to its end, whatever fails."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

URL, MODEL, KEY = sys.argv[1:4]  # URL without /v1
PROMPT = "Repeat after me: one two three four five"
UNICODE = "Žluťoučký kůň 🐎 skáče, 한글 и ёж"


def run(names: dict[str, Any], *arguments: Any) -> None:
    """Call every function `check_...` of a module's names with the arguments. Ends the process: 1 where one failed."""
    chosen = {name: check for name, check in names.items() if name.startswith("check_") and (not sys.argv[4:] or name in sys.argv[4:])}
    failed = []
    for name, check in chosen.items():
        try:
            check(*arguments)
            print("ok", name, flush=True)
        except Exception:
            failed.append(name)
            print("FAILED", name, traceback.format_exc(), sep="\n", flush=True)
    print(f"{len(chosen) - len(failed)} ok, {len(failed)} failed: {' '.join(failed)}")
    sys.exit(bool(failed) or not chosen)


def equal(got: object, wanted: object) -> None:
    assert got == wanted, f"got {str(got)[:600]}, wanted {str(wanted)[:600]}"


def refused(call: Callable[[], object], kind: type[Exception], *, exactly: bool = True) -> Any:
    """The exception of a call that must raise one of this class; of the very class, unless a client has its own below it."""
    try:
        answer = call()
    except kind as error:
        assert type(error) is kind or not exactly, f"got {type(error).__name__}: {error}, wanted {kind.__name__}"
        return error
    raise AssertionError(f"wanted {kind.__name__}, got an answer: {str(answer)[:200]}")


def eventually(what: str, is_so: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"not so after {seconds} s: {what}"
        time.sleep(0.05)
