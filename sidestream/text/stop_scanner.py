"""Follows several stop strings and expressions through a text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sidestream.errors import InvalidRequest
from sidestream.text.stop_regex import RegexScanner


class StopMatch(NamedTuple):
    stop: str  # or the regular expression that matched
    offset: int  # where it starts: characters of the whole output text


class StopScanner:
    """Knuth-Morris-Pratt, one automaton per stop string: each character is looked at once, however the text is cut into pieces.

    `showable` is how much of the text may be shown: the longest beginning of it that does not end in a proper prefix of a stop
    string and has nothing of an occurrence that the last piece completed. That one is the engine's to judge, see `OutputText`.
    """

    def __init__(self, stop: Sequence[str], regexes: Sequence[str] = ()) -> None:
        if "" in stop:
            raise InvalidRequest("stop", "a stop string must not be empty")
        self._stop = tuple(stop)
        self._borders = [_borders(each) for each in stop]
        self._matched = [0] * len(self._stop)  # for each: the text ends in that many of its first characters
        self._begin = re.compile("[" + "".join(re.escape(each[0]) for each in stop) + "]") if stop else None
        self._regexes = RegexScanner(regexes) if regexes else None
        self._clear = 0  # the last place where nothing was begun
        self.length = 0  # characters of the text so far
        self.showable = 0

    def feed(self, text: str) -> StopMatch | None:
        """Of the occurrences that end in this piece, the one that starts first; then the first in the order of the list, then a regex.

        Raises TimeoutError where a regular expression takes too long.
        """
        found = self._feed(text)
        if self._regexes is None:
            return found
        try:
            match = self._regexes.feed(text)
        finally:
            self.showable = min(self.showable, self._regexes.showable)
        if match is None or (found is not None and found.offset <= match.offset):
            return found
        return StopMatch(match.stop, match.offset)

    def _feed(self, text: str) -> StopMatch | None:
        best: tuple[int, int] | None = None  # start, index in the list
        showable: int | None = None
        at = 0
        while at < len(text):
            if not any(self._matched):  # jump to the next character that begins something
                begin = None if self._begin is None else self._begin.search(text, at)
                at = len(text) if begin is None else begin.start()
                self._clear = self.length + at
                if begin is None:
                    break
            for index in self._advance(text[at]):
                # Nothing was clear since this occurrence began, so what was clear last lies before it.
                showable = self._clear if showable is None else showable
                found = self.length + at + 1 - len(self._stop[index]), index
                best = found if best is None else min(best, found)
            at += 1
            if not any(self._matched):
                self._clear = self.length + at
        self.length += len(text)
        self.showable = self._clear if showable is None else showable
        return None if best is None else StopMatch(self._stop[best[1]], best[0])

    def _advance(self, character: str) -> Iterator[int]:
        """One character further; which stop strings it completed, in the order of the list."""
        for index, (stop, borders) in enumerate(zip(self._stop, self._borders, strict=True)):
            matched = self._matched[index]
            while matched and character != stop[matched]:
                matched = borders[matched - 1]
            matched += character == stop[matched]
            complete = matched == len(stop)
            self._matched[index] = borders[-1] if complete else matched
            if complete:
                yield index


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`: the length of its longest proper prefix that it also ends in."""
    borders = [0] * len(stop)
    matched = 0
    for at in range(1, len(stop)):
        while matched and stop[at] != stop[matched]:
            matched = borders[matched - 1]
        matched += stop[at] == stop[matched]
        borders[at] = matched
    return borders
