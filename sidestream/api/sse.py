"""Server-sent events and large bodies, sent so that no client keeps another one waiting."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sidestream.api.errors import described, error_event

log = logging.getLogger("sidestream")

KEEP_ALIVE_SECONDS = 15.0  # without a word before a comment says that the connection lives
PIECE_BYTES = 256 * 1024  # of a large body: others get their turn between two
DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

_encode = msgspec.json.Encoder().encode


def event(value: Any, name: str | None = None) -> bytes:
    """One event; `name` for routes whose events have names."""
    data = _encode(value)
    return b"data: %b\n\n" % data if name is None else b"event: %b\ndata: %b\n\n" % (name.encode(), data)


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
                await send({"type": "http.response.body", "body": data, "more_body": True})
                self._sent = time.monotonic()
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
            if silent >= KEEP_ALIVE_SECONDS:
                await send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})
                self._sent = time.monotonic()
            await asyncio.sleep(max(KEEP_ALIVE_SECONDS - silent, 0.1))


class LargeResponse(Response):
    """A body that is sent piece by piece."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = memoryview(self.body)
        for start in range(0, len(body), PIECE_BYTES):
            more = start + PIECE_BYTES < len(body)
            with suppress(OSError):
                await send({"type": "http.response.body", "body": bytes(body[start : start + PIECE_BYTES]), "more_body": more})
            await asyncio.sleep(0)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Of a Struct or plain values; msgspec.Raw in it is copied as it is."""
    data = _encode(value)
    kind = LargeResponse if len(data) > PIECE_BYTES else Response
    return kind(data, status, headers, media_type="application/json")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
