"""Every metric of a server, declared once: name, type, meaning, labels, buckets, where its value comes from, its names in other engines.

`Metrics` exports what is declared here, docs/metrics.md is written from it. Names are SGLang's where SGLang has the metric, so that what
people know keeps its name; sizes and counts are in tokens, times in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

PREFIX = "sidestream"
Compat = Literal["sglang", "vllm"]
Report = Mapping[str, Any]  # the engine's own counters: `EngineLoop.stats()`
Sample = tuple[tuple[str, ...], float]  # values of the labels, value
Read = Callable[[Report], Iterable[Sample]]

# What every series of an engine carries besides `model_name`: people's queries group by it.
CONSTANT_LABELS: Mapping[str, Mapping[str, str]] = {"vllm": {"engine": "0"}}

# Finer below a tenth of a second than SGLang's buckets: a small model on a laptop answers there.
FIRST_TOKEN_SECONDS = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8),
    *(1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0),
)
TOKEN_GAP_SECONDS = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8),
    *(1.0, 2.0, 4.0, 8.0),
)
REQUEST_SECONDS = (
    *(0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0),
    *(100.0, 200.0, 400.0, 600.0, 1200.0, 2400.0),
)
QUEUE_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKENS = tuple(float(2**power) for power in range(18))


@dataclass(frozen=True)
class Series:
    """One metric, without its prefix. With `read` its samples come from the engine's report, else from events of the API process."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    start: tuple[tuple[str, ...], ...] = ()  # known values of the labels: exported as 0 from the beginning
    buckets: tuple[float, ...] = ()
    read: Read | None = None  # raises KeyError where the report lacks what it needs: the metric is absent then
    sglang: bool = False  # SGLang has it, under the same name
    vllm: tuple[str, ...] = ()  # its names there

    @property
    def zeros(self) -> tuple[tuple[str, ...], ...]:
        """The values of the labels that exist before anything was counted."""
        return self.start if self.labels else ((),)

    def names(self, compat: Compat | None = None) -> list[tuple[str, str]]:
        """(prefix, name) of each series that is exported."""
        names = [(PREFIX, self.name)]
        if compat == "sglang" and self.sglang:
            names.append((compat, self.name))
        if compat == "vllm":
            names += [(compat, name) for name in self.vllm]
        return names


def evictable_tokens(report: Report) -> float:
    """Tokens in the prefix cache that may make room; cached ones in use count too where the report does not tell them apart."""
    return float(report["kv_tokens_evictable"] if "kv_tokens_evictable" in report else report["kv_tokens_cached"])


def used_tokens(report: Report) -> float:
    """Tokens of the KV cache that requests hold: neither free nor evictable."""
    return float(report["kv_tokens_total"] - report["kv_tokens_free"] - evictable_tokens(report))


def usage(report: Report) -> float:
    """The share of the KV cache that requests hold, 0 to 1."""
    total = report["kv_tokens_total"]
    return used_tokens(report) / total if total else 0.0


def _of(value: Callable[[Report], float]) -> Read:
    return lambda report: [((), value(report))]


def _at(*path: str) -> Read:
    def read(report: Report) -> list[Sample]:
        value: Any = report
        for key in path:
            value = value[key]
        return [((), value)]

    return read


def _each(key: str) -> Read:
    return lambda report: [((name,), value) for name, value in report[key].items()]


def _copies(field: str) -> Read:
    return lambda report: [((kind,), counts[field]) for kind, counts in report["d2h"].items() if isinstance(counts, Mapping)]


