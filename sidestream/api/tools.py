"""Tools in a request: their shapes in OpenAI's chats, and what they mean, whatever API they came by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from sidestream.errors import InvalidRequest
from sidestream.text.tools.tool import Tool

MAX_TOOLS, MAX_TOOLS_BYTES = 128, 256 * 1024  # the latter as JSON
ToolName = Annotated[str, Meta(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_-]+$")]
Parameters = Annotated[dict[str, Any], Meta(description="JSON Schema of an object; without one the tool takes no arguments.")]
Strict = Annotated[bool, Meta(description="Hold the arguments to the schema also where the model may choose.")]
Parallel = Annotated[bool, Meta(description="False: at most one call.")]

Mode = Literal["none", "auto", "required"]


class Function(Struct, kw_only=True, forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    parameters: Parameters | None = None
    strict: Strict | None = None


class FunctionTool(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class NamedFunction(Struct, forbid_unknown_fields=True):
    name: str


class FunctionChoice(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: NamedFunction


Tools = Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS, description="What the model may call.")]
ToolChoice = Annotated[
    Mode | FunctionChoice, Meta(description="none, auto (the default: the model chooses), required, or the tool that is called.")
]


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request and which of them the model may, or must, call. Raises InvalidRequest.

    `fields` are the request's fields that say so: its tools, the choice, and the name in the choice.
    """

    tools: tuple[Tool, ...] = ()
    mode: Mode = "auto"
    name: str | None = None  # the one that must be called
    parallel: bool = True
    fields: tuple[str, str, str] = ("tools", "tool_choice", "tool_choice.function.name")
    name_field: str = "name"  # within a tool
    said: str | None = None  # what the request calls the mode, where that is something else

    def __post_init__(self) -> None:
        tools, choice, chosen = self.fields
        self._check_size(tools)
        names: list[str] = []
        for place, tool in enumerate(self.tools):
            if tool.name in names:
                raise InvalidRequest(f"{tools}.{place}.{self.name_field}", f"got {tool.name!r} a second time, must be different names")
            names.append(tool.name)
        if not names and (self.mode == "required" or self.name is not None):
            raise InvalidRequest(choice, f"got {self.name or self.said or self.mode!r}, must be left out without {tools}")
        if self.name is not None and self.name not in names:
            raise InvalidRequest(chosen, f"got {self.name!r}, must be one of {', '.join(names)}")

    def _check_size(self, field: str) -> None:
        try:
            size = len(msgspec.json.encode(self.for_template()))
        except RecursionError:
            raise InvalidRequest(field, "a schema is nested too deeply") from None
        if size > MAX_TOOLS_BYTES:
            raise InvalidRequest(field, f"got {size} bytes of JSON, must be at most {MAX_TOOLS_BYTES}")

    @property
    def active(self) -> bool:
        """Whether the model is told of the tools: not where it may call none."""
        return bool(self.tools) and self.mode != "none"

    @property
    def forced(self) -> bool:
        return self.mode == "required" or self.name is not None

    @property
    def callable(self) -> Sequence[Tool]:
        return [tool for tool in self.tools if self.name in (None, tool.name)]

    def for_template(self) -> list[dict[str, Any]] | None:
        return [tool.for_template() for tool in self.tools] if self.active else None


def tool_use(tools: Sequence[FunctionTool] | None, choice: Mode | FunctionChoice | None, parallel: bool | None) -> ToolUse:
    """What a chat's fields mean."""
    named = choice.function.name if isinstance(choice, FunctionChoice) else None
    return ToolUse(
        tuple(_tool(each.function, f"tools.{place}.function.parameters") for place, each in enumerate(tools or ())),
        mode="auto" if choice is None or isinstance(choice, FunctionChoice) else choice,
        name=named,
        parallel=parallel is not False,
        name_field="function.name",
    )


def _tool(function: Function, where: str) -> Tool:
    return Tool(function.name, function.description, function.parameters, bool(function.strict), where)
