"""Streamed answers in an event loop. What waits for a reader is bounded, so that a slow one costs nobody but itself."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType

from sidestream.answers import Event, Prompt
from sidestream.errors import SlowReader
from sidestream.output import Output
from sidestream.router import Router
from sidestream.stream import Parts

UNREAD_BYTES = 64 * 2**20  # of rows that may wait for the reader of a stream, besides those of one step
UNREAD_EVENTS = 4096  # and of steps


class Mailbox:
    """The events of one call, in order: put by the task that receives, awaited by the call.

    With `give_up` it is bounded: when too much waits, `give_up` is called once, and all that is left is a SlowReader.
    """

    def __init__(self, give_up: Callable[[], None] | None = None) -> None:
        self._events: deque[tuple[Event | None, int]] = deque()  # with their bytes
        self._bytes = 0
        self._wake: asyncio.Future[None] | None = None
        self._give_up = give_up

    def put(self, event: Event | None) -> None:
        size = _bytes_of(event)
        self._events.append((event, size))
        self._bytes += size
        if self._give_up is not None and self._overflows():
            give_up, self._give_up = self._give_up, None
            waited = f"{len(self._events)} parts with {self._bytes} bytes waited for it"
            self._events.clear()
            self._events.append((SlowReader(f"the stream was read too slowly: {waited}"), 0))
            self._bytes = 0
            give_up()
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def get(self) -> Event | None:
        while not self._events:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        event, size = self._events.popleft()
        self._bytes -= size
        return event

    def _overflows(self) -> bool:
        return len(self._events) > UNREAD_EVENTS or (len(self._events) > 1 and self._bytes > UNREAD_BYTES)


class PartStream(AsyncIterator[tuple[int, Output]]):
    """The parts of the answers to several prompts: `(which prompt, part)`. Closing it or dropping it aborts what is not finished."""

    def __init__(self, prompts: Sequence[Prompt], mailbox: Mailbox, router: Router) -> None:
        self._prompts = prompts
        self._place = {id(prompt): place for place, prompt in enumerate(prompts)}
        self._parts = Parts(prompts)
        self._mailbox = mailbox
        self._router = router
        self._loop = asyncio.get_running_loop()
        self._closed = False

    async def __anext__(self) -> tuple[int, Output]:
        """The next part. Raises EngineDead if the engine stops, SlowReader, and what went wrong with a request."""
        try:
            while not self._parts.complete and not self._closed:
                taken = self._parts.take(await self._mailbox.get())
                if taken is not None:
                    prompt, part = taken
                    return self._place[id(prompt)], part
        except BaseException:
            await self.aclose()
            raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Give the requests up. Does nothing once the answers are complete."""
        if not self._parts.complete and not self._closed:
            self._closed = True
            self._router.give_up(self._prompts)
            self._mailbox.put(None)

    async def __aenter__(self) -> PartStream:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # An object is collected in any thread at any moment: its requests are given up by the event loop.
        if not self._parts.complete and not self._closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._router.give_up, self._prompts)


class AsyncOutputStream(AsyncIterator[Output]):
    """The parts of an answer, to be read with `async for`. Leaving it early aborts the request."""

    def __init__(self, parts: PartStream) -> None:
        self._parts = parts

    async def __anext__(self) -> Output:
        return (await self._parts.__anext__())[1]

    async def aclose(self) -> None:
        """Give the request up. Does nothing once the answer is complete."""
        await self._parts.aclose()

    async def __aenter__(self) -> AsyncOutputStream:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()


def _bytes_of(event: Event | None) -> int:
    if not isinstance(event, tuple):
        return 0
    rows = event[1].rows
    return 0 if rows is None or rows.hidden is None else rows.hidden.data.nbytes
