"""Routes for those who run the server: is it alive, is it ready, what does it count."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from starlette.responses import Response

from sidestream.api.errors import RETRY_AFTER
from sidestream.api.route import Call, Route
from sidestream.api.service import report_of
from sidestream.api.sse import json_response


class Alive(msgspec.Struct):
    status: Literal["ok"] = "ok"


class Health(msgspec.Struct):
    status: str  # ok, loading, draining, stalled or failed
    reason: str
    running: int
    waiting: int
    last_step_age_s: float | None


async def live(call: Call[None]) -> Response:
    return json_response(Alive())


async def ready(call: Call[None]) -> Response:
    """503 while it loads, drains, or is stuck: an engine that has work and says nothing is not ready."""
    service = call.service
    state, reason = service.state()
    report: dict[str, Any] = report_of(service.any_engine) if service.loaded else {}
    age = round(service.silent_seconds, 3) if service.loaded and service.open_requests else None
    health = Health(state, reason, report.get("running", 0), report.get("waiting", 0), age)
    return json_response(health) if state == "ok" else json_response(health, 503, {"Retry-After": RETRY_AFTER[503]})


async def metrics(call: Call[None]) -> Response:
    service = call.service
    if service.loaded:
        service.metrics.observe_report(report_of(service.any_engine))
    body, media_type = service.metrics.render(call.request.headers.get("accept"))
    return Response(body, media_type=media_type)


OPERATION = (
    Route("GET", "/health/live", live, "The process answers", answer=Alive, open=True, loaded=False),
    Route(
        "GET",
        "/health/ready",
        ready,
        "It takes requests",
        answer=Health,
        aliases=("/health", "/ready", "/v1/health", "/health_generate", "/ping"),
        open=True,
        loaded=False,
        states={503: Health},
    ),
    Route("GET", "/metrics", metrics, "Counters, for Prometheus", media_type="text/plain", loaded=False),
)
