"""What a server writes: its log on standard error, and one line about the work while there is some."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import IO, Literal

from sidestream.observe.series import Report, usage

log = logging.getLogger("sidestream")

LogFormat = Literal["text", "json"]
TICK_SECONDS = 10.0
COLORS: Mapping[int, str] = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[31m"}
FAINT, PLAIN = "\x1b[2m", "\x1b[0m"
OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}  # of a record; others were given as `extra`


@contextmanager
def log_to_stderr(level: str = "info", form: LogFormat = "text", stream: IO[str] | None = None) -> Iterator[None]:
    """Write what the logger `sidestream` says to standard error, from `level` on.

    No other logger is touched, the root logger least of all: what else runs in the process logs as it was set up to.
    """
    stream = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if form == "json" else TextLines(color=stream.isatty() and not os.environ.get("NO_COLOR")))
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(level.upper())
    log.propagate = False  # or a root logger that somebody has set up would write everything twice
    try:
        yield
    finally:
        log.setLevel(before[0])
        log.propagate = before[1]
        log.removeHandler(handler)


class TextLines(logging.Formatter):
    """`2026-01-31 12:00:00 the message`; the level is named from a warning on."""

    def __init__(self, *, color: bool) -> None:
        super().__init__("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")
        self._color = color

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        stamp = super().formatTime(record, datefmt)
        return f"{FAINT}{stamp}{PLAIN}" if self._color else stamp

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            color = COLORS.get(record.levelno, "") if self._color else ""
            record.message = f"{color}{record.levelname.lower()}:{PLAIN if color else ''} {record.message}"
        return super().formatMessage(record)


class JsonLines(logging.Formatter):
    """One JSON object per line: time (UTC), level, message, what was given as `extra`, and the traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, timezone.utc)
        line = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in OWN_FIELDS},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class Ticker:
    """Logs what the engine does: a line every 10 seconds while there is work, one when the work is done, none while idle.

    `observe` takes the engine's report, as often as there is one and about once a second while idle: the line about the end of the
    work comes with a report that shows it. Short requests in a row make one line in 10 seconds too.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: tuple[float, Report] | None = None  # where the time begins that the next line is about
        self._last: Report = {}
        self._printed = -math.inf
        self._owed = False  # there was work that no line has told of, or the last line did not say that it is done

    def observe(self, report: Report) -> None:
        now = self._clock()
        busy = bool(report["running"] or report["waiting"])
        worked = bool(self._last) and report["forward_tokens"] != self._last["forward_tokens"]
        if self._since is None or not (busy or worked or self._owed):
            self._since = now, report  # an idle engine: the time starts with the work
        self._owed = self._owed or busy or worked
        self._last = report
        since, before = self._since
        if self._owed and now - self._printed >= TICK_SECONDS and (not busy or now - since >= TICK_SECONDS):
            log.info("%s", ticker_line(before, report, now - since))
            self._printed, self._since, self._owed = now, (now, report), busy


def ticker_line(before: Report, after: Report, seconds: float) -> str:
    """What the engine does after `after`, and how fast it was between the two reports.

    `run 4 queue 0 | prefill 1.2k tok/s decode 310 tok/s | kv 12% hit 81%`; prefill counts what was computed, not what was cached,
    and hit is left out where no prompt came.
    """

    def more(name: str) -> float:
        return float(after.get(name, 0) - before.get(name, 0))

    decoded = more("generation_tokens")
    speeds = [_short(max(0.0, tokens) / seconds if seconds > 0 else 0.0) for tokens in (more("forward_tokens") - decoded, decoded)]
    hit = f" hit {more('cached_tokens') / more('prompt_tokens'):.0%}" if more("prompt_tokens") > 0 else ""
    return (
        f"run {after['running']} queue {after['waiting']} | prefill {speeds[0]} tok/s decode {speeds[1]} tok/s | kv {usage(after):.0%}{hit}"
    )


def _short(number: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"
