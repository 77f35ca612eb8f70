"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]`, or in newer models `[TOOL_CALLS]f[ARGS]{"a": 1}` for each call."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sidestream.text.lark import literal, quoted
from sidestream.text.tools.events import held_back
from sidestream.text.tools.grammar import Special, marked_calls, object_of, parameters_of
from sidestream.text.tools.json_object import ArgumentsReader
from sidestream.text.tools.parser import JsonCallParser
from sidestream.text.tools.tool import Tool

MARK, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
# What may still become a call is bounded, so that it is not held for long.
NAMED = re.compile(r"\s{0,8}([\w.-]{1,64})(?:\[CALL_ID\]\w{0,64})?(?:\[ARGS\])?\s{0,8}(?=\{)", re.ASCII)
MAYBE_NAMED = re.compile(r"\s{0,8}[\w.-]{0,64}(?:\[[A-Z_]{0,7}(?:\]\w{0,64})?){0,2}\s{0,8}", re.ASCII)


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


def listed_rules(tools: Sequence[Tool], *, parallel: bool, free: bool, special: Special) -> list[str]:
    """All calls in one list."""
    more = f" ({quoted(', ')} object)*" if parallel else ""
    rest = f"{quoted('[')} object{more} {quoted(']')}"
    return [
        *marked_calls(MARK, rest, parallel=False, free=free, special=special),
        object_of(tools, "arguments", free=free),
    ]


def named_rules(tools: Sequence[Tool], *, parallel: bool, free: bool, special: Special) -> list[str]:
    """Each call with its name before its arguments."""
    args = literal(ARGS, special)
    named = [f"{quoted(tool.name)} {args} {parameters_of(tool, free=free)}" for tool in tools]
    return [*marked_calls(MARK, "named", parallel=parallel, free=free, special=special), f"named: {' | '.join(named)}"]


def identified_rules(tools: Sequence[Tool], *, parallel: bool, free: bool, special: Special) -> list[str]:
    """The same with an id between them."""
    head = f"{literal(CALL_ID, special)} /[a-zA-Z0-9]{{9}}/ {literal(ARGS, special)}"
    named = [f"{quoted(tool.name)} {head} {parameters_of(tool, free=free)}" for tool in tools]
    return [*marked_calls(MARK, "named", parallel=parallel, free=free, special=special), f"named: {' | '.join(named)}"]
