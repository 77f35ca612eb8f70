"""JSON Schemas as the compiler enforces them exactly.

llguidance refuses most of what it cannot enforce, by name. What it would take too loosely is written in other words here, or refused;
keywords that have no effect where they stand are left out, so that nobody is refused for them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sidestream.errors import InvalidRequest
from sidestream.options import shown
from sidestream.text.json_alternatives import Alternatives
from sidestream.text.json_end import has_end
from sidestream.text.json_formats import BOUNDS, PATTERNS, WITHOUT_EFFECT
from sidestream.text.json_reference import DATA, parts

MAX_DEPTH = 100  # of the JSON: the compiler's parser takes 128
LARGEST = 2**63  # either sign: the compiler counts in 64 bits
MAX_COUNT = 2**31 - 1  # of characters, items and properties

MAX_PARTS_WITH_BOUNDS = 20_000  # compared: some tenths of a second

NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # hold schemas by name
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
BOUND_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
HALF_PAIR = re.compile(r"[\ud800-\udfff]")
UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # only \uXXXX could write these characters


def enforceable(field: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same schema in words that are enforced exactly. Raises InvalidRequest, which names the keyword that cannot be."""
    try:
        _check_values(schema)
        made: dict[str, Any] = _Walk(schema).node(schema)
        if not has_end(made):
            raise _Unenforceable("got a $ref to a schema that requires itself within itself, which no text of finite length obeys")
    except _Unenforceable as error:
        raise InvalidRequest(field, str(error)) from None
    return made


class _Unenforceable(ValueError):
    """Its message names the keyword."""


def _check_values(schema: Any) -> None:
    """All of it, schema or not: the compiler is written in another language, whose JSON has other limits."""
    level, depth = [schema], 0
    while level:
        if depth > MAX_DEPTH:
            raise _Unenforceable(f"got a schema that is nested too deeply, must be at most {MAX_DEPTH} deep")
        for value in level:
            _check_value(value)
        depth += 1
        level = [each for value in level for each in _within(value)]


def _check_value(value: Any) -> None:
    if isinstance(value, (int, float)) and not -LARGEST <= value <= 2 * LARGEST:
        raise _Unenforceable(f"got the number {shown(value)}, must be between -2**63 and 2**64")
    for text in [value] if isinstance(value, str) else value if isinstance(value, Mapping) else ():
        if HALF_PAIR.search(text):
            raise _Unenforceable(f"got {shown(text)}, which has one half of a surrogate pair in it, must be Unicode")


