"""Whether the alternatives of a `oneOf` exclude one another, so that it is an `anyOf`. Where that is not plain, the answer is no."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from sidestream.text.json_reference import parts

MAX_COMPARISONS = 20_000  # of two alternatives, or of two schemas of a property of theirs: some tens of milliseconds
MAX_DEPTH = 3  # of properties in properties


class Alternatives:
    """Compares alternatives within one schema."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = MAX_COMPARISONS

    def exclude_each_other(self, alternatives: Sequence[Any]) -> bool:
        """Whether no value obeys two of them."""
        if len(alternatives) ** 2 > self._left:
            return False
        seen = [_Seen(self._root, each) for each in alternatives]
        return all(self._exclude(one, other, 0) for one, other in combinations(seen, 2))

    def _exclude(self, one: _Seen, other: _Seen, depth: int) -> bool:
        self._left -= 1
        if self._left < 0:
            return False
        if one.is_false or other.is_false or one.has_other_type(other) or one.has_other_values(other):
            return True
        if one.types != {"object"} or other.types != {"object"} or depth >= MAX_DEPTH:
            return False
        if any(other.has_no(name) for name in one.required) or any(one.has_no(name) for name in other.required):
            return True
        return any(
            self._exclude(_Seen(self._root, mine), _Seen(self._root, theirs), depth + 1)
            for name in one.required & other.required
            for mine in one.property(name)
            for theirs in other.property(name)
        )


class _Seen:
    """What is plain about one schema."""

    def __init__(self, root: Mapping[str, Any], schema: Any) -> None:
        self.is_false = schema is False
        self.parts = list(parts(root, schema))
        self.values = next((values for part in self.parts if (values := _values(part)) is not None), None)
        self.types: set[str] | None = None
        for part in self.parts:
            if (types := _types(part)) is not None:
                self.types = types if self.types is None else self.types & types
        self.required = {name for part in self.parts for name in _list(part.get("required")) if isinstance(name, str)}

    def has_other_type(self, other: _Seen) -> bool:
        return self.types is not None and other.types is not None and not self.types & other.types

    def has_other_values(self, other: _Seen) -> bool:
        return self.values is not None and other.values is not None and not self.values & other.values

    def property(self, name: str) -> list[Any]:
        """The schemas that the property must obey."""
        named = (part["properties"] for part in self.parts if isinstance(part.get("properties"), Mapping))
        return [properties[name] for properties in named if name in properties]

    def has_no(self, name: str) -> bool:
        """Whether no object may have the property."""
        closed = (part for part in self.parts if part.get("additionalProperties") is False and not part.get("patternProperties"))
        return any(name not in (part.get("properties") or {}) for part in closed)


def _values(schema: Mapping[str, Any]) -> set[str] | None:
    """Those that it lists, in one way of writing them."""
    if "const" in schema:
        return {_written(schema["const"])}
    return {_written(value) for value in schema["enum"]} if isinstance(schema.get("enum"), list) else None


def _types(schema: Mapping[str, Any]) -> set[str] | None:
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return {"number" if name == "integer" else name for name in names}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return {_type(value) for value in values} if isinstance(values, list) else None


def _type(value: Any) -> str:
    kinds = {bool: "boolean", type(None): "null", str: "string", int: "number", float: "number", list: "array"}
    return kinds.get(type(value), "object")


def _written(value: Any) -> str:
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    """1.0 is 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return {name: _whole(each) for name, each in value.items()} if isinstance(value, Mapping) else value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
