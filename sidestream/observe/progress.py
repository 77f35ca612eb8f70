"""A progress bar for calls with many prompts: rich on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

MANY = 16  # fewer answers are shown without a bar unless it was asked for


class Progress(Protocol):
    def advance(self, tokens: int) -> None:
        """One more answer, of so many tokens, is complete."""


class _Silent:
    def advance(self, tokens: int) -> None:
        pass


class _Bar:
    def __init__(self, bar: Any, task: Any) -> None:
        self._bar = bar
        self._task = task
        self._tokens = 0

    def advance(self, tokens: int) -> None:
        self._tokens += tokens
        elapsed = self._bar.tasks[0].elapsed or 0.0
        self._bar.update(self._task, advance=1, speed=f"{self._tokens / elapsed:,.0f} tok/s" if elapsed else "")


@contextmanager
def open_progress(wanted: bool | None, total: int) -> Iterator[Progress]:
    """`wanted=None` shows a bar on standard error for many answers, if it is a terminal."""
    if wanted is False or (wanted is None and (total < MANY or not sys.stderr.isatty())):
        yield _Silent()
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress
    except ImportError:  # rich is optional
        yield _Silent()
        return
    columns = (
        TextColumn("generate"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True)) as bar:
        yield _Bar(bar, bar.add_task("generate", total=total, speed=""))
