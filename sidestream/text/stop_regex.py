"""Follows regular expressions through a text that arrives in pieces."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from sidestream.errors import InvalidRequest
from sidestream.options import shown

SECONDS = 0.02  # for one search: some expressions take exponential time
FAST, ALL_SECONDS = 0.002, 0.5  # what is not counted of a step's searches, and what all steps of a request may take beyond it

# `(?:a{1000}){1000}` is a million characters once it is compiled, and one more step of that kind no machine's memory.
MAX_REPETITIONS = 10_000  # all counts in braces, multiplied
REPETITION = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")


class RegexMatch(NamedTuple):
    stop: str  # the expression
    offset: int  # where it starts: characters of the whole text


class RegexScanner:
    """A match ends the text as soon as the text so far has one, however it might go on: `a+` matches the first `a`.

    `showable` is how much of the text has no part in the last piece's matches and cannot become the beginning of one.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [(pattern, compiled(pattern)) for pattern in patterns]
        self._text = ""
        self._start = 0  # of the next search: no match begins before it that was not there already
        self._failed = False
        self._left = ALL_SECONDS
        self.showable = 0

    def feed(self, text: str) -> RegexMatch | None:
        """Of the matches that there are now, the first; it is passed over from then on, whoever asks.

        Raises TimeoutError where the search takes too long; then nothing more is showable, and nothing is searched.
        """
        self._text += text
        if not text or self._failed:
            return None
        try:
            started = time.perf_counter()
            found = self._search(partial=False)
            begun = self._search(partial=True)
            self._left -= max(time.perf_counter() - started - FAST, 0)
            if self._left < 0:
                raise TimeoutError
        except TimeoutError:
            self._failed = True
            raise
        self.showable = min([len(self._text), *(match.start() for _, match in begun)])
        if not found:
            self._start = self.showable
            return None
        pattern, match = min(found, key=lambda each: each[1].start())
        self._start = match.end()
        return RegexMatch(pattern, match.start())

    def _search(self, *, partial: bool) -> list[tuple[str, Any]]:
        limits = {"partial": partial, "timeout": SECONDS, "concurrent": True}
        found = [(pattern, expression.search(self._text, self._start, **limits)) for pattern, expression in self._patterns]
        return [(pattern, match) for pattern, match in found if match is not None]


def too_slow(patterns: Sequence[str]) -> InvalidRequest:
    message = f"got {patterns[0]!r}, which takes more than {SECONDS:g} s to match the answer, or {ALL_SECONDS:g} s in all, must take less"
    return InvalidRequest("stop_regex", message, hint="Nested repetitions such as (a+)+ take exponential time.")


def compiled(pattern: str) -> Any:
    """Raises InvalidRequest for one that is wrong, or matches the empty text, which every text has in it."""
    import regex

    counts = (max((int(count) for count in found.groups() if count), default=1) for found in REPETITION.finditer(pattern))
    if (repetitions := math.prod(max(count, 1) for count in counts)) > MAX_REPETITIONS:
        got = f"got {pattern!r}, in which the counts of repetitions multiply to {shown(repetitions)}"
        raise InvalidRequest("stop_regex", f"{got}, must be at most {MAX_REPETITIONS}")
    try:
        expression = regex.compile(pattern)
        empty = expression.search("", timeout=SECONDS)
    except (regex.error, TimeoutError, RecursionError, OverflowError, MemoryError) as error:
        raise InvalidRequest("stop_regex", f"got {pattern!r}, must be a regular expression: {error}") from None
    if empty is not None:
        raise InvalidRequest("stop_regex", f"got {pattern!r}, which matches the empty text, must match some characters")
    return expression
