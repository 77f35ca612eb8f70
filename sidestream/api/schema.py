"""What the schema of a body says about one of its fields: for messages that tell what the field may be, and why not more."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import msgspec


class Expected(NamedTuple):
    values: tuple[str, ...]  # that the field may have, as JSON writes them; empty where it is not a choice
    reason: str | None  # why it may have no other than one


def expected_at(kind: type[msgspec.Struct], path: str) -> Expected:
    """Of the field at a path such as `input.0.type`; a path that the schema does not have expects nothing.

    A field that is pinned to one value (null, an empty list, a single word) says in its description why that is so.
    """
    level, found = _at(kind, path)
    others = [one for one in found if one.get("type") != "null"] or found
    choices = [_values(one, _schema(kind)[1]) for one in others]
    values = tuple(value for each in choices for value in each) if all(choices) else ()
    reason = next((one["description"] for one in (*others, *level) if "description" in one), None)
    return Expected(values, reason if len(values) == 1 else None)


def fields_at(kind: type[msgspec.Struct], path: str) -> tuple[str, ...]:
    """The fields of the object at a path, of the body itself at an empty one; none for what is no object."""
    return tuple(name for one in _at(kind, path)[1] for name in one.get("properties", ()))


def _at(kind: type[msgspec.Struct], path: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The schemas at a path as they are written, and the alternatives that they stand for."""
    schema, defs = _schema(kind)
    level = [schema]
    for key in path.split(".") if path else ():
        level = [child for each in level for one in _alternatives(each, defs) for child in _children(one, key)]
    return level, [one for each in level for one in _alternatives(each, defs)]


def _values(schema: dict[str, Any], defs: dict[str, Any]) -> tuple[str, ...]:
    """Empty for a type with more than a few values."""
    if "enum" in schema:
        return tuple(msgspec.json.encode(value).decode() for value in schema["enum"])
    if schema.get("maxItems") == 0:
        return ("[]",)
    if schema.get("type") == "array" and all(_values(each, defs) for each in _alternatives(schema.get("items", {}), defs)):
        return ("a list of such",)
    return {"boolean": ("true", "false"), "null": ("null",)}.get(schema.get("type", ""), ())


@cache
def _schema(kind: type[msgspec.Struct]) -> tuple[dict[str, Any], dict[str, Any]]:
    (schema,), defs = msgspec.json.schema_components([kind], ref_template="{name}")
    return schema, defs


def _alternatives(schema: dict[str, Any], defs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "$ref" in schema:
        yield from _alternatives(defs[schema["$ref"]], defs)
    elif "anyOf" in schema:
        for each in schema["anyOf"]:
            yield from _alternatives(each, defs)
    else:
        yield schema


def _children(schema: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    if key in schema.get("properties", ()):
        yield schema["properties"][key]
    elif isinstance(more := schema.get("additionalProperties"), dict):
        yield more
    elif key.isdecimal() and isinstance(item := schema.get("items"), dict):
        yield item
