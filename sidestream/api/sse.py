"""Server-sent events and large bodies, sent so that no client keeps another one waiting."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sidestream.api.errors import described, error_event
from sidestream.api.large import encoded, others_first

log = logging.getLogger("sidestream")

KEEP_ALIVE_SECONDS = 15.0  # without a word before a comment says that the connection lives
PIECE_BYTES = 256 * 1024  # of a large body: others get their turn between two
DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(value: Any, name: str | None = None) -> bytes:
    """One event; `name` for routes whose events have names."""
    head = b"data: " if name is None else b"event: %b\ndata: " % name.encode()
    return b"".join([head, *encoded(value), b"\n\n"])


class EventStream(Response):
    """Sends events as they come. The client's leaving closes the iterator, which aborts the request behind it.

    An error of the iterator becomes the last event: a client that streams has seen status 200 already.
    """

    def __init__(self, events: AsyncIterator[bytes], *, id: str, headers: Mapping[str, str] | None = None) -> None:
        self.status_code = 200
        self.media_type = "text/event-stream"
        self.background = None
        self.init_headers({**HEADERS, **(headers or {})})  # there is no body yet, so no content-length either
        self._events = events
        self._id = id
        self._sent = time.monotonic()
        self._within = False  # an event, of which the client has a part

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        writing = asyncio.ensure_future(self._write(send))
        beside = [asyncio.ensure_future(each) for each in (_disconnected(receive), self._keep_alive(send))]
        try:
            await asyncio.wait((writing, *beside), return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks = (writing, *beside)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not writing.cancelled():
            writing.result()

    async def _write(self, send: Send) -> None:
        try:
            async for data in self._events:
                self._within = True
                for part in slices([data]) if len(data) > PIECE_BYTES else (data,):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                self._within, self._sent = False, time.monotonic()
        except Exception as error:
            if described(error)[0] >= 500:
                log.warning("%s the stream ended: %s", self._id, " ".join(str(error).split()))
            await send({"type": "http.response.body", "body": event(error_event(error, self._id)), "more_body": True})
        finally:
            close = getattr(self._events, "aclose", None)
            if close is not None:
                await close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            silent = time.monotonic() - self._sent
            if silent >= KEEP_ALIVE_SECONDS and not self._within:
                await send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})
                self._sent = time.monotonic()
            await asyncio.sleep(max(KEEP_ALIVE_SECONDS - silent, 0.1))


class LargeResponse(Response):
    """A body in pieces, which are not put together but sent slice by slice."""

    def __init__(
        self, pieces: Sequence[bytes | memoryview], status: int = 200, headers: Mapping[str, str] | None = None, *, media_type: str
    ) -> None:
        self.status_code = status
        self.media_type = media_type
        self.background = None
        self.init_headers({"Content-Length": str(sum(memoryview(piece).nbytes for piece in pieces)), **(headers or {})})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in slices(self._pieces):
            with suppress(OSError):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await others_first()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def slices(pieces: Sequence[bytes | memoryview]) -> Iterator[bytes]:
    """The bytes of the pieces, at most PIECE_BYTES at a time: small pieces together, large ones in parts."""
    held: list[memoryview] = []
    size = 0
    for piece in pieces:
        view = memoryview(piece).cast("B")
        while len(view):
            part, view = view[: PIECE_BYTES - size], view[PIECE_BYTES - size :]
            held.append(part)
            size += len(part)
            if size == PIECE_BYTES:
                yield b"".join(held)
                held, size = [], 0
    if held:
        yield b"".join(held)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Of a Struct or plain values; msgspec.Raw in it is copied as it is, LargeJson is not copied."""
    pieces = encoded(value)
    if len(pieces) == 1 and len(pieces[0]) <= PIECE_BYTES:
        return Response(pieces[0], status, headers, media_type="application/json")
    return LargeResponse(pieces, status, headers, media_type="application/json")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
