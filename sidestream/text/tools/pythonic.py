"""Llama's calls as Python: `[f(a=1), g(b="x")]`. The text is parsed and never evaluated."""

from __future__ import annotations

import ast
import json
import keyword
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sidestream.errors import InvalidRequest
from sidestream.options import shown
from sidestream.text.lark import quoted, schema
from sidestream.text.tools.grammar import Special, leading_calls
from sidestream.text.tools.parser import CallParser
from sidestream.text.tools.tool import Tool

HEAD = re.compile(r"\s{0,8}([A-Za-z_][\w.-]{0,63})\s{0,8}\(", re.ASCII)
MAYBE_HEAD = re.compile(r"\s{0,8}(?:[A-Za-z_][\w.-]{0,63}\s{0,8})?", re.ASCII)  # what may still become one
PLAIN = re.compile(r"[^\"'\\()\[\]{}]*")
ESCAPES = re.compile(r"\\(.)", re.DOTALL)
PYTHONS_ESCAPES = "\\'\"abfnrtvxuU01234567\n"
WORDS = {"true": True, "false": False, "null": None}  # of JSON, which models mix in


class PythonicParser(CallParser):
    def _start(self, final: bool) -> None:
        """Only space has come."""
        text = self._pending.lstrip()
        if text.startswith("["):
            self._open(len(self._pending) - len(text) + 1)
        elif text or final:
            self._step = self._text

    def _open(self, at: int) -> None:
        """A call may begin at `at`; the text before it is content if there is none."""
        self._at = at
        self._step = self._head

    def _head(self, final: bool) -> None:
        head = HEAD.match(self._pending, self._at)
        if head is not None and head[1] in self._names:
            self._name, self._at, self._from = head[1], head.end(), head.end()
            self._closer = _Closer()
            self._step = self._inside
        elif head is not None or final or MAYBE_HEAD.fullmatch(self._pending, self._at) is None:
            self._step = self._text

    _name = ""
    _at = _from = 0

    def _inside(self, final: bool) -> None:
        self._at = self._closer.find(self._pending, self._at)
        if self._closer.found:
            arguments = read_arguments(self._pending[self._from : self._at - 1])
            if arguments is not None:
                self._begin(self._name)
                self._arguments(arguments)
                self._pending = self._pending[self._at :]
                self._step = self._between
                return
        elif not final:
            return
        self._step = self._text

    def _between(self, final: bool) -> None:
        """Behind a call."""
        text = self._pending.lstrip()
        if text.startswith(","):
            self._open(len(self._pending) - len(text) + 1)
        elif text or final:
            self._pending = text.removeprefix("]")
            self._step = self._text


