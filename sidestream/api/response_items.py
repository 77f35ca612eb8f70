"""The items of a response as they grow, and the events that tell of them: reasoning, messages and calls, in the order of the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import msgspec

from sidestream.api import response_shapes as shapes
from sidestream.api.response_shapes import FunctionCall, Item, OutputMessage, OutputText, ReasoningItem, ReasoningText
from sidestream.text.tools.events import Arguments, CallBegun, Content, Event, Reasoning

NO_ENTRIES = b"[]"
KINDS: dict[type[Event], type[Item]] = {
    Reasoning: ReasoningItem,
    Content: OutputMessage,
    CallBegun: FunctionCall,
    Arguments: FunctionCall,
}


class Send(Protocol):
    """Makes an event."""

    def __call__(self, kind: type[shapes.Event], **content: Any) -> bytes: ...


class Items:
    """Each item ends where the next one begins. `suffix` is the end of their ids."""

    def __init__(self, suffix: str, send: Send) -> None:
        self._suffix = suffix
        self._send = send
        self._items: list[Item] = []
        self._pieces: list[str] = []  # the text of the last item
        self._entries: list[bytes] = []  # the JSON of its lists of logprobs

    def told(self, events: Sequence[Event], entries: bytes, extras: dict[str, Any]) -> bytes:
        """What is new. `entries`, the JSON of a list of logprobs, and `extras` go with the first delta."""
        made: list[bytes] = []
        for event in events:
            if isinstance(event, CallBegun) or not self._items or not isinstance(self._items[-1], KINDS[type(event)]):
                made += [self._closed("completed"), self._opened(event)]
            if not isinstance(event, CallBegun):
                made.append(self._delta(event.text, entries, extras))
                entries, extras = NO_ENTRIES, {}
        if entries != NO_ENTRIES or extras:
            if not self._items:
                made.append(self._opened(Content("")))
            made.append(self._delta("", entries, extras))
        return b"".join(made)

    def ended(self, status: shapes.ItemStatus, matched_stop: str | int | None) -> bytes:
        """There is at least one item: an answer without text has an empty message."""
        begun = b"" if self._items else self._opened(Content(""))
        if isinstance(message := self._items[-1], OutputMessage):
            message.matched_stop = matched_stop
        return begun + self._closed(status)

    @property
    def items(self) -> list[Item]:
        """As far as they have come."""
        if self._items and self._items[-1].status == "in_progress":
            self._complete("incomplete")
        return self._items

    def _opened(self, event: Event) -> bytes:
        send, index = self._send, len(self._items)
        number = f"_{index}" if any(isinstance(item, KINDS[type(event)]) for item in self._items) else ""
        suffix = f"{self._suffix}{number}"
        item: Item
        match event:
            case Reasoning():
                item = ReasoningItem(id=f"rs_{suffix}", status="in_progress", content=[])
            case CallBegun():
                item = FunctionCall(id=f"fc_{suffix}", status="in_progress", call_id=event.id, name=event.name, arguments="")
            case _:
                item = OutputMessage(id=f"msg_{suffix}", status="in_progress", content=[])
        self._items.append(item)
        self._pieces, self._entries = [], []
        added = send(shapes.ItemAdded, output_index=index, item=item)
        if isinstance(item, FunctionCall):
            return added
        part = ReasoningText(text="") if isinstance(item, ReasoningItem) else text_of([], [])
        return added + send(shapes.PartAdded, item_id=item.id, output_index=index, part=part)

    def _delta(self, text: str, entries: bytes, extras: dict[str, Any]) -> bytes:
        item = self._items[-1]
        self._pieces.append(text)
        self._entries.append(entries)
        where = {"item_id": item.id, "output_index": len(self._items) - 1, "delta": text, **extras}
        logprobs = cast(Any, msgspec.Raw(entries))
        if isinstance(item, OutputMessage):
            return self._send(shapes.TextDelta, logprobs=logprobs, **where)
        if entries != NO_ENTRIES:
            where["logprobs"] = logprobs
        return self._send(shapes.ReasoningDelta if isinstance(item, ReasoningItem) else shapes.ArgumentsDelta, **where)

    def _complete(self, status: shapes.ItemStatus) -> None:
        item = self._items[-1]
        item.status = status
        match item:
            case ReasoningItem():
                item.content = [ReasoningText(text="".join(self._pieces))]
            case FunctionCall():
                item.arguments = "".join(self._pieces)
            case OutputMessage():
                item.content = [text_of(self._pieces, self._entries)]

    def _closed(self, status: shapes.ItemStatus) -> bytes:
        """The last events of the last item, if there is one."""
        if not self._items:
            return b""
        self._complete(status)
        send, item, index = self._send, self._items[-1], len(self._items) - 1
        where: dict[str, Any] = {"item_id": item.id, "output_index": index}
        match item:
            case FunctionCall():
                text = send(shapes.ArgumentsDone, name=item.name, arguments=item.arguments, **where)
            case ReasoningItem():
                text = send(shapes.ReasoningDone, text=item.content[0].text, **where)
                text += send(shapes.PartDone, part=item.content[0], **where)
            case OutputMessage():
                part = item.content[0]
                text = send(shapes.TextDone, text=part.text, logprobs=part.logprobs, **where)
                text += send(shapes.PartDone, part=part, **where)
        return text + send(shapes.ItemDone, output_index=index, item=item)


def text_of(pieces: Sequence[str], entries: Sequence[bytes]) -> OutputText:
    """`entries` are the JSON of lists that follow each other."""
    joined = b",".join(each[1:-1] for each in entries if each != NO_ENTRIES)
    return OutputText(text="".join(pieces), logprobs=cast(Any, msgspec.Raw(b"[%b]" % joined)))
