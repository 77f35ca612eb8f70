"""Spans as a collector gets them, and a server that does not notice whether there is one."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from sidestream.errors import ConfigError
from sidestream.observe import otlp
from sidestream.observe.otlp import OtlpTracing
from sidestream.observe.tracing import REQUEST_ATTRIBUTES, NoTracing, open_tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """A collector on this machine. It answers when `answering` is set."""

    def __init__(self) -> None:
        self.answering = threading.Event()
        self.answering.set()
        self.status = 200
        self.asked = threading.Event()
        self.requests: list[tuple[str, ExportTraceServiceRequest]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.asked.set()
                collector.answering.wait(30)
                collector.requests.append((self.path, ExportTraceServiceRequest.FromString(body)))
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self.answering.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for long, and none sees what the machine's environment says."""
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


def answer(tracing, *, headers=None, request=None, rid="r1"):
    span = tracing.start("chat", "smollm2", rid=rid, headers=headers or {}, request=request or {})
    span.event("queued")
    span.event("prefill", at=1700000000.5)
    span.event("first_token")
    span.finish(["stop", "length"], prompt_tokens=11, completion_tokens=5, cached_tokens=4)
    return span


def test_a_request_is_one_span():
    exporter = InMemorySpanExporter()
    tracing = OtlpTracing(None, exporter)
    request = {"max_tokens": 5, "temperature": 0.0, "top_p": None, "stream": True, "messages": "secret"}
    answer(tracing, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"}, request=request)
    tracing.close()
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.kind) == ("chat smollm2", trace.SpanKind.SERVER)
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
    assert [event.name for event in span.events] == ["queued", "prefill", "first_token", "finish"]
    assert span.events[1].timestamp == 1700000000_500000000
    assert dict(span.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "sidestream",
        "gen_ai.request.model": "smollm2",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.stream": True,
        "gen_ai.response.id": "r1",
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "gen_ai.usage.input_tokens": 11,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 4,
    }
    assert span.status.is_ok
    assert span.resource.attributes["service.name"] == "sidestream"


def test_attributes_are_those_of_the_conventions():
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    assert set(REQUEST_ATTRIBUTES.values()) <= known
    exporter = InMemorySpanExporter()
    tracing = OtlpTracing(None, exporter)
    answer(tracing)
    tracing.close()
    assert set(exporter.get_finished_spans()[0].attributes) <= known


def test_a_failed_request_says_why_and_ends_once():
    exporter = InMemorySpanExporter()
    tracing = OtlpTracing(None, exporter)
    span = tracing.start("chat", "smollm2", rid="r1", headers={}, request={})
    span.fail("queue_full", "the queue holds 512 requests")
    span.event("first_token")
    span.finish(["stop"], prompt_tokens=1, completion_tokens=1, cached_tokens=0)
    span.fail("again", "")
    tracing.close()
    (ended,) = exporter.get_finished_spans()
    assert ended.status.status_code is trace.StatusCode.ERROR
    assert ended.status.description == "the queue holds 512 requests"
    assert ended.attributes["error.type"] == "queue_full"
    assert [event.name for event in ended.events] == ["finish"]
    assert "gen_ai.usage.input_tokens" not in ended.attributes


@pytest.mark.parametrize("header", ["", "nonsense", f"00-{TRACE}-{'0' * 16}-01", "00-" + "z" * 32 + f"-{PARENT}-01"])
def test_what_is_no_parent_is_ignored(header):
    exporter = InMemorySpanExporter()
    tracing = OtlpTracing(None, exporter)
    answer(tracing, headers={"traceparent": header})
    tracing.close()
    assert exporter.get_finished_spans()[0].parent is None


