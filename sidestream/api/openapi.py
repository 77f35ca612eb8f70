"""`/openapi.json`, made from the table of routes and the types of their bodies, and `/docs`, a page that reads it without a network."""

from __future__ import annotations

import base64
import hashlib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response

from sidestream import __version__
from sidestream.api.errors import ERROR_ANSWERS
from sidestream.api.route import Call, Route

STATUSES = {
    200: "The answer",
    307: "It is elsewhere",
    400: "A field is wrong; the message names it",
    401: "No key, or a wrong one",
    403: "The route needs the admin key, or a process of the server's own machine",
    404: "There is no such model",
    413: "The body is larger than the server takes",
    429: "The queue is full; try again after Retry-After seconds",
    499: "Somebody aborted the request by its id",
    500: "The engine failed",
    503: "Loading, shutting down or failed; try again after Retry-After seconds",
}
RETRY = (429, 503)  # statuses whose answers have Retry-After
REFERENCE = "#/components/schemas/{name}"
HEADERS = {
    "X-Request-Id": ("The id of the request: the one that came in this header, or a new one", {"type": "string"}),
    "request-id": ("The same, where Anthropic's clients look for it", {"type": "string"}),
    "Location": ("Where", {"type": "string"}),
    "Retry-After": ("Seconds", {"type": "integer", "minimum": 0}),
}
SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
EVENTS = "With stream: an event with JSON as its data; lines that begin with a colon keep the connection alive"
SAFETENSORS = "With hidden_states_format safetensors: the rows, and the JSON answer in the metadata under `answer`"


def document_routes(routes: Sequence[Route]) -> tuple[Route, ...]:
    """The document describes `routes` and its own."""
    own: tuple[Route, ...] = ()

    @cache
    def document() -> bytes:
        return msgspec.json.encode(openapi((*routes, *own)))

    async def openapi_json(call: Call[None]) -> Response:
        return Response(document(), media_type="application/json")

    async def docs(call: Call[None]) -> Response:
        page = _page("docs.html")
        return Response(
            page.html, headers={"Content-Security-Policy": page.policy, "Referrer-Policy": "no-referrer"}, media_type="text/html"
        )

    own = (
        Route("GET", "/openapi.json", openapi_json, "This document", answer=dict[str, Any], loaded=False),
        Route("GET", "/docs", docs, "These routes, to read and to try", media_type="text/html", open=True, loaded=False),
    )
    return own


def openapi(routes: Sequence[Route]) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    types = list(dict.fromkeys(each for route in routes for each in _types(route)))
    found, components = msgspec.json.schema_components([*types, *ERROR_ANSWERS.values()], ref_template=REFERENCE)
    schemas = dict(zip((*types, *ERROR_ANSWERS.values()), found, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        for path in (route.path, *route.aliases):
            operation = _operation(route, path, schemas)
            paths.setdefault(_template(path), {})[route.method.lower()] = operation
    headers = {name: {"description": said, "schema": schema} for name, (said, schema) in HEADERS.items()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "sidestream",
            "version": __version__,
            "description": "LLM inference whose log-probabilities and hidden states are outputs of the same rank as the text.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "tags": [tag._asdict() for tag in dict.fromkeys(map(_tag, routes))],
        "paths": paths,
        "components": {"schemas": components, "headers": headers, "securitySchemes": SECURITY},
    }


def _types(route: Route) -> Iterator[Any]:
    yield from (each for each in (route.body, route.answer, route.events, *route.states.values()) if each is not None)


class Tag(NamedTuple):
    name: str
    description: str


def _tag(route: Route) -> Tag:
    """A family of routes is a module, and what its first line says."""
    module = sys.modules[route.handler.__module__]
    said = (inspect.getdoc(module) or "").partition("\n")[0]
    return Tag(module.__name__.rpartition(".")[2], said)


def _template(path: str) -> str:
    """Starlette's `{id:path}` is OpenAPI's `{id}`."""
    return re.sub(r":\w+}", "}", path)


def _operation(route: Route, path: str, schemas: dict[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "tags": [_tag(route).name],
        "operationId": f"{route.method.lower()}{re.sub('[^a-zA-Z0-9]+', '_', _template(path)).rstrip('_')}",
        "summary": route.summary,
        "responses": dict(sorted(_responses(route, path, schemas).items())),
        "security": [] if route.open else [{}, {"bearer": []}, {"x-api-key": []}],
    }
    if path != route.path:
        operation["x-alias-of"] = _template(route.path)
    if names := re.findall(r"{(\w+)}", _template(path)):
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schemas[route.body]}}}
    return operation


def _responses(route: Route, path: str, schemas: dict[Any, Any]) -> dict[str, Any]:
    found: dict[int, list[Any]] = {status: [schemas[ERROR_ANSWERS[route.errors]]] for status in _failures(route, path)}
    for status, answer in route.states.items():
        found.setdefault(status, []).extend([] if answer is None else [schemas[answer]])
    bodies = {status: _json(each[0] if len(each) == 1 else {"anyOf": each}) if each else {} for status, each in found.items()}
    bodies[200] = _content(route, schemas)
    return {str(status): _response(route, status, body) for status, body in bodies.items()}


def _content(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {route.media_type: {"schema": {"type": "string"} if route.answer is None else schemas[route.answer]}}
    if route.answer is None and route.media_type == "application/json":
        content = {route.media_type: {"schema": {}}}
    if route.body is not None and "hidden_states_format" in route.body.__struct_fields__:
        content["application/octet-stream"] = {"schema": {"description": SAFETENSORS}}
    if route.streams:
        content["text/event-stream"] = {"schema": _event(None if route.events is None else schemas[route.events])}
    return content


def _event(data: Any) -> dict[str, Any]:
    """Until OpenAPI 3.2 the schema of a stream is that of each of its events."""
    told = {} if data is None else {"contentMediaType": "application/json", "contentSchema": data}
    properties = {"data": {"type": "string", **told}, "event": {"type": "string"}}
    return {"type": "object", "required": ["data"], "properties": properties, "description": EVENTS}


def _failures(route: Route, path: str) -> Iterator[int]:
    """The statuses besides 200 that a route may answer with in the shape of an error."""
    fields = () if route.body is None else route.body.__struct_fields__
    happens = {
        400: route.body is not None,
        401: not route.open,
        403: route.admin,
        404: "{" in path or "model" in fields,
        413: route.body is not None,
        429: route.body is not None and route.queues and not route.admin,
        499: route.streams,
        500: True,
        503: route.loaded,
    }
    return (status for status, may in happens.items() if may)


def _response(route: Route, status: int, content: dict[str, Any]) -> dict[str, Any]:
    sent = {"X-Request-Id": True, "request-id": route.errors == "anthropic", "Location": status == 307, "Retry-After": status in RETRY}
    headers = {name: {"$ref": f"#/components/headers/{name}"} for name, is_sent in sent.items() if is_sent}
    return {"description": STATUSES[status], "headers": headers, **({"content": content} if content else {})}


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


class Page(NamedTuple):
    html: bytes
    policy: str  # its Content-Security-Policy: nothing but what the file itself holds, and answers of this server


@cache
def _page(name: str) -> Page:
    html = (files("sidestream.api") / "pages" / name).read_bytes()
    allowed = {kind: _hashes(html, kind) for kind in ("script", "style")}
    policy = f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; connect-src 'self'; img-src data:"
    return Page(html, f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")


def _hashes(html: bytes, element: str) -> str:
    inside = re.findall(rb"<%b\b[^>]*>(.*?)</%b>" % (element.encode(), element.encode()), html, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(each).digest()).decode()}'" for each in inside)
