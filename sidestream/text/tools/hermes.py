"""Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence

from sidestream.text.lark import literal, quoted
from sidestream.text.tools.events import held_back
from sidestream.text.tools.grammar import Special, marked_calls, object_of
from sidestream.text.tools.parser import JsonCallParser
from sidestream.text.tools.tool import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(JsonCallParser):
    def _start(self, final: bool) -> None:
        self._step = self._text

    def _text(self, final: bool) -> None:
        at = self._pending.find(OPEN)
        if at >= 0:
            self._content(at)
            self._open(len(OPEN))
        else:
            self._content(len(self._pending) - (0 if final else held_back(self._pending, OPEN)))

    def _after_object(self, final: bool) -> None:
        text = self._pending.lstrip()
        if text.startswith(CLOSE) or not CLOSE.startswith(text):
            self._step = self._text
        elif not final:
            return
        self._pending = text.removeprefix(CLOSE) if not CLOSE.startswith(text) or text == CLOSE else ""

    def _broken(self, final: bool) -> None:
        """To the closing marker."""
        at = self._pending.find(CLOSE)
        if at >= 0:
            self._step = self._after_object
        else:
            at = len(self._pending) - (0 if final else held_back(self._pending, CLOSE))
        text, self._pending = self._pending[:at], self._pending[at:]
        self._arguments(text)


def hermes_rules(tools: Sequence[Tool], *, parallel: bool, free: bool, special: Special) -> list[str]:
    newline = quoted("\n")
    rest = f"{newline} object {newline} {literal(CLOSE, special)}"
    return [
        *marked_calls(OPEN, rest, parallel=parallel, free=free, special=special, between="\n"),
        object_of(tools, "arguments", free=free),
    ]
