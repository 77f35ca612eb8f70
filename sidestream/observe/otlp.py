"""`OtlpTracing`: spans by OpenTelemetry's SDK. Only `open_tracing` imports this module: OpenTelemetry is an extra."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sidestream import __version__
from sidestream.observe.tracing import REQUEST_ATTRIBUTES, Event, Value

log = logging.getLogger("sidestream")

TRACES_PATH = "/v1/traces"
CLOSE_SECONDS = 3.0


class OtlpTracing:
    """Sends spans in batches from a thread of its own. When the collector is away they are dropped, and the log says so once.

    Nothing here is global: OpenTelemetry's own provider, propagator and context stay as the process has set them.
    """

    def __init__(self, endpoint: str | None, exporter: SpanExporter | None = None) -> None:
        """`endpoint` is the collector's base URL; None: what OpenTelemetry's variables say, which also set the service's name."""
        exporter = exporter or OTLPSpanExporter(endpoint=None if endpoint is None else _traces_url(endpoint))
        defaults = Resource({SERVICE_NAME: "sidestream", SERVICE_VERSION: __version__})
        # Spans still waiting at the end are sent by `close`, within its time, and not by an exit handler, which may wait for long.
        self._provider = TracerProvider(
            resource=Resource.create().merge(defaults).merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(_Announcing(exporter)))
        self._tracer = self._provider.get_tracer("sidestream", __version__)
        self._propagator = TraceContextTextMapPropagator()
        # A collector that is away is one line in our log. Without any handler Python would print every attempt on standard error.
        self._silence = logging.NullHandler()
        logging.getLogger("opentelemetry").addHandler(self._silence)

    def start(self, operation: str, model: str, *, rid: str, headers: Mapping[str, str], request: Mapping[str, Value | None]) -> OtlpSpan:
        attributes: dict[str, Value] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "sidestream",
            "gen_ai.request.model": model,
            "gen_ai.response.id": rid,
        }
        for field, name in REQUEST_ATTRIBUTES.items():
            value = request.get(field)
            if value is not None:
                attributes[name] = value
        return OtlpSpan(
            self._tracer.start_span(
                f"{operation} {model}",
                context=self._propagator.extract(headers),
                kind=trace.SpanKind.SERVER,
                attributes=attributes,
            )
        )

    def close(self) -> None:
        # In a thread that nobody waits for any longer: the SDK may try a collector that is away for half a minute.
        closing = threading.Thread(target=self._provider.shutdown, name="sidestream-traces", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        logging.getLogger("opentelemetry").removeHandler(self._silence)


class OtlpSpan:
    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def event(self, name: Event, *, at: float | None = None) -> None:
        if self._span.is_recording():  # not sampled, or ended
            self._span.add_event(name, timestamp=None if at is None else int(at * 1e9))

    def finish(self, reasons: Sequence[str], *, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> None:
        if not self._span.is_recording():
            return
        self._span.set_attributes(
            {
                "gen_ai.response.finish_reasons": list(reasons),
                "gen_ai.usage.input_tokens": prompt_tokens,
                "gen_ai.usage.output_tokens": completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": cached_tokens,
            }
        )
        self.event("finish")
        self._span.end()

    def fail(self, code: str, message: str) -> None:
        if not self._span.is_recording():
            return
        self._span.set_attribute("error.type", code)
        self._span.set_status(trace.Status(trace.StatusCode.ERROR, message))
        self.event("finish")
        self._span.end()


class _Announcing(SpanExporter):
    """Says once when the collector stops taking spans, and once when it takes them again."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._away = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        away = result is not SpanExportResult.SUCCESS
        if away and not self._away:
            log.warning("traces: the collector takes no spans; they are dropped until it does")
        elif self._away and not away:
            log.info("traces: the collector takes spans again")
        self._away = away
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _traces_url(endpoint: str) -> str:
    base = endpoint.rstrip("/")
    return base if base.endswith(TRACES_PATH) else base + TRACES_PATH
