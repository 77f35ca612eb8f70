"""Whether a finite text may obey a JSON Schema: one that requires itself within itself has none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sidestream.text.json_reference import DATA, target

MAX_ROUNDS = 20


def has_end(root: Mapping[str, Any]) -> bool:
    """False only where it is plain."""
    endless = {place: found for place in _references(root) if (found := target(root, place)) is not None}  # until shown otherwise
    for _ in range(MAX_ROUNDS):
        before = len(endless)
        for place in [*endless, *reversed(endless)]:
            if place in endless and _ends(endless[place], endless):
                del endless[place]
        if len(endless) == before:
            return _ends(root, endless)
    return True


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for key, value in schema.items():
            if key not in DATA:
                yield from _references(value)
    elif isinstance(schema, list):
        for each in schema:
            yield from _references(each)


def _ends(schema: Any, endless: Mapping[str, Any]) -> bool:
    if not isinstance(schema, Mapping) or "const" in schema or "enum" in schema:
        return True
    if isinstance(schema.get("$ref"), str) and schema["$ref"] in endless:
        return False
    if not all(_ends(each, endless) for each in _list(schema.get("allOf"))):
        return False
    for name in ("anyOf", "oneOf"):
        choices = _list(schema.get(name))
        if choices and not any(_ends(each, endless) for each in choices):
            return False
    needed: Iterable[Any] = ()
    if schema.get("type") == "object":
        needed = _required(schema)
    elif schema.get("type") == "array":
        needed = _required_items(schema)
    return all(_ends(each, endless) for each in needed)


def _required(schema: Mapping[str, Any]) -> Iterator[Any]:
    properties = schema.get("properties")
    for name in _list(schema.get("required")):
        if isinstance(name, str) and isinstance(properties, Mapping):
            yield properties.get(name, schema.get("additionalProperties"))


def _required_items(schema: Mapping[str, Any]) -> Iterator[Any]:
    least, first = schema.get("minItems"), _list(schema.get("prefixItems"))
    if isinstance(least, int):
        yield from first[: max(least, 0)]
        if least > len(first):
            yield schema.get("items")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
