"""The ASGI application: the table of routes, and what surrounds every one of them."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.routing import Route as Path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidestream.api.errors import ErrorShape, described, error_response
from sidestream.api.route import ClientLeft, Route
from sidestream.api.routes import ROUTES
from sidestream.api.service import Service
from sidestream.errors import SidestreamError, Unavailable

log = logging.getLogger("sidestream")

MAX_ID = 128  # characters of a request id that is echoed
CLIENT_LEFT = 499  # in the metrics: nobody sees this answer


def create_app(service: Service) -> Starlette:
    paths = [Path(path, _endpoint(service, route), methods=[route.method]) for route in ROUTES for path in (route.path, *route.aliases)]
    middleware = [Middleware(Surrounding, service=service)]
    if service.config.cors_origin:
        allowed = list(service.config.cors_origin)
        # Outside the check of keys: a browser's preflight has none.
        middleware.insert(0, Middleware(CORSMiddleware, allow_origins=allowed, allow_methods=["*"], allow_headers=["*"]))
    return Starlette(routes=paths, middleware=middleware, exception_handlers={HTTPException: _unrouted})


def _endpoint(service: Service, route: Route) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        id = request.state.id
        try:
            if route.admin:
                service.keys.check(request, admin=True)
            return await route.run(service, request, id)
        except (ClientLeft, ClientDisconnect):  # while it waited, or in the middle of its request
            return Response(status_code=CLIENT_LEFT)
        except SidestreamError as error:
            if described(error)[0] >= 500 and not isinstance(error, Unavailable):  # its reason was logged once
                log.warning("%s %s: %s", id, request.url.path, error)
            return error_response(error, id, route.errors)
        except Exception as error:
            log.exception("%s %s", id, request.url.path)
            return error_response(error, id, route.errors)

    return endpoint


async def _unrouted(request: Request, error: Exception) -> Response:
    """A path or a method that no route has."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        error.detail = f"there is no route {request.url.path}; /openapi.json lists them"
    if error.status_code == 405:  # two routes may share a path, and Starlette names the methods of the first
        near = [route for route in request.app.routes if isinstance(route, Path) and route.matches(request.scope)[0] is Match.PARTIAL]
        error.headers = {"Allow": ", ".join(sorted(method for route in near for method in route.methods or ()))}
    return error_response(error, request.state.id, request.state.errors)


class Surrounding:
    """Around every route: the request's id, the check of its key, the count of its answer. What is not declared open needs a key."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service
        self.open = frozenset(path for route in ROUTES if route.open for path in (route.path, *route.aliases))
        self.anthropic = frozenset(path for route in ROUTES if route.errors == "anthropic" for path in (route.path, *route.aliases))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope["path"] = re.sub("/{2,}", "/", scope["path"])  # some clients put a slash too many behind the base address
        request = Request(scope)
        id = _request_id(request)
        errors: ErrorShape = "anthropic" if scope["path"] in self.anthropic else "openai"
        scope.setdefault("state", {}).update(id=id, errors=errors)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = id
                if errors == "anthropic":
                    headers["request-id"] = id
                self.service.metrics.http_response(_route_of(scope), message["status"])
            await send(message)

        try:
            if scope["path"] not in self.open:
                self.service.keys.check(request, admin=False)
        except SidestreamError as error:
            await error_response(error, id, errors)(scope, receive, counted)
            return
        try:
            await self.app(scope, receive, counted)
        finally:
            self.service.answering -= scope["state"].get("read", False)


def _route_of(scope: Scope) -> str:
    """The path as it was declared; what no route has counts together."""
    route = scope.get("route")
    return getattr(route, "path", "unknown")


def _request_id(request: Request) -> str:
    given = request.headers.get("x-request-id", "")
    return given if 0 < len(given) <= MAX_ID and given.isprintable() else secrets.token_hex(12)
