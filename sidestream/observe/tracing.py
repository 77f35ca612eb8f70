"""Traces: one span per request, sent to an OTLP collector if there is one. Nothing of OpenTelemetry is imported until then."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol
from urllib.parse import urlsplit

from sidestream.errors import ConfigError

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
INSTALL = "pip install 'sidestream[otel]'"
Event = Literal["queued", "prefill", "first_token", "finish"]
Value = str | bool | int | float

# What a span says of a request, by the name of the request's field. OpenTelemetry's conventions for generative AI.
REQUEST_ATTRIBUTES: Mapping[str, str] = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
    "stream": "gen_ai.request.stream",
}


class Span(Protocol):
    """One request. `finish` or `fail` ends it; what comes after that is ignored."""

    def event(self, name: Event, *, at: float | None = None) -> None:
        """The request has come so far. `at` is in seconds since the epoch; None: now."""

    def finish(self, reasons: Sequence[str], *, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> None:
        """The request has its answer: why each output ended, and how many tokens there were."""

    def fail(self, code: str, message: str) -> None:
        """The request ended with an error, or was aborted. `code` is one of a few words."""


class Tracing(Protocol):
    def start(self, operation: str, model: str, *, rid: str, headers: Mapping[str, str], request: Mapping[str, Value | None]) -> Span:
        """Begin the span of a request, as a child of the one that `traceparent` in `headers` (lower case) names.

        `operation` is one of OpenTelemetry's: chat, text_completion, embeddings. Of `request` the fields in REQUEST_ATTRIBUTES are kept.
        """

    def close(self) -> None:
        """Send what is left, for a few seconds at most. Blocks: not for the event loop."""


class NoSpan:
    def event(self, name: Event, *, at: float | None = None) -> None:
        pass

    def finish(self, reasons: Sequence[str], *, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> None:
        pass

    def fail(self, code: str, message: str) -> None:
        pass


class NoTracing:
    """Tracing without a collector: does nothing."""

    def start(self, operation: str, model: str, *, rid: str, headers: Mapping[str, str], request: Mapping[str, Value | None]) -> Span:
        return NO_SPAN

    def close(self) -> None:
        pass


NO_SPAN = NoSpan()


def open_tracing(endpoint: str | None = None, *, environ: Mapping[str, str] = os.environ) -> Tracing:
    """Tracing to `endpoint`, the base URL of a collector that takes OTLP over HTTP, or to where OpenTelemetry's own variables say.

    Raises ConfigError for what is no such URL, and where OpenTelemetry is not installed.
    """
    if endpoint is None and not any(environ.get(name) for name in ENDPOINT_VARIABLES):
        return NoTracing()
    if endpoint is not None:
        _check(endpoint)
    try:
        from sidestream.observe.otlp import OtlpTracing
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        asked = f"otlp_endpoint: got {endpoint}" if endpoint else f"{next(name for name in ENDPOINT_VARIABLES if environ.get(name))} is set"
        raise ConfigError(f"{asked}, but OpenTelemetry is not installed", hint=INSTALL) from error
    return OtlpTracing(endpoint)


def _check(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        usable, port = parts.scheme in ("http", "https") and bool(parts.hostname), parts.port
    except ValueError:
        usable, port = False, None
    if not usable:
        raise ConfigError(f"otlp_endpoint: got {endpoint}, must be a URL such as http://localhost:4318")
    if port == 4317:
        raise ConfigError(
            f"otlp_endpoint: got {endpoint}, but 4317 is the port of OTLP over gRPC",
            hint="Traces are sent over HTTP: give the collector's HTTP port, usually 4318.",
        )