def _within(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else ()


class _Walk:
    """Rewrites every schema within one, the inner ones first."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self.alternatives = Alternatives(root)
        self.left = MAX_PARTS_WITH_BOUNDS

    def node(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self.node(each) for each in schema]
        if not isinstance(schema, Mapping):
            return schema
        made = {}
        for key, value in schema.items():
            if key in DATA:
                made[key] = value
            elif key in NAMED and isinstance(value, Mapping):
                made[key] = {name: self.node(each) for name, each in value.items()}
            else:
                made[key] = self.node(value)
        self.rewrite(made)
        return made

    def rewrite(self, schema: dict[str, Any]) -> None:
        _leave_out(schema)
        _rewrite_counts(schema)
        _check_texts(schema)
        _check_number_of_properties(schema)
        _check_bounds(schema)
        self.check_interval(schema)
        _rewrite_format(schema)
        choices = schema.get("oneOf")
        if isinstance(choices, list) and "anyOf" not in schema and self.alternatives.exclude_each_other(choices):
            schema["anyOf"] = schema.pop("oneOf")

    def check_interval(self, schema: Mapping[str, Any]) -> None:
        """Of the numbers above 0 and up to 0.5 the compiler would admit 0, too: the excluded number is the whole part of the other."""
        if not _bounds(schema) or schema.get("type") == "integer":
            return
        together = list(parts(self.root, schema, alternatives=True))
        self.left -= len(together)
        if self.left < 0:
            raise _Unenforceable(f"got {_bounds(schema)[0][0]} in more places than can be compared, must be in fewer")
        bounds = [bound for part in together for bound in _bounds(part)]
        for name, value in bounds:
            if not name.startswith("exclusive") or value != math.trunc(value):
                continue
            for other, limit in bounds:
                if other[-7:] != name[-7:] and math.trunc(limit) == value != limit:
                    raise _Unenforceable(f"got {name} {value} beside {other} {limit}, which cannot be enforced together")


def _leave_out(schema: dict[str, Any]) -> None:
    """Keywords that admit everything."""
    if "if" not in schema or not ("then" in schema or "else" in schema):
        for name in ("if", "then", "else"):
            schema.pop(name, None)
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)
    for name in ("uniqueItems", "not"):
        if schema.get(name) is False:
            del schema[name]
    for name in ("unevaluatedProperties", "unevaluatedItems", "propertyNames"):
        if schema.get(name) is True or schema.get(name) == {}:
            del schema[name]
    for name in ("dependentRequired", "dependentSchemas"):
        value = schema.get(name)
        if isinstance(value, Mapping) and all(each in ([], {}, True) for each in value.values()):
            del schema[name]


def _rewrite_counts(schema: dict[str, Any]) -> None:
    for name in COUNTS:
        value = schema.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        if value > MAX_COUNT and name.startswith("min"):
            raise _Unenforceable(f"got {name} {value}, must be at most {MAX_COUNT}")
        if value > MAX_COUNT:  # no text is so long
            del schema[name]
        elif isinstance(value, float) and value.is_integer():
            schema[name] = int(value)


def _check_texts(schema: Mapping[str, Any]) -> None:
    for name in ("const", "enum"):
        for text in _texts(schema.get(name)):
            if UNWRITABLE.search(text):
                got = f"got {name} with {text[:80]!r}"
                raise _Unenforceable(f"{got}, must be without control characters other than \\b, \\t, \\n, \\f and \\r")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
    for each in _within(value):
        yield from _texts(each)


def _check_number_of_properties(schema: Mapping[str, Any]) -> None:
    """A name that is not listed may be written twice, and counts once."""
    least, required = schema.get("minProperties"), schema.get("required", [])
    listed_only = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if listed_only or not isinstance(least, int) or not isinstance(required, list):
        return
    most = len({name for name in required if isinstance(name, str)}) + 1
    if least > most:
        limit = f"must be at most {most} (1 more than the names in required), or additionalProperties must be false"
        raise _Unenforceable(f"got minProperties {least}, {limit}")


def _check_bounds(schema: Mapping[str, Any]) -> None:
    for name, value in _bounds(schema):
        if abs(value) > LARGEST:
            raise _Unenforceable(f"got {name} {value}, must be between -2**63 and 2**63")
        if isinstance(value, int) and int(float(value)) != value and (name, value) != ("maximum", LARGEST - 1):
            raise _Unenforceable(f"got {name} {value}, must be a number that 64-bit floating point holds exactly")


def _bounds(schema: Mapping[str, Any]) -> list[tuple[str, float]]:
    values = ((name, schema.get(name)) for name in BOUND_KEYWORDS)
    return [(name, value) for name, value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]


def _rewrite_format(schema: dict[str, Any]) -> None:
    name, also = schema.get("format"), schema.get("allOf", [])
    if not isinstance(name, str) or not isinstance(also, list):
        return
    if name in WITHOUT_EFFECT:
        del schema["format"]
    elif name in PATTERNS:
        del schema["format"]
        schema["allOf"] = [*also, {"pattern": PATTERNS[name]}]
    elif name in BOUNDS:
        del schema["format"]
        schema["allOf"] = [*also, dict(zip(("minimum", "maximum"), BOUNDS[name], strict=True))]
