"""The message that a chat answers with, whole and in deltas: text, reasoning and calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from sidestream.text.tools.events import Arguments, CallBegun, Content, Event, Reasoning


class CalledFunction(Struct):
    name: str
    arguments: str  # the JSON text that the model wrote


class ToolCall(Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(Struct, kw_only=True):
    """`content` is null where there is nothing but calls or reasoning, which comes under both names."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class FunctionDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct, kw_only=True):
    """The first of a call has its id and its name; the arguments of all of them join to the whole."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


class Delta(Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


def message_of(events: Sequence[Event]) -> AnswerMessage:
    """Of all that an answer is."""
    content, reasoning = _text(events, Content), _text(events, Reasoning)
    calls = [
        ToolCall(id=delta.id or "", function=CalledFunction(delta.function.name or "", delta.function.arguments))
        for delta in _calls(events)
    ]
    return AnswerMessage(
        content=content if content or not (reasoning or calls) else None,
        reasoning_content=reasoning or UNSET,
        reasoning=reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def delta_of(events: Sequence[Event]) -> Delta:
    """Of what is new in a stream."""
    content, reasoning = _text(events, Content), _text(events, Reasoning)
    return Delta(
        content=content or UNSET,
        reasoning_content=reasoning or UNSET,
        reasoning=reasoning or UNSET,
        tool_calls=_calls(events) or UNSET,
    )


def calls_tools(events: Sequence[Event]) -> bool:
    return any(isinstance(event, CallBegun) for event in events)


def _text(events: Sequence[Event], kind: type[Content] | type[Reasoning]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def _calls(events: Sequence[Event]) -> list[ToolCallDelta]:
    """One for each call that the events say something of."""
    deltas: dict[int, ToolCallDelta] = {}
    for event in events:
        if isinstance(event, CallBegun):
            deltas[event.index] = ToolCallDelta(index=event.index, id=event.id, type="function", function=FunctionDelta("", event.name))
        elif isinstance(event, Arguments):
            delta = deltas.setdefault(event.index, ToolCallDelta(index=event.index, function=FunctionDelta("")))
            delta.function.arguments += event.text
    return list(deltas.values())
