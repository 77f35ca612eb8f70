"""The OpenAPI document says what the table of routes has, and the page shows it without a network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

from sidestream.api.openapi import openapi
from sidestream.api.routes import ROUTES

DOCUMENT: dict[str, Any] = json.loads(json.dumps(openapi(ROUTES)))
OPERATIONS = {(method, path): operation for path, methods in DOCUMENT["paths"].items() for method, operation in methods.items()}


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_every_route_of_the_table_is_in_the_document_and_nothing_else() -> None:
    table = {(route.method.lower(), re.sub(r":\w+}", "}", path)) for route in ROUTES for path in (route.path, *route.aliases)}
    assert set(OPERATIONS) == table
    names = [operation["operationId"] for operation in OPERATIONS.values()]
    assert len(names) == len(set(names))


def test_the_document_is_valid() -> None:
    pytest.importorskip("openapi_spec_validator").validate(DOCUMENT)


def test_every_reference_leads_somewhere() -> None:
    for reference in references(DOCUMENT):
        node = DOCUMENT
        for step in reference.removeprefix("#/").split("/"):
            node = node[step]


def test_statuses_are_those_that_a_route_can_answer_with() -> None:
    for route in ROUTES:
        statuses = set(OPERATIONS[route.method.lower(), re.sub(r":\w+}", "}", route.path)]["responses"])
        assert ("401" in statuses) is not route.open, route.path
        assert ("403" in statuses) is route.admin, route.path
        if route.body is None:
            assert not statuses & {"400", "413", "429"}, route.path
        else:
            assert {"400", "413"} <= statuses, route.path
        assert {"200", "500"} <= statuses, route.path
    assert "503" not in OPERATIONS["get", "/health/live"]["responses"]
    assert "429" not in OPERATIONS["post", "/v1/messages/count_tokens"]["responses"]
    assert "429" in OPERATIONS["post", "/v1/messages"]["responses"]


def test_parameters_of_a_path_are_declared() -> None:
    for (_, path), operation in OPERATIONS.items():
        declared = [each["name"] for each in operation.get("parameters", ()) if each["in"] == "path" and each["required"]]
        assert declared == re.findall(r"{(\w+)}", path), path


def test_a_route_that_streams_says_so_and_what_its_events_are() -> None:
    content = OPERATIONS["post", "/v1/responses"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "application/octet-stream", "text/event-stream"}
    events = content["text/event-stream"]["schema"]["properties"]["data"]["contentSchema"]["discriminator"]["mapping"]
    assert events["response.output_text.delta"] == "#/components/schemas/TextDelta" and len(events) == 15
    for route in ROUTES:
        operation = OPERATIONS[route.method.lower(), re.sub(r":\w+}", "}", route.path)]
        streamed = operation["responses"]["200"]["content"].get("text/event-stream")
        assert (streamed is not None) is route.streams, route.path
        if streamed is not None:
            assert streamed["schema"]["properties"]["data"]["contentSchema"], route.path


def test_errors_have_the_shape_of_their_api() -> None:
    def error(path: str) -> str:
        reference = OPERATIONS["post", path]["responses"]["400"]["content"]["application/json"]["schema"]["$ref"]
        return str(reference.rpartition("/")[2])

    assert error("/v1/messages") == error("/v1/messages/count_tokens") == "AnthropicErrorAnswer"
    assert error("/v1/responses") == "ErrorAnswer"


def test_limits_are_in_the_schema() -> None:
    body = DOCUMENT["components"]["schemas"]["ResponsesBody"]
    assert body["additionalProperties"] is False and body["required"] == ["input"]
    (temperature,) = [each for each in body["properties"]["temperature"]["anyOf"] if each["type"] == "number"]
    assert (temperature["minimum"], temperature["maximum"]) == (0.0, 100.0)
    assert body["properties"]["previous_response_id"]["type"] == "null"


def test_the_server_gives_the_document_and_the_page(server: Any) -> None:
    assert server.http.get("/openapi.json").json() == DOCUMENT
    page = server.http.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8" and len(page.content) < 40_000
    policy = dict(each.strip().split(" ", 1) for each in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script", "style"):
        (inside,) = re.findall(rf"<{kind}\b[^>]*>(.*?)</{kind}>".encode(), page.content, re.DOTALL)
        assert policy[f"{kind}-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(inside).digest()).decode()}'"


def test_the_page_loads_nothing_from_elsewhere() -> None:
    html = (files("sidestream.api") / "pages" / "docs.html").read_text()
    assert not re.findall(r"https?://|//cdn|@import|\bimport\s*\(|\bimport\b.*\bfrom\b", html)
    assert set(re.findall(r"""\b(?:src|href)\s*=\s*["']([^"']*)""", html)) <= {"data:,", "openapi.json"}
    assert not re.findall(r"\bon\w+\s*=\s*[\"']|\bstyle\s*=\s*[\"']", html), "the policy allows no scripts or styles in attributes"


def test_a_method_that_a_path_does_not_have_is_told_all_that_it_has(server: Any) -> None:
    for path, methods in DOCUMENT["paths"].items():
        if "{" not in path:
            answer = server.http.delete(path)
            allowed = {each.strip().lower() for each in answer.headers["allow"].split(",")} - {"head"}
            assert (answer.status_code, allowed) == (405, set(methods)), path
