"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]`, or in newer models `[TOOL_CALLS]f[ARGS]{"a": 1}` for each call."""

from __future__ import annotations

import re

from sidestream.text.tools.events import held_back
from sidestream.text.tools.json_object import ArgumentsReader
from sidestream.text.tools.parser import JsonCallParser

MARK, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)", re.ASCII)
MAYBE_NAMED = re.compile(r"\s*[\w.-]*(?:\[[A-Z_]*(?:\]\w*)?)*\s*", re.ASCII)  # what may still become it


class MistralParser(JsonCallParser):
    def _start(self, final: bool) -> None:
        self._step = self._text

    def _text(self, final: bool) -> None:
        at = self._pending.find(MARK)
        if at >= 0:
            self._content(at)
            self._step = self._marked
        else:
            self._content(len(self._pending) - (0 if final else held_back(self._pending, MARK)))

    def _marked(self, final: bool) -> None:
        """Behind the marker."""
        text = self._pending[len(MARK) :]
        inner = text.lstrip()
        self._listed = inner.startswith("[")
        if self._listed:
            inner = inner[1:].lstrip()
        if inner.startswith("{"):
            self._open(len(self._pending) - len(inner))
        elif not self._listed and (named := NAMED.match(text)) is not None and named[1] in self._names:
            self._pending = text[named.end() :]
            self._open(0, ArgumentsReader(named[1]))
        elif final or (inner if self._listed else MAYBE_NAMED.fullmatch(text) is None):
            self._content(len(MARK))
            self._step = self._text

    _listed = False

    def _after_object(self, final: bool) -> None:
        text = self._pending.lstrip()
        if not self._listed:
            self._step = self._text
        elif text.startswith("]"):
            self._pending = text[1:]
            self._step = self._text
        elif text.startswith(","):
            more = text[1:].lstrip()
            if more.startswith("{"):
                self._open(len(self._pending) - len(more))
            elif more or final:
                self._step = self._text
        elif text or final:
            self._step = self._text
