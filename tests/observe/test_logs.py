"""The lines of a server's log, and when the one about the work comes."""

from __future__ import annotations

import io
import json
import logging
import re

import pytest

from sidestream.observe.logs import Ticker, log_to_stderr, ticker_line

log = logging.getLogger("sidestream")
STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_text_says_when_and_what():
    stream = io.StringIO()
    with log_to_stderr("info", stream=stream):
        log.info("ready   http://127.0.0.1:%d", 30000)
        log.debug("not shown")
        log.warning("the queue is full")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert re.fullmatch(STAMP + " ready   http://127.0.0.1:30000", lines[0])
    assert re.fullmatch(STAMP + " warning: the queue is full", lines[1])


def test_color_is_for_terminals(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal, plain = Terminal(), Terminal()
    with log_to_stderr(stream=terminal):
        log.error("the engine stopped")
        log.info("bye")
    monkeypatch.setenv("NO_COLOR", "1")
    with log_to_stderr(stream=plain):
        log.error("the engine stopped")
    first, second = terminal.getvalue().splitlines()
    assert re.fullmatch("\x1b\\[2m" + STAMP + "\x1b\\[0m \x1b\\[31merror:\x1b\\[0m the engine stopped", first)
    assert re.fullmatch("\x1b\\[2m" + STAMP + "\x1b\\[0m bye", second)
    assert "\x1b" not in plain.getvalue()


def test_json_lines_are_whole():
    stream = io.StringIO()
    with log_to_stderr("debug", "json", stream):
        log.info("answered %s", "r1", extra={"rid": "r1", "seconds": 0.5, "shape": {1}})
        try:
            raise ValueError("héllo\nworld")
        except ValueError:
            log.exception("the request failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first == {"level": "info", "message": "answered r1", "rid": "r1", "seconds": 0.5, "shape": "{1}"}
    assert (second["level"], second["message"]) == ("error", "the request failed")
    assert second["traceback"].startswith("Traceback") and second["traceback"].endswith("ValueError: héllo\nworld")


def test_only_our_logger_is_set_up_and_only_for_a_while(capsys):
    root, other = logging.getLogger(), logging.getLogger("uvicorn")
    before = (root.level, list(root.handlers), other.level, list(other.handlers), log.level, list(log.handlers), log.propagate)
    seen = io.StringIO()
    handler = logging.StreamHandler(seen)
    root.addHandler(handler)
    try:
        with log_to_stderr("debug"):
            assert (root.level, other.level, other.handlers) == (before[0], before[2], before[3])
            log.debug("once")
    finally:
        root.removeHandler(handler)
    assert (root.level, list(root.handlers), other.level, list(other.handlers), log.level, list(log.handlers), log.propagate) == before
    assert seen.getvalue() == ""
    out, err = capsys.readouterr()
    assert out == "" and err.count("once") == 1


def test_the_line_about_the_work(report):
    before = {**report, "forward_tokens": 0, "generation_tokens": 0, "prompt_tokens": 0, "cached_tokens": 0}
    after = {**report, "forward_tokens": 15100, "generation_tokens": 3100, "prompt_tokens": 20000, "cached_tokens": 16200}
    assert ticker_line(before, after, 10.0) == "run 4 queue 2 | prefill 1.2k tok/s decode 310 tok/s | kv 12% hit 81%"


@pytest.mark.parametrize(
    ("changes", "seconds", "line"),
    [
        ({}, 10.0, "run 4 queue 2 | prefill 0 tok/s decode 0 tok/s | kv 12%"),
        ({}, 0.0, "run 4 queue 2 | prefill 0 tok/s decode 0 tok/s | kv 12%"),
        # A step whose tokens count as generated before its positions count as computed
        ({"generation_tokens": 110}, 1.0, "run 4 queue 2 | prefill 0 tok/s decode 10 tok/s | kv 12%"),
        ({"forward_tokens": 2500160, "running": 0}, 1.0, "run 0 queue 2 | prefill 2.5M tok/s decode 0 tok/s | kv 12%"),
        ({"prompt_tokens": 200}, 1.0, "run 4 queue 2 | prefill 0 tok/s decode 0 tok/s | kv 12% hit 0%"),
    ],
)
def test_lines_at_the_edges(report, changes, seconds, line):
    assert ticker_line(report, {**report, **changes}, seconds) == line


def test_a_line_needs_only_what_every_engine_reports(report):
    for key in ("prompt_tokens", "generation_tokens", "cached_tokens", "kv_tokens_evictable"):
        del report[key]
    assert ticker_line(report, {**report, "forward_tokens": 260}, 1.0) == "run 4 queue 2 | prefill 100 tok/s decode 0 tok/s | kv 6%"


class Work:
    """An engine that reports once a second: `play` takes one letter per second, `w` for work, `.` for none, `s` for a short request."""

    def __init__(self, report, clock) -> None:
        self.report = {**report, "running": 0, "waiting": 0, "forward_tokens": 0, "generation_tokens": 0}
        self.clock = clock
        self.ticker = Ticker(clock)

    def play(self, seconds: str, caplog) -> list[int]:
        """The seconds in which a line was logged."""
        told = []
        for second, letter in enumerate(seconds):
            caplog.clear()
            self.report["running"] = int(letter == "w")
            if letter in "ws":
                self.report["forward_tokens"] += 100
                self.report["generation_tokens"] += 100
            self.ticker.observe(dict(self.report))
            told += [second] * len(caplog.records)
            self.clock.now += 1
        return told


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        ("." * 60, []),
        ("..." + "w" * 5 + "." * 30, [8]),  # the end of the work
        ("." + "w" * 25 + "." * 30, [10, 20, 30]),  # while it lasts, and at its end, which is told when ten seconds are over
        ("." + "w" * 10 + "." * 30, [10, 20]),  # the last line said that there is work: one says that it is done
        (".s" + "." * 30, [1]),  # a request that nobody saw running
        ("." + "s." * 15 + "." * 30, [1, 11, 21, 31]),  # many of them
        ("." + "w" * 12 + "." * 30 + "w" * 3 + "." * 9, [10, 20, 46]),
    ],
)
def test_when_there_is_a_line(seconds, told, report, clock, caplog):
    caplog.set_level(logging.INFO, "sidestream")
    assert Work(report, clock).play(seconds, caplog) == told


def test_speeds_are_those_of_the_time_since_the_work_began(report, clock, caplog):
    caplog.set_level(logging.INFO, "sidestream")
    Work(report, clock).play("." * 30 + "wwww.", caplog)
    assert caplog.messages == ["run 0 queue 0 | prefill 0 tok/s decode 80 tok/s | kv 12%"]