def _cache_config(report: Report) -> list[Sample]:
    size = report["page_size"]
    return [((str(size), str(report["kv_tokens_total"] // size)), 1.0)]


SERIES: tuple[Series, ...] = (
    # The state of the engine
    Series(
        "num_running_reqs",
        "gauge",
        "Requests that are being computed, each of a request's n outputs for itself.",
        read=_at("running"),
        sglang=True,
        vllm=("num_requests_running",),
    ),
    Series(
        "num_queue_reqs",
        "gauge",
        "Requests that wait to be computed.",
        read=_at("waiting"),
        sglang=True,
        vllm=("num_requests_waiting",),
    ),
    Series(
        "token_usage",
        "gauge",
        "Share of the KV cache that requests hold, 0 to 1. What is only cached counts as free.",
        read=_of(usage),
        sglang=True,
        vllm=("kv_cache_usage_perc",),
    ),
    Series("num_used_tokens", "gauge", "Tokens of the KV cache that requests hold.", read=_of(used_tokens), sglang=True),
    Series("kv_available_tokens", "gauge", "Tokens of the KV cache that are free.", read=_at("kv_tokens_free"), sglang=True),
    Series(
        "kv_evictable_tokens",
        "gauge",
        "Tokens of the KV cache that hold prefixes for later and make room when it is needed.",
        read=_of(evictable_tokens),
        sglang=True,
    ),
    Series("max_total_num_tokens", "gauge", "Size of the KV cache in tokens.", read=_at("kv_tokens_total"), sglang=True),
    Series("page_size", "gauge", "Tokens per page of the KV cache.", read=_at("page_size"), sglang=True),
    Series(
        "num_pages",
        "gauge",
        "Pages of the KV cache.",
        read=_of(lambda report: report["kv_tokens_total"] // report["page_size"]),
        sglang=True,
    ),
    Series(
        "cache_config_info",
        "gauge",
        "Always 1; the labels say how the KV cache is divided.",
        labels=("block_size", "num_gpu_blocks"),
        read=_cache_config,
        vllm=("cache_config_info",),
    ),
    Series("gen_throughput", "gauge", "Tokens generated per second, over the last 10 seconds.", read=_at("gen_throughput"), sglang=True),
    Series(
        "cache_hit_rate",
        "gauge",
        "Share of prompt tokens that came from the prefix cache, over the last 10 seconds that had any.",
        read=_at("cache_hit_rate"),
        sglang=True,
    ),
    # What the engine has done
    Series(
        "prompt_tokens_total",
        "counter",
        "Prompt tokens of requests that were admitted, cached ones among them.",
        read=_at("prompt_tokens"),
        sglang=True,
        vllm=("prompt_tokens_total", "prefix_cache_queries_total"),
    ),
    Series(
        "cached_tokens_total",
        "counter",
        "Prompt tokens that came from the prefix cache.",
        read=_at("cached_tokens"),
        sglang=True,
        vllm=("prefix_cache_hits_total",),
    ),
    Series(
        "generation_tokens_total",
        "counter",
        "Tokens generated.",
        read=_at("generation_tokens"),
        sglang=True,
        vllm=("generation_tokens_total",),
    ),
    Series(
        "num_retracted_requests_total",
        "counter",
        "Times that a running request gave its memory back and had to catch up.",
        read=_at("retracted"),
        sglang=True,
        vllm=("num_preemptions_total",),
    ),
    Series(
        "aborted_outputs_total", "counter", "Outputs that the engine ended early, each of a request's n for itself.", read=_at("aborted")
    ),
    Series("steps_total", "counter", "Steps of the engine.", read=_at("steps")),
    Series(
        "forward_tokens_total", "counter", "Positions computed: prompt tokens and one for each token generated.", read=_at("forward_tokens")
    ),
    Series(
        "step_seconds_total",
        "counter",
        "Host time of the steps: planning, launching, processing results, filling masks of grammars.",
        labels=("phase",),
        read=_each("step_seconds"),
    ),
    Series(
        "d2h_bytes_total",
        "counter",
        "Bytes copied from the device to the host.",
        labels=("output",),
        read=_copies("copied_bytes"),
    ),
    Series(
        "d2h_skipped_bytes_total",
        "counter",
        "Bytes that nobody asked for and that therefore were not copied.",
        labels=("output",),
        read=_copies("skipped_bytes"),
    ),
    Series(
        "d2h_discarded_bytes_total",
        "counter",
        "Bytes copied for a request that had ended when they arrived.",
        labels=("output",),
        read=_copies("discarded_bytes"),
    ),
    Series("d2h_issue_seconds_total", "counter", "Host time to issue the copies.", read=_at("d2h", "issue_seconds")),
    Series("d2h_wait_seconds_total", "counter", "Host time spent waiting for copies to arrive.", read=_at("d2h", "wait_seconds")),
    # What the API process sees
    Series("requests_received_total", "counter", "Requests that were well formed and handed to the engine."),
    Series(
        "num_requests_total",
        "counter",
        "Requests that have ended, with whatever result.",
        labels=("finished_reason",),
        start=(("stop",), ("length",), ("abort",)),
        sglang=True,
        vllm=("request_success_total",),
    ),
    Series(
        "num_aborted_requests_total",
        "counter",
        "Requests that ended without their whole answer, by what ended them.",
        labels=("reason",),
        sglang=True,
    ),
    Series("http_responses_total", "counter", "HTTP answers, by route and status.", labels=("route", "status")),
    Series(
        "time_to_first_token_seconds",
        "histogram",
        "From the arrival of a request to its first token.",
        buckets=FIRST_TOKEN_SECONDS,
        sglang=True,
        vllm=("time_to_first_token_seconds",),
    ),
    Series(
        "inter_token_latency_seconds",
        "histogram",
        "Between a token and the next one of the same output.",
        buckets=TOKEN_GAP_SECONDS,
        sglang=True,
        vllm=("inter_token_latency_seconds",),
    ),
    Series(
        "e2e_request_latency_seconds",
        "histogram",
        "From the arrival of a request to the end of its answer.",
        buckets=REQUEST_SECONDS,
        sglang=True,
        vllm=("e2e_request_latency_seconds",),
    ),
    Series(
        "queue_time_seconds",
        "histogram",
        "From the arrival of a request to its first step.",
        buckets=QUEUE_SECONDS,
        sglang=True,
        vllm=("request_queue_time_seconds",),
    ),
    Series(
        "prompt_tokens_histogram",
        "histogram",
        "Prompt tokens per request.",
        buckets=TOKENS,
        sglang=True,
        vllm=("request_prompt_tokens",),
    ),
    Series(
        "uncached_prompt_tokens_histogram", "histogram", "Prompt tokens per request that had to be computed.", buckets=TOKENS, sglang=True
    ),
    Series(
        "generation_tokens_histogram",
        "histogram",
        "Tokens generated per request.",
        buckets=TOKENS,
        sglang=True,
        vllm=("request_generation_tokens",),
    ),
    Series("startup_time_seconds", "gauge", "How long each part of the start took.", labels=("phase",), sglang=True),
)


def metrics_table() -> str:
    """A Markdown table of all metrics."""
    rows = [("metric", "type", "labels", "meaning", "in SGLang", "in vLLM"), ("---",) * 6]
    for series in SERIES:
        labels = ", ".join(f"`{label}`" for label in series.labels)
        elsewhere = "same" if series.sglang else ""
        rows.append((f"`{series.name}`", series.kind, labels, series.help, elsewhere, ", ".join(f"`{name}`" for name in series.vllm)))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
