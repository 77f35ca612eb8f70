"""A tool that a model may call, as all routes know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sidestream.errors import InvalidRequest
from sidestream.options import shown
from sidestream.text.lark import check_schema

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

    @property
    def schema(self) -> Mapping[str, Any]:
        return NO_PARAMETERS if self.parameters is None else self.parameters

    def for_template(self) -> dict[str, Any]:
        """As chat templates know tools: in OpenAI's form."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": dict(self.schema)}}