class _Closer:
    """Finds the bracket that closes a call, behind the one that opens it."""

    def __init__(self) -> None:
        self.found = False
        self._depth = 1
        self._quote = ""
        self._escaped = False

    def find(self, text: str, at: int) -> int:
        """Go on from `at`; where it stopped: behind the bracket, or at the end of the text."""
        while at < len(text) and not self.found:
            if not self._escaped:
                plain = PLAIN.match(text, at)
                assert plain is not None
                at = plain.end()
            if at < len(text):
                self._met(text[at])
                at += 1
        return at

    def _met(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character in "\"'":
            if self._quote in ("", character):
                self._quote = "" if self._quote else character
        elif not self._quote and character not in "\"'":
            self._depth += 1 if character in "([{" else -1 if character in ")]}" else 0
            self.found = self._depth == 0


def read_arguments(text: str) -> str | None:
    """The JSON of `a=1, b="x"`; None if it is not that. All that it may hold has a JSON form."""
    try:
        call = ast.parse(f"f({ESCAPES.sub(_as_python, text)}\n)", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            return None
        given = {given_.arg: _value(given_.value) for given_ in call.keywords}
        if None in given or len(given) < len(call.keywords):
            return None
        written = json.dumps(given, ensure_ascii=False, allow_nan=False)
        return written if written.isascii() or _is_unicode(written) else json.dumps(given)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _as_python(escape: re.Match[str]) -> str:
    """JSON may escape a slash; before any other character Python keeps the backslash, and warns."""
    if escape[1] == "/":
        return "/"
    return escape[0] if escape[1] in PYTHONS_ESCAPES else f"\\{escape[0]}"


def _value(node: ast.expr) -> Any:
    """Raises ValueError for what is not a literal that JSON has."""
    match node:
        case ast.Constant(value=None | bool() | int() | str()):
            return node.value
        case ast.Constant(value=float() as number) if math.isfinite(number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)) if not isinstance(number, bool):
            return -number
        case ast.Name(id=word) if word in WORDS:
            return WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [key.value if isinstance(key, ast.Constant) else None for key in keys]
            if all(isinstance(name, str) for name in names):
                return dict(zip(names, map(_value, values), strict=True))
    raise ValueError("it is not a literal")


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


# The grammar. What a call's schema may say about all arguments together has no place in Python's notation.
TOGETHER = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id", "title", "description"}


def pythonic_rules(tools: Sequence[Tool], *, parallel: bool, free: bool, special: Special) -> list[str]:
    """Values are written as JSON, which the parser knows too. Raises InvalidRequest for a schema that cannot be enforced so."""
    calls = " | ".join(f"call_{place}" for place in range(len(tools)))
    more = f" ({quoted(', ')} call)*" if parallel else ""
    rules = [*leading_calls(f"{quoted('[')} call{more} {quoted(']')}", "[", free=free), f"call: {calls}"]
    for place, tool in enumerate(tools):
        rules += _rules_of(tool, f"call_{place}", free=free and not tool.strict)
    return rules


def _rules_of(tool: Tool, rule: str, *, free: bool) -> Iterator[str]:
    """One rule for the call, one for each argument, and for each place in their order two: with a comma before it, and without."""
    parameters = tool.schema
    if free:
        yield f"{rule}: {quoted(tool.name + '(')} ({rule}_any ({quoted(', ')} {rule}_any)*)? {quoted(')')}"
        yield f"{rule}_any: /[a-zA-Z_][a-zA-Z0-9_]*=/ {schema({})}"
        return
    _check(tool)
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    shared = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
    yield f"{rule}: {quoted(tool.name + '(')} {rule}_0 {quoted(')')}"
    for place, (name, value) in enumerate(properties.items()):
        one, after, other = f"{rule}_{place}_value", f"{rule}_{place + 1}_more", f"{rule}_{place + 1}"
        more = f"{quoted(', ')} {one}"
        whole = {**value, **shared} if isinstance(value, Mapping) else {}
        yield f"{one}: {quoted(name + '=')} {schema(whole, f'{tool.where}.properties.{name}')}"
        yield f"{rule}_{place}: {one} {after}{'' if name in required else f' | {other}'}"
        yield f"{rule}_{place}_more: {more if name in required else f'({more})?'} {after}"
    yield f'{rule}_{len(properties)}: ""'
    yield f'{rule}_{len(properties)}_more: ""'


def _check(tool: Tool) -> None:
    where, parameters = tool.where, tool.schema
    hint = "This model writes calls as Python's."
    for key in parameters:
        if key not in TOGETHER:
            raise InvalidRequest(f"{where}.{key}", f"got {shown(parameters[key])}, which cannot be enforced for arguments", hint=hint)
    for name in (*parameters.get("properties", {}), *parameters.get("required", [])):
        if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
            raise InvalidRequest(f"{where}.properties", f"got the name {name!r}, must be a name of Python's", hint=hint)
        if name not in parameters.get("properties", {}):
            raise InvalidRequest(f"{where}.required", f"got {name!r}, must be one of the properties", hint=hint)
    open_: list[Any] = [parameters]
    while open_:
        each = open_.pop()
        open_ += each.values() if isinstance(each, Mapping) else each if isinstance(each, list) else ()
        reference = each.get("$ref", "#/$defs/") if isinstance(each, Mapping) else "#/$defs/"
        if isinstance(reference, str) and not reference.startswith(("#/$defs/", "#/definitions/")):
            raise InvalidRequest(where, f"got the $ref {shown(reference)}, must be one into $defs", hint=hint)
