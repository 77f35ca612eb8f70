"""Standard input, output and error of a command."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sidestream.errors import InvalidRequest


class OutputFailed(Exception):
    """Standard output cannot be written: the disk is full, for one."""


def write(text: str, end: str = "\n") -> None:
    """Standard output, at once: a disk that is full shows here, and not when Python ends."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputFailed(f"standard output cannot be written: {error.strerror or error}") from error


def write_json(value: dict[str, Any]) -> None:
    import json

    write(json.dumps(value, allow_nan=False))


def leave_output() -> None:
    """What is still buffered goes nowhere, or Python would try again at its end, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_all() -> str:
    """All of standard input; the newline that `echo` and editors add at its end is no part of the prompt."""
    try:
        return sys.stdin.read().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise InvalidRequest("prompt", "got standard input that is not UTF-8, must be UTF-8 text") from None


@contextmanager
def log_on_stderr(level: str) -> Iterator[None]:
    import logging

    logger, handler = logging.getLogger("sidestream"), logging.StreamHandler()
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    try:
        yield
    finally:
        logger.removeHandler(handler)
