"""The answer to one prompt while it comes, part by part."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType

from sidestream.answers import Event, Prompt, StreamedChoice, dead
from sidestream.errors import SlowReader
from sidestream.messages import Inbound
from sidestream.output import Output
from sidestream.router import abort_of


class Parts:
    """Turns the events of a streamed call into the parts of its answers."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._unfinished = sum(len(prompt.choices) for prompt in prompts)

    @property
    def complete(self) -> bool:
        return not self._unfinished

    def take(self, event: Event | None) -> tuple[Prompt, Output] | None:
        """A part, if there is something to show. Raises EngineDead if the engine stops, and what went wrong with a request."""
        if event is None:  # closed
            return None
        if isinstance(event, SlowReader):
            raise event
        if isinstance(event, BaseException):
            raise dead(event)
        choice, delta = event
        if delta.finish is not None:
            self._unfinished -= 1
            if delta.finish.error is not None:
                raise delta.finish.error
        assert isinstance(choice, StreamedChoice)
        part = choice.part(delta)
        return None if part is None else (choice.prompt, part)


class OutputStream(Iterator[Output]):
    """The parts of an answer. Closing it before the end, leaving its `with` block or dropping it aborts the request.

    Any thread may read it or close it; a part goes to one of those who read.
    """

    def __init__(self, prompt: Prompt, events: queue.SimpleQueue[Event | None], inbox: queue.SimpleQueue[Inbound], engine: object) -> None:
        self._engine = engine  # not collected while its answer is read
        self._prompt = prompt
        self._parts = Parts([prompt])
        self._events = events
        self._inbox = inbox
        self._abort = abort_of(prompt)
        self._reading = threading.Lock()
        self._closed = False

    def __next__(self) -> Output:
        """The next part. Raises EngineDead if the engine stops, and what went wrong with the request."""
        with self._reading:
            try:
                while not self._parts.complete and not self._closed:
                    taken = self._parts.take(self._events.get())
                    if taken is not None:
                        return taken[1]
            except BaseException:
                self.close()
                raise
        raise StopIteration

    def close(self) -> None:
        """Give the request up: whoever waits for the next part gets no more. Does nothing once the answer is complete."""
        if not self._parts.complete and not self._closed:
            self._closed = True
            # Queues alone, no lock: an object is collected in any thread at any moment.
            self._inbox.put(self._abort)
            self._events.put(None)

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
