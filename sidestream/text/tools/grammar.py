"""Grammars that make a model write calls: in llguidance's dialect of Lark, the schemas of the tools inlined as `%json`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sidestream.text.reasoning import ReasoningFormat
from sidestream.text.tools.tool import OPTIONS_KEY, Tool

# Space in JSON is bounded: a model could write it for ever.
OPTIONS = {OPTIONS_KEY: {"whitespace_pattern": "(?: |\\n[ \\t]{0,20})?"}}
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
FREE = "/(.|\\n)*/"

Marker = Callable[[str], int | None]  # the id of the token that is a marker; None for a marker that is written in characters


def literal(text: str) -> str:
    """A text in Lark; nothing for an empty one."""
    return json.dumps(text) if text else ""


def marked(text: str, marker: Marker) -> str:
    """A marker in Lark: its token where it is one, which no text may contain; else its characters."""
    token = marker(text)
    return literal(text) if token is None else f"<[{token}]>"


def schema_of(schema: Mapping[str, Any]) -> str:
    """A schema in Lark."""
    return f"%json {json.dumps({'type': 'object', **schema, **OPTIONS})}"


def parameters_of(tool: Tool, *, free: bool) -> str:
    """A tool's parameters in Lark; `free`: those of a tool that is not strict are any object."""
    return schema_of(ANY_OBJECT if free and not tool.strict else tool.schema)


def object_of(tools: Sequence[Tool], arguments: str, *, free: bool) -> str:
    """The rule `object`: a tool's name and its arguments, which are called `arguments`."""
    objects = [f"{literal(_head(tool, arguments))} {parameters_of(tool, free=free)} {literal('}')}" for tool in tools]
    return f"object: {' | '.join(objects)}"


def _head(tool: Tool, arguments: str) -> str:
    return f'{{"name": {json.dumps(tool.name)}, "{arguments}": '


def marked_calls(open: str, rest: str, *, parallel: bool, free: bool, marker: Marker, between: str = "") -> list[str]:
    """The rule `calls` for calls that begin with a marker, and how each goes on; `free`: among other text, or none."""
    if not free:
        more = f" ({literal(between)} call)*" if parallel else ""
        return [f"calls: call{more}", f"call: {marked(open, marker)} {rest}"]
    calls = f"(head {rest})* TEXT" if parallel else f"head {rest} | TEXT"
    return [f"calls: {calls}", *until("head", open, marker), f"TEXT: {FREE}"]


def leading_calls(calls: str, first: str, *, free: bool) -> list[str]:
    """The rule `calls` for an answer that is calls if it begins with the character `first`; `free`: or else any other text."""
    if not free:
        return [f"calls: {calls}"]
    return [f"calls: {calls} | OTHER?", f"OTHER: /[ \\t\\n]*([^{re.escape(first)} \\t\\n](.|\\n)*)?/"]


def reasoned(rules: Sequence[str], format: ReasoningFormat | None, marker: Marker) -> str:
    """The grammar whose answer is `calls`; with a format of reasoning, some may come before."""
    if format is None:
        return "\n".join(["start: calls", *rules])
    return "\n".join(
        [
            "start: reasoning? calls",
            f"reasoning: {marked(format.begin, marker)} reasoned NEWLINES?",
            *until("reasoned", format.end, marker),
            "NEWLINES: /\\n{1,2}/",
            *rules,
        ]
    )


def until(rule: str, text: str, marker: Marker) -> list[str]:
    """A rule for any text up to a marker."""
    if marker(text) is not None:
        return [f"{rule}: {FREE} {marked(text, marker)}"]
    return [f"{rule}[lazy]: {FREE} {literal(text)}"]
