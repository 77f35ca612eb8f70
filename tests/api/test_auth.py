"""Keys: every route needs one unless it was declared open, and what changes things for others needs the admin's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request

from sidestream.api.app import create_app
from sidestream.api.auth import Keys
from sidestream.api.refusals import Forbidden, InvalidKey
from sidestream.api.routes import ROUTES
from sidestream.api.service import Service

KEYS, ADMIN = ("first-key", "second-key"), "admin-key"
OPEN = {"/", "/health/live", "/health/ready", "/health", "/ready", "/v1/health", "/health_generate", "/ping", "/docs"}


def router_paths() -> list[tuple[str, str]]:
    """Method and path of everything that the application routes, with a value for each parameter."""
    app = create_app(cast(Service, SimpleNamespace(config=SimpleNamespace(cors_origin=()))))
    routes = cast(Any, app.routes)
    return [(method, re.sub(r"{\w+(:\w+)?}", "x", route.path)) for route in routes for method in sorted(route.methods)]


PATHS = router_paths()


@pytest.fixture(scope="module")
def locked(server: Any, chat_model: Path) -> Iterator[Any]:
    """A server with keys."""
    keys = [flag for key in KEYS for flag in ("--api-key", key)]
    made = type(server)(chat_model, "--dtype", "float32", "--kv-tokens", "4096", "--admin-api-key", ADMIN, *keys)
    yield made
    made.stop()
    made.close()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_the_router_has_the_routes_of_the_table() -> None:
    assert {path for _, path in PATHS} >= {"/metrics", "/openapi.json", "/v1/responses", "/v1/messages"}
    assert {pair for pair in PATHS if pair[0] != "HEAD"} == {
        (route.method, re.sub(r"{\w+(:\w+)?}", "x", path)) for route in ROUTES for path in (route.path, *route.aliases)
    }


def test_without_a_key_only_open_routes_answer(locked: Any) -> None:
    assert {path for route in ROUTES if route.open for path in (route.path, *route.aliases)} == OPEN
    for method, path in PATHS:
        answer = locked.http.request(method, path)
        if path in OPEN:
            assert answer.status_code == 200, path
            continue
        assert answer.status_code == 401, (method, path)
        if method != "HEAD":
            error = answer.json()["error"]
            assert error["type"] == "authentication_error" and "needs an API key" in error["message"], path


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "PUT", "DELETE"])
def test_what_no_route_has_is_closed_too(locked: Any, method: str) -> None:
    for path in ("/nothing", "/v1", "/v1/responses/", "/docs/", "/docs/x", "//metrics", "/health/../metrics", "/HEALTH", "/%2e%2e/metrics"):
        assert locked.http.request(method, locked.url + path).status_code == 401, path


@pytest.mark.parametrize("headers", [{"Authorization": f"Bearer {key}"} for key in (*KEYS, ADMIN)] + [{"x-api-key": KEYS[1]}])
def test_any_of_the_keys_opens_every_route(locked: Any, headers: dict[str, str]) -> None:
    for method, path in PATHS:
        if method != "POST":
            assert locked.http.request(method, path, headers=headers).status_code not in (401, 500), path
    assert locked.http.post("/v1/responses", json={"input": "x", "max_output_tokens": 1}, headers=headers).status_code == 200


@pytest.mark.parametrize("value", ["Bearer wrong", "Bearer", "Basic first-key", "first-key", "Bearer first-keyx", "Bearer first-ke"])
def test_a_wrong_key_is_refused(locked: Any, value: str) -> None:
    answer = locked.http.get("/openapi.json", headers={"Authorization": value})
    assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    for key in KEYS:
        assert key not in answer.text


def test_admin_routes_need_the_admin_key(locked: Any) -> None:
    admin = [(route.method, path) for route in ROUTES if route.admin for path in (route.path, *route.aliases)]
    for method, path in admin:
        for key in KEYS:
            answer = locked.http.request(method, path, headers=bearer(key), json={} if method == "POST" else None)
            assert answer.status_code == 403 and answer.json()["error"]["code"] == "forbidden", path
        assert locked.http.request(method, path, headers=bearer(ADMIN), json={} if method == "POST" else None).status_code != 403, path


def test_cors_is_off_unless_an_origin_was_named(locked: Any, serve: Any) -> None:
    origin = {"Origin": "https://page.example"}
    preflight = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for server, allowed in ((locked, False), (serve("--cors-origin", "https://page.example", "--api-key", KEYS[0]), True)):
        asked = server.http.options("/v1/responses", headers=preflight)
        answer = server.http.get("/openapi.json", headers={**origin, **bearer(KEYS[0])})
        assert answer.status_code == 200 and asked.status_code == (200 if allowed else 401)
        for each in (asked, answer):
            assert each.headers.get("access-control-allow-origin") == ("https://page.example" if allowed else None)
    other = server.http.get("/openapi.json", headers={"Origin": "https://other.example", **bearer(KEYS[0])})
    assert "access-control-allow-origin" not in other.headers


def request_from(host: str | None, key: str | None = None) -> Request:
    headers = [] if key is None else [(b"x-api-key", key.encode())]
    return Request({"type": "http", "headers": headers, "client": None if host is None else (host, 1)})


def test_without_an_admin_key_the_own_machine_is_the_admin() -> None:
    keys = Keys(["key"], None)
    for host in ("127.0.0.1", "127.8.9.10", "::1", None):
        keys.check(request_from(host, "key"), admin=True)
    for host in ("10.0.0.1", "192.168.1.5", "2001:db8::1", "0.0.0.0"):
        with pytest.raises(Forbidden):
            keys.check(request_from(host, "key"), admin=True)
    with pytest.raises(InvalidKey):
        keys.check(request_from("127.0.0.1"), admin=True)


def test_an_admin_key_alone_leaves_the_other_routes_open() -> None:
    keys = Keys([], "admin")
    keys.check(request_from("10.0.0.1"), admin=False)
    keys.check(request_from("10.0.0.1", "admin"), admin=True)
    with pytest.raises(Forbidden):
        keys.check(request_from("127.0.0.1"), admin=True)
