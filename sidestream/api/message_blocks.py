"""The blocks of an answer of the Messages API, whole and as events: text, thinking and calls, in the order in which they were written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from sidestream.api import message_shapes as shapes
from sidestream.api.dialogue import Piece
from sidestream.text.tools.events import Arguments, CallBegun, Content, Event, Reasoning

BLOCKS: dict[type[Event], type[shapes.AnswerBlock]] = {
    Content: shapes.TextAnswer,
    Reasoning: shapes.ThinkingAnswer,
    CallBegun: shapes.ToolUseAnswer,
    Arguments: shapes.ToolUseAnswer,
}


class Blocks:
    """The blocks of a streamed answer. Each ends where the next one begins."""

    def __init__(self) -> None:
        self._count = 0
        self._open: shapes.AnswerBlock | None = None

    def told(self, piece: Piece, extras: dict[str, Any]) -> Iterator[shapes.Event]:
        """`extras` go with the first delta."""
        for told in piece.events:
            if isinstance(told, CallBegun) or self._open is None or not isinstance(self._open, BLOCKS[type(told)]):
                yield from self._begun(told)
            if not isinstance(told, CallBegun):
                yield self._delta(told.text, extras)
                extras = {}
        if extras:
            if self._open is None:
                yield from self._begun(Content(""))
            yield self._delta("", extras)

    def ended(self) -> Iterator[shapes.Event]:
        """An answer has at least one block."""
        if self._open is None:
            yield from self._begun(Content(""))
        yield shapes.ContentBlockStop(self._count - 1)

    def _begun(self, event: Event) -> Iterator[shapes.Event]:
        if self._open is not None:
            yield shapes.ContentBlockStop(self._count - 1)
        self._open = _block(event)
        self._count += 1
        yield shapes.ContentBlockStart(index=self._count - 1, content_block=self._open)
        if self._count == 1:
            yield shapes.Ping()

    def _delta(self, text: str, extras: dict[str, Any]) -> shapes.Event:
        match self._open:
            case shapes.ThinkingAnswer():
                piece: Any = shapes.ThinkingPiece(text)
            case shapes.ToolUseAnswer():
                piece = shapes.InputPiece(text)
            case _:
                piece = shapes.TextPiece(text)
        return shapes.ContentBlockDelta(index=self._count - 1, delta=piece, **extras)


def _block(event: Event) -> shapes.AnswerBlock:
    """An empty one, for what begins with the event."""
    match event:
        case Reasoning():
            return shapes.ThinkingAnswer(thinking="")
        case CallBegun():
            return shapes.ToolUseAnswer(id=event.id, name=event.name, input={})
        case _:
            return shapes.TextAnswer(text="")


def blocks_of(events: Sequence[Event]) -> list[shapes.AnswerBlock]:
    """Of a whole answer: at least one."""
    blocks: list[shapes.AnswerBlock] = []
    arguments: dict[int, str] = {}
    for told in events:
        if isinstance(told, CallBegun) or not blocks or not isinstance(blocks[-1], BLOCKS[type(told)]):
            blocks.append(_block(told))
        match blocks[-1]:
            case shapes.TextAnswer() as block if isinstance(told, Content):
                block.text += told.text
            case shapes.ThinkingAnswer() as block if isinstance(told, Reasoning):
                block.thinking += told.text
            case shapes.ToolUseAnswer() as block if isinstance(told, Arguments):
                arguments[told.index] = arguments.get(told.index, "") + told.text
                block.input = _input(arguments[told.index])
    return blocks or [shapes.TextAnswer(text="")]


def _input(arguments: str) -> dict[str, Any]:
    try:
        read = json.loads(arguments)
    except ValueError:
        read = None
    return read if isinstance(read, dict) else {"INVALID_JSON": arguments}
