"""A tool that a model may call, as all routes know it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sidestream.errors import InvalidRequest
from sidestream.options import shown
from sidestream.text.lark import check_schema

TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
SINGLE = ("additionalProperties", "items", "contains", "not", "if", "then", "else", "propertyNames")  # keywords with a schema
LISTS = ("properties", "patternProperties", "$defs", "definitions", "anyOf", "oneOf", "allOf", "prefixItems")  # with several
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tool:
    """`parameters` is a JSON Schema of an object. `where` is the field that has it, for what errors say. Raises InvalidRequest."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    where: str = "parameters"

    def __post_init__(self) -> None:
        schema = self.schema
        if schema.get("type", "object") != "object":
            raise InvalidRequest(f"{self.where}.type", f"got {shown(schema['type'])}, must be 'object': arguments have names")
        if not isinstance(schema.get("properties", {}), Mapping):
            raise InvalidRequest(f"{self.where}.properties", f"got {shown(schema['properties'])}, must be an object of schemas")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise InvalidRequest(f"{self.where}.required", f"got {shown(required)}, must be a list of names")
        check_schema(self.where, schema)
        for path, each in _schemas_in(schema):
            if not isinstance(each, bool) and (not isinstance(each, Mapping) or not _has_good_type(each)):
                raise InvalidRequest(f"{self.where}{path}", f"got {shown(each)}, must be a JSON Schema")

    @property
    def schema(self) -> Mapping[str, Any]:
        return NO_PARAMETERS if self.parameters is None else self.parameters

    def for_template(self) -> dict[str, Any]:
        """As chat templates know tools: in OpenAI's form."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": dict(self.schema)}}


def _has_good_type(schema: Mapping[str, Any]) -> bool:
    types = schema.get("type", "object")
    return all(isinstance(each, str) and each in TYPES for each in (types if isinstance(types, list) else [types]))


def _schemas_in(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """All schemas within a schema, each with where it is, such as `.properties.x.items`."""
    open_: list[tuple[str, Any]] = [("", schema)]
    while open_:
        path, each = open_.pop()
        if path:
            yield path, each
        if isinstance(each, Mapping):
            found = [(f".{name}", each[name]) for name in SINGLE if name in each]
            found += [(f".{name}.{place}", one) for name in LISTS if name in each for place, one in _members(each[name])]
            open_ += [(path + more, one) for more, one in found]


def _members(value: Any) -> list[tuple[Any, Any]]:
    """Of a list or an object of schemas; of what is neither, itself."""
    return list(value.items()) if isinstance(value, Mapping) else list(enumerate(value)) if isinstance(value, list) else [("", value)]