def test_a_parent_that_is_not_sampled_is_followed():
    exporter = InMemorySpanExporter()
    tracing = OtlpTracing(None, exporter)
    answer(tracing, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    tracing.close()
    assert exporter.get_finished_spans() == ()


def test_the_service_is_named_by_the_environment(monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "blue")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    exporter = InMemorySpanExporter()
    tracing = OtlpTracing(None, exporter)
    answer(tracing)
    tracing.close()
    attributes = exporter.get_finished_spans()[0].resource.attributes
    assert (attributes["service.name"], attributes["deployment.environment.name"]) == ("blue", "test")


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
def test_spans_reach_the_collector(collector, path):
    tracing = open_tracing(collector.url + path, environ={})
    answer(tracing)
    tracing.close()
    ((asked, request),) = collector.requests
    assert asked == "/v1/traces"
    assert [span.name for span in request.resource_spans[0].scope_spans[0].spans] == ["chat smollm2"]


def test_the_environment_names_the_collector(collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    tracing = open_tracing(None)
    answer(tracing)
    tracing.close()
    assert [path for path, _ in collector.requests] == ["/v1/traces"]


def test_a_collector_that_hangs_holds_nobody_up(collector, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    monkeypatch.setattr(otlp, "CLOSE_SECONDS", 0.1)
    collector.answering.clear()
    tracing = open_tracing(collector.url, environ={})
    answer(tracing)
    assert collector.asked.wait(30)
    for _ in range(100):  # more than the queue holds
        answer(tracing)
    tracing.close()
    assert collector.requests == []


def test_an_outage_is_told_once(collector, caplog):
    caplog.set_level(logging.INFO, "sidestream")
    exporter = otlp._Announcing(otlp.OTLPSpanExporter(endpoint=collector.url))
    for status in (200, 400, 400, 200, 200, 400):
        collector.status = status
        exporter.export([])
    exporter.shutdown()
    # Of this thread: the exporter of a test before may still be telling of its own collector, from a thread in the background.
    here = [record for record in caplog.records if record.name == "sidestream" and record.thread == threading.get_ident()]
    assert [record.levelname for record in here] == ["WARNING", "INFO", "WARNING"]


def test_nothing_of_it_is_global(collector):
    before = trace.get_tracer_provider(), list(logging.getLogger("opentelemetry").handlers)
    tracing = open_tracing(collector.url, environ={})
    answer(tracing)
    assert trace.get_current_span() is trace.INVALID_SPAN
    tracing.close()
    assert (trace.get_tracer_provider(), logging.getLogger("opentelemetry").handlers) == before


def test_without_a_collector_nothing_is_imported():
    code = """
import sys
from sidestream.observe.tracing import open_tracing
tracing = open_tracing(None, environ={"OTEL_EXPORTER_OTLP_ENDPOINT": ""})
span = tracing.start("chat", "m", rid="r", headers={}, request={})
span.event("queued"); span.finish([], prompt_tokens=0, completion_tokens=0, cached_tokens=0); span.fail("x", "y"); tracing.close()
print([name for name in sys.modules if name.partition(".")[0] in ("opentelemetry", "requests", "torch")])
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert finished.stdout == "[]\n"
    assert isinstance(open_tracing(None, environ={}), NoTracing)


@pytest.mark.parametrize(
    ("endpoint", "environ", "subject"),
    [
        ("http://localhost:4318", {}, "otlp_endpoint: got http://localhost:4318"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT is set"),
    ],
)
def test_without_the_extra_the_error_says_how_to_install_it(endpoint, environ, subject, monkeypatch):
    monkeypatch.delitem(sys.modules, "sidestream.observe.otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError) as raised:
        open_tracing(endpoint, environ=environ)
    assert str(raised.value) == f"{subject}, but OpenTelemetry is not installed\npip install 'sidestream[otel]'"


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4318", "http://", "", "http://localhost:4317", "http://h:port"])
def test_what_is_no_collector_is_refused(endpoint):
    with pytest.raises(ConfigError, match=f"^otlp_endpoint: got {endpoint}, "):
        open_tracing(endpoint, environ={})
