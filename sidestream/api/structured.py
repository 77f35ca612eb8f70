"""Structured output as other servers' clients ask for it: OpenAI's `response_format`, vLLM's `structured_outputs`, and our own fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from sidestream.errors import InvalidRequest
from sidestream.options import shown
from sidestream.params import GRAMMARS

JSON_OBJECT: dict[str, Any] = {"type": "object"}

NO_OTHER_WHITESPACE = Meta(description="Whitespace is at most one space, or a new line and its indentation.")
CHECKED = Meta(description="Accepted: the schema is always enforced.")


class NamedSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str | None = None
    description: str | None = None
    schema: Annotated[dict[str, Any] | bool, Meta(description="A JSON Schema.")] | None = None
    strict: Annotated[bool, CHECKED] | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    structures: Annotated[list[Any], Meta(description="Of a structural tag.")] | None = None
    triggers: Annotated[list[str], Meta(description="Of a structural tag.")] | None = None
    format: Annotated[dict[str, Any], Meta(description="Of a structural tag, instead of structures and triggers.")] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's; one of them."""

    json: Annotated[str | dict[str, Any], Meta(description="The same as json_schema.")] | None = None
    json_object: Annotated[bool, Meta(description="A JSON object.")] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: Annotated[str, Meta(description="The same as ebnf.")] | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: Annotated[bool, NO_OTHER_WHITESPACE] | None = None
    disable_additional_properties: Annotated[None, Meta(description="Write additionalProperties into the schema.")] = None
    whitespace_pattern: Annotated[None, NO_OTHER_WHITESPACE] = None


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """That of the Responses API."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: Annotated[dict[str, Any], Meta(description="A JSON Schema.")] | None = None
    strict: Annotated[bool, CHECKED] | None = None


class MessageFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """That of the Messages API."""

    type: Literal["json_schema"]
    schema: Annotated[dict[str, Any], Meta(description="A JSON Schema.")]


def format_fields(format: TextFormat | MessageFormat | None, where: str) -> tuple[dict[str, Any], dict[str, str]]:
    """As `grammar_fields`, of a format at the field `where`."""
    if format is None or format.type == "text":
        return {}, {}
    if format.type == "json_object":
        return {"json_schema": JSON_OBJECT}, {"json_schema": where}
    if format.schema is None:
        raise InvalidRequest(f"{where}.schema", "got none, must be a JSON Schema")
    return {"json_schema": format.schema}, {"json_schema": f"{where}.schema"}


def check_alone(body: msgspec.Struct, names: Mapping[str, str]) -> None:
    """One grammar beside another of our own fields, whose names the client knows as they are. Raises InvalidRequest."""
    for asked, name in names.items():
        for field in GRAMMARS:
            if asked in GRAMMARS and field != asked and getattr(body, field, None) is not None:
                raise InvalidRequest(field, f"got one beside {name}, must be at most one of the two")


def grammar_fields(body: msgspec.Struct) -> tuple[dict[str, Any], dict[str, str]]:
    """What a body with these fields asks for, as fields of SamplingParams, and what it calls them. Raises InvalidRequest.

    The same grammar under two names is one; two different ones are refused.
    """
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    format: ResponseFormat | None = getattr(body, "response_format", None)
    structured: StructuredOutputs | None = getattr(body, "structured_outputs", None)
    asked = [*(_of_format(format) if format is not None else ()), *(_of_structured(structured) if structured is not None else ())]
    for field, name, value in asked:
        given = values.get(field, getattr(body, field, None))
        if given not in (None, [], value):
            raise InvalidRequest(name, f"got {shown(value)} beside {names.get(field, field)}={shown(given)}, must be the same")
        values[field], names[field] = value, name
    check_alone(body, names)
    return values, names


def _of_format(format: ResponseFormat) -> list[tuple[str, str, Any]]:
    if format.type != "json_schema" and format.json_schema is not None:
        raise InvalidRequest("response_format.json_schema", f'got one beside type "{format.type}", must be left out')
    tag = {name: value for name in ("structures", "triggers", "format") if (value := getattr(format, name)) is not None}
    if format.type != "structural_tag" and tag:
        name = next(iter(tag))
        raise InvalidRequest(f"response_format.{name}", f'got one beside type "{format.type}", must be left out')
    if format.type == "json_object":
        return [("json_schema", "response_format", JSON_OBJECT)]
    if format.type == "structural_tag":
        return [("structural_tag", "response_format", {"type": "structural_tag", **tag})]
    if format.type == "json_schema":
        schema = None if format.json_schema is None else format.json_schema.schema
        if schema is None or schema is False:
            got = "got false, which admits nothing" if schema is False else "got none"
            raise InvalidRequest("response_format.json_schema.schema", f"{got}, must be a JSON Schema")
        return [("json_schema", "response_format.json_schema.schema", {} if schema is True else schema)]
    return []


def _of_structured(asked: StructuredOutputs) -> list[tuple[str, str, Any]]:
    fields: Mapping[str, str] = {"json": "json_schema", "grammar": "ebnf"}
    given = [
        (fields.get(name, name), f"structured_outputs.{name}", value)
        for name in ("json", "regex", "choice", "grammar", "structural_tag")
        if (value := getattr(asked, name)) is not None
    ]
    if asked.json_object:
        given.append(("json_schema", "structured_outputs.json_object", JSON_OBJECT))
    if len(given) != 1:
        names = ", ".join(name for _, name, _ in given) or "none"
        raise InvalidRequest(
            "structured_outputs", f"got {names}, must have one of json, json_object, regex, choice, grammar, structural_tag"
        )
    return given
