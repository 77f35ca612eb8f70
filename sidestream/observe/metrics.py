"""`Metrics`: what a server counts, for Prometheus. What there is to count is declared in series.py."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from sidestream.observe.series import CONSTANT_LABELS, SERIES, Compat, Report, Sample, Series

RECENT_SECONDS = 10.0
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
# All our names are legal as they are. Escaped, as for Prometheus 2, the library writes sidestream_ for sidestream: in OpenMetrics.
UNESCAPED = "application/openmetrics-text; version=1.0.0; escaping=allow-utf-8"


class Metrics(Collector):
    """The metrics of one server, with a registry of their own. Used from the thread of the event loop only.

    `compat` exports the series that SGLang or vLLM have under their prefix and names too, beside those under `sidestream:`.
    """

    def __init__(self, model_name: str, *, compat: Compat | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.compat = compat
        self._model_name = model_name
        self._report: Report = {}
        self._recent = _Recent(clock)
        own = [series for series in SERIES if series.read is None]
        self._values = {series.name: dict.fromkeys(series.zeros, 0.0) for series in own if not series.buckets}
        self._histograms = {series.name: _Histogram(series.buckets) for series in own if series.buckets}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def observe_report(self, report: Report) -> None:
        """Take the engine's own counters, as `EngineLoop.stats()` has them. What a report lacks is not exported."""
        self._report = report
        self._recent.add(report)

    # Requests

    def request_received(self) -> None:
        self._add("requests_received_total")

    def first_token(self, seconds: float) -> None:
        """The first token of an output came so long after its request."""
        self._histograms["time_to_first_token_seconds"].add(seconds)

    def token_gap(self, seconds: float, tokens: int = 1) -> None:
        """`tokens` tokens of an output came, `seconds` after the last one before them: each counts with its share.

        The one call per token: a binary search and two additions. Tokens themselves are counted by the engine, once per step.
        """
        if tokens > 0:
            self._histograms["inter_token_latency_seconds"].add(seconds / tokens, tokens)

    def request_finished(
        self,
        reason: str,
        *,
        e2e_seconds: float,
        queue_seconds: float | None,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int,
    ) -> None:
        """A request has its whole answer. Each one received ends here or in `request_aborted`, once."""
        self._add("num_requests_total", reason)
        self._histograms["e2e_request_latency_seconds"].add(e2e_seconds)
        if queue_seconds is not None:
            self._histograms["queue_time_seconds"].add(queue_seconds)
        self._histograms["prompt_tokens_histogram"].add(prompt_tokens)
        self._histograms["uncached_prompt_tokens_histogram"].add(prompt_tokens - cached_tokens)
        self._histograms["generation_tokens_histogram"].add(completion_tokens)

    def request_aborted(self, reason: str) -> None:
        """A request ended without its whole answer. `reason` is one of a few words, never a message: each makes a series."""
        self._add("num_requests_total", "abort")
        self._add("num_aborted_requests_total", reason)

    def http_response(self, route: str, status: int) -> None:
        """An answer was sent. `route` is a path as declared, never one that a client made up."""
        self._add("http_responses_total", route, str(status))

    def started(self, phases: Mapping[str, float]) -> None:
        """The server is ready; each part of its start took so many seconds."""
        for phase, seconds in phases.items():
            self._values["startup_time_seconds"][phase,] = seconds

    def _add(self, name: str, *labels: str) -> None:
        values = self._values[name]
        values[labels] = values.get(labels, 0.0) + 1.0

    # Exporting

    def render(self, accept: str | None = None) -> tuple[bytes, str]:
        """Body and content type: OpenMetrics where the Accept header asks for it, else the Prometheus text format."""
        # Not by the library's own choice: it raises TypeError for a version that is no number, and escapes names (see UNESCAPED).
        accepted = {part.partition(";")[0].strip().lower() for part in (accept or "").split(",")}
        if OPENMETRICS.partition(";")[0] in accepted:
            encode, _ = choose_encoder(UNESCAPED)
            return encode(self.registry), OPENMETRICS
        return generate_latest(self.registry), TEXT

    def collect(self) -> Iterator[Metric]:
        """One family per declared series and prefix. Called by the registry."""
        report = {**self._report, **self._recent.rates()}
        for series in SERIES:
            samples = self._samples(series, report)
            if samples or series.name in self._histograms:
                for prefix, name in series.names(self.compat):
                    yield self._family(series, prefix, name, samples)

    def _samples(self, series: Series, report: Report) -> list[Sample]:
        if series.read is None:
            return list(self._values.get(series.name, {}).items())  # a histogram keeps its own
        try:
            return list(series.read(report))
        except KeyError:  # the report lacks it
            return []

    def _family(self, series: Series, prefix: str, name: str, samples: Sequence[Sample]) -> Metric:
        constant = {"model_name": self._model_name, **CONSTANT_LABELS.get(prefix, {})}
        full_name, labels = f"{prefix}:{name}", (*constant, *series.labels)
        if series.name in self._histograms:
            histogram = HistogramMetricFamily(full_name, series.help, labels=labels)
            histogram.add_metric([*constant.values()], *self._histograms[series.name].cumulative())
            return histogram
        kind = CounterMetricFamily if series.kind == "counter" else GaugeMetricFamily
        family = kind(full_name, series.help, labels=labels)
        for values, number in samples:
            family.add_metric([*constant.values(), *values], number)
        return family


class _Histogram:
    """Counts per bucket. The library's own takes one value per call; several tokens that came together are one call here."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """(upper bound, how many values up to it) for each bucket, and the sum of all values."""
        bounds = map(floatToGoString, (*self._bounds, math.inf))
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True)), self._sum


class _Point(NamedTuple):
    time: float
    generated: float
    prompt: float
    cached: float


class _Recent:
    """The reports of the last seconds, and the rates that follow from them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._points: deque[_Point] = deque()
        self._hit_rate: float | None = None

    def add(self, report: Report) -> None:
        if not report.keys() >= {"generation_tokens", "prompt_tokens", "cached_tokens"}:
            return
        self._points.append(_Point(self._clock(), report["generation_tokens"], report["prompt_tokens"], report["cached_tokens"]))
        self._forget(self._points[-1].time)
        prompt = self._points[-1].prompt - self._points[0].prompt
        if prompt > 0:
            self._hit_rate = (self._points[-1].cached - self._points[0].cached) / prompt
        elif self._hit_rate is None:
            self._hit_rate = 0.0

    def rates(self) -> dict[str, float]:
        """What is derived, as if the engine had reported it. An engine that stopped reporting generates nothing."""
        if self._hit_rate is None:
            return {}
        now = self._clock()
        self._forget(now)
        speed = 0.0
        if self._points and now > self._points[0].time:
            speed = max(0.0, self._points[-1].generated - self._points[0].generated) / (now - self._points[0].time)
        return {"gen_throughput": speed, "cache_hit_rate": self._hit_rate}

    def _forget(self, now: float) -> None:
        while self._points and self._points[0].time < now - RECENT_SECONDS:
            self._points.popleft()
