"""What the parsers of all formats share: a text that comes in pieces becomes content and calls, and nothing of it is lost."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection

from sidestream.text.tools.events import Arguments, CallBegun, Content, Event
from sidestream.text.tools.json_object import ArgumentsReader, CallReader


class CallParser:
    """Reads an answer of a model that was told of the tools `names`.

    What turns out not to be a call (an unknown tool, broken or unfinished JSON) is content, as it was written. Once the arguments of a
    call have begun it is one, whatever comes. The space around calls is dropped. The same text gives the same, however it is cut.
    """

    def __init__(self, names: Collection[str], new_id: Callable[[], str]) -> None:
        self._names = frozenset(names)
        self._new_id = new_id
        self._pending = ""  # what is not decided yet
        self._space = ""  # that ended the content so far
        self._calls = 0
        self._after_call = False
        self._events: list[Event] = []
        self._step: Callable[[bool], None] = self._start

    def feed(self, text: str) -> list[Event]:
        self._pending += text
        return self._parsed(final=False)

    def finish(self) -> list[Event]:
        """Nothing more comes."""
        events = self._parsed(final=True)
        return [*events, Content(self._space)] if self._space else events

    def _parsed(self, *, final: bool) -> list[Event]:
        while True:
            step = self._step
            step(final)
            if self._step == step:  # it waits for more
                events, self._events = self._events, []
                return events

    @abstractmethod
    def _start(self, final: bool) -> None:
        """The first of the steps. Each takes what it can of `_pending`, and either names the next one or waits; `final`: nothing comes."""

    def _text(self, final: bool) -> None:
        """Content to the end."""
        self._content(len(self._pending))

    # What steps do

    def _content(self, length: int) -> None:
        """So many characters are content."""
        text, self._pending = self._pending[:length], self._pending[length:]
        if self._after_call:
            text = text.lstrip()
        shown = (self._space + text).rstrip()
        self._space = (self._space + text)[len(shown) :]
        if shown:
            self._after_call = False
            self._events.append(Content(shown))

    def _begin(self, name: str) -> None:
        self._events.append(CallBegun(self._calls, self._new_id(), name))
        self._calls += 1
        self._space, self._after_call = "", True

    def _arguments(self, text: str) -> None:
        if text:
            self._events.append(Arguments(self._calls - 1, text))


class JsonCallParser(CallParser):
    """Of a format whose calls are JSON objects."""

    needs_arguments = False  # whether an object without any is something else

    def __init__(self, names: Collection[str], new_id: Callable[[], str]) -> None:
        super().__init__(names, new_id)
        self._prefix = 0
        self._at = 0
        self._reader: CallReader | ArgumentsReader | None = None

    @abstractmethod
    def _after_object(self, final: bool) -> None:
        """The step that follows the object of a call."""

    def _broken(self, final: bool) -> None:
        """The step for a call whose arguments are not JSON: all that comes is theirs."""
        text, self._pending = self._pending, ""
        self._arguments(text)

    def _open(self, prefix: int, reader: CallReader | ArgumentsReader | None = None) -> None:
        """An object may follow the first `prefix` characters, which are content if it is no call."""
        self._prefix = self._at = prefix
        self._reader = reader or CallReader(self._names, needs_arguments=self.needs_arguments)
        self._begun = False
        self._step = self._call

    def _call(self, final: bool) -> None:
        reader = self._reader
        assert reader is not None
        self._at = reader.read(self._pending, self._at)
        if reader.begun:
            if not self._begun:
                assert reader.name is not None
                self._begun = True
                self._begin(reader.name)
            self._arguments(reader.taken())
            self._pending, self._at = self._pending[self._at :], 0
            if reader.done or reader.failed:
                self._step = self._broken if reader.within and reader.failed else self._after_object
        elif reader.failed or final:
            self._content(self._prefix)
            self._step = self._text
