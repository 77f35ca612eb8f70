"""Probes and metrics."""

from __future__ import annotations

from typing import Any


def test_a_server_that_is_ready_says_so_on_every_probe(server: Any) -> None:
    for path in ("/health", "/health/ready", "/ready", "/ping", "/v1/health", "/health_generate"):
        answer = server.http.get(path)
        assert answer.status_code == 200 and answer.json()["status"] == "ok", path
    assert server.http.get("/health/live").json() == {"status": "ok"}


def test_what_is_not_there_is_an_error_in_the_same_shape(server: Any) -> None:
    answer = server.http.get("/nothing")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found" and "/nothing" in answer.json()["error"]["message"]
    answer = server.http.put("/health")
    assert answer.status_code == 405 and answer.json()["error"]["code"] == "method_not_allowed"
