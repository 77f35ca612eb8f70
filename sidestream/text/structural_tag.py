"""Structural tags: free text with parts of a fixed form in it, as SGLang, vLLM and XGrammar write them, in Lark.

Either `{"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}`, or `{"type": "structural_tag",
"format": FORMAT}`, where a format is one of those below.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from sidestream.errors import InvalidRequest
from sidestream.text.lark import ANY_TEXT, check_schema, lark_regex, literal, schema

FIELD = "structural_tag"
MAX_DEPTH = 16  # of formats in formats


def lark_of(tag: Any, special: Mapping[str, int]) -> str:
    """The grammar. Raises InvalidRequest, naming what is wrong."""
    if not isinstance(tag, dict) or tag.get("type", FIELD) != FIELD:
        raise _wrong('must be an object with "type": "structural_tag"')
    if ("format" in tag) == ("structures" in tag):
        raise _wrong("must have either format, or structures and triggers")
    rules = _Rules(special)
    start = rules.of(tag["format"], "format", 0) if "format" in tag else rules.triggered(_as_format(tag), "", 0)
    return "\n".join([f"start: {start}", *rules.lines])


def _as_format(tag: Mapping[str, Any]) -> dict[str, Any]:
    """The older form as the format that it means."""
    tags = []
    for place, each in enumerate(_list(tag, "structures", "")):
        where = f"structures[{place}]"
        content = _member(each, "schema", where, (dict, bool))
        tags.append({**each, "content": {"type": "json_schema", "json_schema": content}, "where": where})
    return {"type": "triggered_tags", "triggers": _list(tag, "triggers", ""), "tags": tags}


class _Rules:
    """The rules of a grammar while it is written."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self.special = special
        self.lines: list[str] = []

    def rule(self, body: str, attributes: str = "") -> str:
        """A rule of its own; its name."""
        name = f"r{len(self.lines)}"
        self.lines.append("")
        self.lines[int(name[1:])] = f"{name}{attributes}: {body}"
        return name

    def of(self, format: Any, where: str, depth: int) -> str:
        """What a format is in the body of a rule."""
        if depth > MAX_DEPTH:
            raise _wrong(f"must not be nested more than {MAX_DEPTH} deep")
        kind = _member(format, "type", where, str)
        kinds: dict[str, Callable[[Any, str, int], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "any_text": lambda *_: ANY_TEXT,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self.triggered,
        }
        if kind not in kinds:
            raise _wrong(f"got {where}.type {kind!r}, must be one of {', '.join(kinds)}")
        return kinds[kind](format, where, depth + 1)

    def _const_string(self, format: Any, where: str, _: int) -> str:
        return literal(_member(format, "value", where, str), self.special)

    def _json_schema(self, format: Any, where: str, _: int) -> str:
        value = _member(format, "json_schema", where, (dict, bool))
        if value is False:
            raise _wrong(f"got {where}.json_schema false, which admits nothing")
        value = {} if value is True else value
        check_schema(FIELD, value)
        return schema(value, FIELD)

    def _regex(self, format: Any, where: str, _: int) -> str:
        pattern: str = _member(format, "pattern", where, str)
        return lark_regex(pattern)

    def _sequence(self, format: Any, where: str, depth: int) -> str:
        parts = enumerate(_list(format, "elements", where))
        return " ".join(self.rule(self.of(each, f"{where}.elements[{place}]", depth)) for place, each in parts)

    def _or(self, format: Any, where: str, depth: int) -> str:
        parts = enumerate(_list(format, "elements", where))
        return "(" + " | ".join(self.rule(self.of(each, f"{where}.elements[{place}]", depth)) for place, each in parts) + ")"

    def _tag(self, format: Any, where: str, depth: int) -> str:
        begin = _member(format, "begin", where, str)
        return self._with_end(literal(begin, self.special), format, where, depth)

    def _with_end(self, begin: str, format: Any, where: str, depth: int) -> str:
        """What begins so, then the content, then one of the ends. Free text ends with the first of them."""
        ends = format.get("end", "")
        texts = ends if isinstance(ends, list) else [ends]
        if not texts or not all(isinstance(each, str) for each in texts):
            raise _wrong(f"got {where}.end {json.dumps(ends)[:80]}, must be a text, or a list of texts")
        content = _member(format, "content", where, dict)
        if content.get("type") == "any_text" and all(texts):
            if any(each in self.special for each in texts):
                return f"{begin} {ANY_TEXT} ({' | '.join(literal(each, self.special) for each in texts)})"
            return f"{begin} ({' | '.join(self.rule(ANY_TEXT, f'[suffix={literal(each, {})}]') for each in texts)})"
        end = "(" + " | ".join(literal(each, self.special) for each in texts) + ")" if any(texts) else ""
        return f"{begin} {self.rule(self.of(content, f'{where}.content', depth))} {end}"

    def triggered(self, format: Any, where: str, depth: int) -> str:
        """Free text; what begins with a trigger must go on as a tag."""
        triggers, within = _list(format, "triggers", where), f"{where}." if where else ""
        for trigger in triggers:
            if not isinstance(trigger, str) or not trigger:
                raise _wrong(f"got {within}triggers with {json.dumps(trigger)[:80]}, must be texts that are not empty")
        tags = []
        for place, tag in enumerate(_list(format, "tags", where)):
            here = tag.get("where", f"{within}tags[{place}]") if isinstance(tag, dict) else f"{within}tags[{place}]"
            begin = _member(tag, "begin", here, str)
            trigger = next((each for each in triggers if begin.startswith(each)), None)
            if trigger is None:
                raise _wrong(f"got {here}.begin {begin!r}, must start with one of the triggers")
            rest = literal(begin.removeprefix(trigger), self.special)
            tags.append(self.rule(self._with_end(f"{self._until(trigger)} {rest}", tag, here, depth)))
        one = "(" + " | ".join(tags) + ")"
        if format.get("stop_after_first"):
            return one if format.get("at_least_one") else f"({one} | {ANY_TEXT})"
        return f"{one}{'+' if format.get('at_least_one') else '*'} {self.rule(ANY_TEXT)}"

    def _until(self, trigger: str) -> str:
        """Free text up to the first trigger, and it."""
        if trigger in self.special:
            return f"{ANY_TEXT} {literal(trigger, self.special)}"
        return self.rule(f"{ANY_TEXT} {literal(trigger, {})}", "[lazy]")


def _member(value: Any, name: str, where: str, kind: Any) -> Any:
    got = value.get(name) if isinstance(value, dict) else None
    if not isinstance(got, kind):
        words = {str: "a text", dict: "an object", list: "a list"}.get(kind, "a JSON Schema")
        raise _wrong(f"got {where or FIELD} without {name}, which must be {words}")
    return got


def _list(value: Any, name: str, where: str) -> list[Any]:
    got = _member(value, name, where, list)
    if not got:
        raise _wrong(f"got an empty list of {name}, must have at least one")
    return got  # type: ignore[no-any-return]


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(FIELD, message)
