"""`/openapi.json`, made from the table of routes and the types of their bodies, and `/docs`, a page that reads it without a network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
from starlette.responses import Response

from sidestream import __version__
from sidestream.api.errors import ErrorAnswer
from sidestream.api.route import Call, Route
from sidestream.api.sse import json_response

ERRORS = {
    "400": "A field is wrong; `param` names it",
    "401": "No key, or a wrong one",
    "403": "The key is not the admin's",
    "404": "There is no such model",
    "413": "The body is too large",
    "429": "The queue is full; try again after Retry-After seconds",
    "500": "The engine failed",
    "503": "Loading or shutting down; try again after Retry-After seconds",
}
REFERENCE = "#/components/schemas/{name}"


def document_routes(routes: Sequence[Route]) -> tuple[Route, ...]:
    @cache
    def document() -> dict[str, Any]:
        return openapi(routes)

    async def openapi_json(call: Call[None]) -> Response:
        return json_response(document())

    async def docs(call: Call[None]) -> Response:
        return Response(_page("docs.html"), media_type="text/html; charset=utf-8")

    return (
        Route("GET", "/openapi.json", openapi_json, "This document"),
        Route("GET", "/docs", docs, "These routes, to read", open=True),
    )


def openapi(routes: Sequence[Route]) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    types = [each for route in routes for each in (route.body, route.answer) if each is not None]
    references, components = msgspec.json.schema_components([*types, ErrorAnswer], ref_template=REFERENCE)
    schemas = iter(references)
    error = references[-1]
    paths: dict[str, Any] = {}
    for route in routes:
        body = None if route.body is None else next(schemas)
        answer = None if route.answer is None else next(schemas)
        for path in (route.path, *route.aliases):
            operation = _operation(route, path, body, answer, error)
            paths.setdefault(re.sub(r":\w+}", "}", path), {})[route.method.lower()] = operation
    security = {"bearer": {"type": "http", "scheme": "bearer"}, "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "sidestream", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": security},
    }


def _operation(route: Route, path: str, body: Any, answer: Any, error: Any) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": answer if answer is not None else {}}}
    if route.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    # A route without a body or a parameter cannot be asked wrongly; any may be asked without a key, or at the wrong moment.
    statuses = [status for status in ERRORS if route.body is not None or status not in ("400", "413", "429")]
    responses = {status: {"description": ERRORS[status], "content": {"application/json": {"schema": error}}} for status in statuses}
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}{re.sub('[^a-zA-Z0-9]+', '_', path)}",
        "summary": route.summary,
        "responses": {"200": {"description": "The answer", "content": content}, **responses},
        "security": [] if route.open else [{}, {"bearer": []}, {"x-api-key": []}],
    }
    names = re.findall(r"{(\w+)(?::\w+)?}", path)
    if names:
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation


def _page(name: str) -> bytes:
    return (files("sidestream.api") / "pages" / name).read_bytes()
