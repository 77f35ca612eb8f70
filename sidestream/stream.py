"""The answer to one prompt while it comes, part by part."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import TracebackType

from sidestream.answers import Event, Prompt, StreamedChoice
from sidestream.messages import Inbound
from sidestream.output import Output
from sidestream.router import abort_of, dead


class OutputStream(Iterator[Output]):
    """The parts of an answer. Closing it before the end, leaving its `with` block or dropping it aborts the request.

    Any thread may read it or close it; a part goes to one of those who read.
    """

    def __init__(self, prompt: Prompt, inbox: queue.SimpleQueue[Inbound], engine: object) -> None:
        self._engine = engine  # not collected while its answer is read
        self._prompt = prompt
        self._inbox = inbox
        self._abort = abort_of(prompt)
        self._reading = threading.Lock()
        self._unfinished = len(prompt.choices)
        self._closed = False

    def __next__(self) -> Output:
        """The next part. Raises EngineDead if the engine stops, and what went wrong with the request."""
        with self._reading:
            try:
                while self._unfinished and not self._closed:
                    part = self._take(self._prompt.events.get())
                    if part is not None:
                        return part
            except BaseException:
                self.close()
                raise
        raise StopIteration

    def _take(self, event: Event | None) -> Output | None:
        if event is None:  # closed
            return None
        if isinstance(event, BaseException):
            raise dead(event)
        choice, delta = event
        if delta.finish is not None:
            self._unfinished -= 1
            if delta.finish.error is not None:
                raise delta.finish.error
        assert isinstance(choice, StreamedChoice)
        return choice.part(delta)

    def close(self) -> None:
        """Give the request up: whoever waits for the next part gets no more. Does nothing once the answer is complete."""
        if self._unfinished and not self._closed:
            self._closed = True
            # Queues alone, no lock: an object is collected in any thread at any moment.
            self._inbox.put(self._abort)
            self._prompt.events.put(None)

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
