"""Grammars that make a model write calls: in llguidance's dialect of Lark, the schemas of the tools in place."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from sidestream.text.lark import ANY_TEXT, literal, quoted, schema
from sidestream.text.tools.tool import Tool

Special = Mapping[str, int]  # ids of special tokens, by their texts


def parameters_of(tool: Tool, *, free: bool) -> str:
    """A tool's parameters in Lark; `free`: those of a tool that is not strict are any object. Raises InvalidRequest."""
    return schema({"type": "object", **({} if free and not tool.strict else tool.schema)}, tool.where)


def object_of(tools: Sequence[Tool], arguments: str, *, free: bool) -> str:
    """The rule `object`: a tool's name and its arguments, which are called `arguments`."""
    objects = [f"{quoted(_head(tool, arguments))} {parameters_of(tool, free=free)} {quoted('}')}" for tool in tools]
    return f"object: {' | '.join(objects)}"


def _head(tool: Tool, arguments: str) -> str:
    return f'{{"name": {json.dumps(tool.name)}, "{arguments}": '


def marked_calls(open: str, rest: str, *, parallel: bool, free: bool, special: Special, between: str = "") -> list[str]:
    """The rule `start` for calls that begin with a marker, and how each goes on; `free`: among other text, or none."""
    if not free:
        more = f" ({quoted(between)} call)*" if parallel else ""
        return [f"start: call{more}", f"call: {literal(open, special)} {rest}"]
    calls = f"(head {rest})* TEXT" if parallel else f"head {rest} | TEXT"
    head = f"head: {ANY_TEXT} {literal(open, special)}" if open in special else f"head[lazy]: {ANY_TEXT} {quoted(open)}"
    return [f"start: {calls}", head, f"TEXT: {ANY_TEXT}"]


def leading_calls(calls: str, first: str, *, free: bool) -> list[str]:
    """The rule `start` for an answer that is calls if it begins with the character `first`; `free`: or else any other text."""
    if not free:
        return [f"start: {calls}"]
    return [f"start: {calls} | OTHER?", f"OTHER: /[ \\t\\n]*([^{re.escape(first)} \\t\\n](.|\\n)*)?/"]
