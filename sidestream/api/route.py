"""A route: declared once, for the router, the check of keys and the OpenAPI document."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from sidestream.api.body import read_body
from sidestream.api.errors import ErrorShape

if TYPE_CHECKING:
    from sidestream.api.service import Service

Body = TypeVar("Body")


@dataclass(frozen=True)
class Call(Generic[Body]):
    """One HTTP request to a route."""

    service: Service
    request: Request
    body: Body  # of the route's type, checked
    id: str  # echoed as X-Request-Id; in error bodies and logs


Handler = Callable[[Call[Any]], Awaitable[Response]]


@dataclass(frozen=True)
class Route:
    """`body` is the Struct that the JSON body must be; `answer` the type of the JSON answer, where it has one."""

    method: str
    path: str  # in Starlette's notation
    handler: Handler
    summary: str
    body: type[msgspec.Struct] | None = None
    answer: Any = None
    aliases: tuple[str, ...] = ()
    media_type: str = "application/json"
    streams: bool = False  # may also answer with server-sent events
    events: Any = None  # the type of their data, where it has one
    queues: bool = True  # may find the queue of the engine full; routes with a body only
    loaded: bool = True  # has no answer while the model loads
    states: Mapping[int, Any] = field(default_factory=dict)  # its own answers with other statuses than 200: types, None for no body
    admin: bool = False  # changes what others get: needs the admin key, or a loopback address where there is none
    open: bool = False  # needs no key
    errors: ErrorShape = "openai"

    async def run(self, service: Service, request: Request, id: str) -> Response:
        """The answer. A client that leaves while it waits for one cancels the handler, which aborts what it asked the engine."""
        body = None if self.body is None else await read_body(request, self.body, service.config.max_body_size)
        request.state.read = True
        service.answering += 1  # until `Surrounding` has seen all of the answer
        call: Call[Any] = Call(service, request, body, id)
        if self.method == "GET":
            return await self.handler(call)
        answering = asyncio.ensure_future(self.handler(call))
        leaving = asyncio.ensure_future(_left(request.receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise ClientLeft
            return answering.result()
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


async def _left(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
