"""What is exported, with which values."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from sidestream import Engine, SamplingParams
from sidestream.observe.metrics import Metrics
from sidestream.observe.series import SERIES

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
TEXT = "text/plain; version=0.0.4; charset=utf-8"


@pytest.fixture
def metrics(clock) -> Metrics:
    return Metrics("tiny", clock=clock)


def value(metrics: Metrics, name: str, prefix: str = "sidestream", **labels: str) -> float | None:
    constant = {"engine": "0"} if prefix == "vllm" else {}
    return metrics.registry.get_sample_value(f"{prefix}:{name}", {"model_name": "tiny", **constant, **labels})


def finish(metrics: Metrics, reason: str = "stop") -> None:
    metrics.request_finished(reason, e2e_seconds=1.5, queue_seconds=0.25, prompt_tokens=100, completion_tokens=7, cached_tokens=40)


def use_everything(metrics: Metrics) -> None:
    metrics.started({"load": 0.5})
    metrics.request_received()
    metrics.first_token(0.05)
    metrics.token_gap(0.01)
    finish(metrics)
    metrics.request_aborted("disconnect")
    metrics.http_response("/v1/models", 200)


def test_a_report_is_exported(metrics, report):
    metrics.observe_report(report)
    expected = {
        "num_running_reqs": 4,
        "num_queue_reqs": 2,
        "token_usage": 0.125,
        "num_used_tokens": 200,
        "kv_available_tokens": 1000,
        "kv_evictable_tokens": 400,
        "max_total_num_tokens": 1600,
        "page_size": 16,
        "num_pages": 100,
        "prompt_tokens_total": 100,
        "cached_tokens_total": 40,
        "generation_tokens_total": 100,
        "num_retracted_requests_total": 1,
        "aborted_outputs_total": 3,
        "steps_total": 30,
        "forward_tokens_total": 160,
        "d2h_issue_seconds_total": 0.25,
        "d2h_wait_seconds_total": 0.5,
    }
    assert {name: value(metrics, name) for name in expected} == expected
    assert value(metrics, "cache_config_info", block_size="16", num_gpu_blocks="100") == 1
    assert [value(metrics, "step_seconds_total", phase=phase) for phase in ("plan", "launch", "process")] == [0.125, 0.5, 0.25]
    for name, values in {"d2h_bytes": (400, 80, 0), "d2h_skipped_bytes": (0, 320, 115200), "d2h_discarded_bytes": (4, 0, 0)}.items():
        assert tuple(value(metrics, f"{name}_total", output=output) for output in ("token", "logprob", "hidden")) == values


def test_the_latest_report_counts(metrics, report):
    metrics.observe_report(report)
    metrics.observe_report({**report, "running": 0, "steps": 31})
    assert (value(metrics, "num_running_reqs"), value(metrics, "steps_total")) == (0, 31)


def test_what_a_report_lacks_is_absent(metrics, report):
    names = {name.removeprefix("sidestream:") for name in _names(metrics)}
    assert names.isdisjoint(series.name for series in SERIES if series.read)
    for key in ("prompt_tokens", "page_size", "step_seconds"):
        del report[key]
    metrics.observe_report(report)
    for name in ("prompt_tokens_total", "page_size", "num_pages", "gen_throughput", "cache_hit_rate"):
        assert value(metrics, name) is None
    assert value(metrics, "step_seconds_total", phase="plan") is None
    assert value(metrics, "generation_tokens_total") == 100


def test_an_engine_can_be_observed(default_model: Path):
    metrics = Metrics("tiny")
    with Engine("smollm2", kv_tokens=256) as engine:
        engine.generate("Hello", SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True))
        metrics.observe_report(engine.stats())
    assert value(metrics, "d2h_bytes_total", output="token") == 16
    assert value(metrics, "d2h_bytes_total", output="hidden") == 0
    assert value(metrics, "d2h_skipped_bytes_total", output="hidden") > 0
    assert value(metrics, "num_running_reqs") == 0
    assert value(metrics, "max_total_num_tokens") == 256
    assert value(metrics, "token_usage") == 0


def test_requests_are_counted_once_each(metrics):
    for _ in range(4):
        metrics.request_received()
    finish(metrics, "stop")
    finish(metrics, "length")
    metrics.request_aborted("disconnect")
    assert value(metrics, "requests_received_total") == 4
    ended = {reason: value(metrics, "num_requests_total", finished_reason=reason) for reason in ("stop", "length", "abort")}
    assert ended == {"stop": 1, "length": 1, "abort": 1}
    assert value(metrics, "num_aborted_requests_total", reason="disconnect") == 1


def test_times_and_sizes_of_requests(metrics):
    metrics.first_token(0.07)
    finish(metrics)
    metrics.request_finished("stop", e2e_seconds=3000.0, queue_seconds=None, prompt_tokens=64, completion_tokens=0, cached_tokens=0)
    assert value(metrics, "time_to_first_token_seconds_bucket", le="0.06") == 0
    assert value(metrics, "time_to_first_token_seconds_bucket", le="0.08") == 1
    assert value(metrics, "e2e_request_latency_seconds_bucket", le="2.0") == 1
    assert value(metrics, "e2e_request_latency_seconds_bucket", le="2400.0") == 1
    assert value(metrics, "e2e_request_latency_seconds_bucket", le="+Inf") == 2
    assert value(metrics, "e2e_request_latency_seconds_sum") == 3001.5
    assert value(metrics, "queue_time_seconds_count") == 1
    assert value(metrics, "prompt_tokens_histogram_sum") == 164
    assert value(metrics, "prompt_tokens_histogram_bucket", le="64.0") == 1  # an upper bound belongs to its bucket
    assert value(metrics, "uncached_prompt_tokens_histogram_sum") == 60 + 64
    assert value(metrics, "generation_tokens_histogram_sum") == 7


def test_tokens_that_came_together_share_their_gap(metrics):
    metrics.token_gap(0.5, tokens=4)
    metrics.token_gap(0.03)
    metrics.token_gap(0.1, tokens=0)
    assert value(metrics, "inter_token_latency_seconds_count") == 5
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.53)
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.03") == 1
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.2") == 5


def test_answers_and_the_start(metrics):
    metrics.http_response("/generate", 200)
    metrics.http_response("/generate", 200)
    metrics.http_response("/generate", 503)
    metrics.started({"load": 1.25, "total": 2.5})
    assert value(metrics, "http_responses_total", route="/generate", status="200") == 2
    assert value(metrics, "http_responses_total", route="/generate", status="503") == 1
    assert value(metrics, "startup_time_seconds", phase="load") == 1.25


def test_the_throughput_is_that_of_the_last_ten_seconds(metrics, report, clock):
    report["generation_tokens"] = 0
    for second in range(21):
        clock.now = 1000.0 + second
        report["generation_tokens"] += 50 if second <= 10 else 200
        metrics.observe_report(dict(report))
    assert value(metrics, "gen_throughput") == 200
    clock.now += 5  # no report any more: five seconds with, five without tokens
    assert value(metrics, "gen_throughput") == 100
    clock.now += 6
    assert value(metrics, "gen_throughput") == 0


def test_a_new_engine_does_not_count_backwards(metrics, report, clock):
    metrics.observe_report({**report, "generation_tokens": 5000})
    clock.now += 1
    metrics.observe_report({**report, "generation_tokens": 10})
    assert value(metrics, "gen_throughput") == 0


def test_the_hit_rate_is_that_of_the_last_prompts(metrics, report, clock):
    metrics.observe_report({**report, "prompt_tokens": 0, "cached_tokens": 0})
    assert value(metrics, "cache_hit_rate") == 0
    clock.now += 1
    metrics.observe_report({**report, "prompt_tokens": 100, "cached_tokens": 80})
    assert value(metrics, "cache_hit_rate") == 0.8
    clock.now += 60
    assert value(metrics, "cache_hit_rate") == 0.8
    metrics.observe_report({**report, "prompt_tokens": 100, "cached_tokens": 80})
    clock.now += 1
    metrics.observe_report({**report, "prompt_tokens": 200, "cached_tokens": 130})
    assert value(metrics, "cache_hit_rate") == 0.5


def _names(metrics: Metrics) -> set[str]:
    return {sample.name for family in metrics.registry.collect() for sample in family.samples}


def test_every_metric_is_exported_when_everything_was_used(metrics, report):
    metrics.observe_report(report)
    use_everything(metrics)
    suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
    assert _names(metrics) == {f"sidestream:{series.name}{suffix}" for series in SERIES for suffix in suffixes[series.kind]}


@pytest.mark.parametrize("compat", ["sglang", "vllm"])
def test_other_engines_names_are_exported_beside_ours(compat, clock, report):
    plain, both = Metrics("tiny", clock=clock), Metrics("tiny", compat=compat, clock=clock)
    for metrics in (plain, both):
        metrics.observe_report(report)
        use_everything(metrics)
    assert _names(both) > _names(plain)
    theirs = {name for name in _names(both) if not name.startswith("sidestream:")}
    assert theirs and all(name.startswith(f"{compat}:") for name in theirs)
    for series in SERIES:
        for prefix, name in series.names(compat)[1:]:
            name = f"{name}_sum" if series.buckets else name
            ours = f"{series.name}_sum" if series.buckets else series.name
            for labels in [
                sample.labels for family in both.registry.collect() for sample in family.samples if sample.name == f"{prefix}:{name}"
            ]:
                labels = {key: text for key, text in labels.items() if key not in ("model_name", "engine")}
                assert value(both, name, prefix, **labels) == value(both, ours, **labels) is not None


def test_the_names_that_the_endpoint_picker_and_keda_read(clock, report):
    vllm, sglang = Metrics("tiny", compat="vllm", clock=clock), Metrics("tiny", compat="sglang", clock=clock)
    for metrics in (vllm, sglang):
        metrics.observe_report(report)
    assert [value(vllm, name, "vllm") for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")] == [2, 4, 0.125]
    assert value(vllm, "cache_config_info", "vllm", block_size="16", num_gpu_blocks="100") == 1
    assert [value(sglang, name, "sglang") for name in ("num_queue_reqs", "num_running_reqs", "token_usage")] == [2, 4, 0.125]
    finish(vllm, "length")
    assert value(vllm, "request_success_total", "vllm", finished_reason="length") == 1


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (None, TEXT),
        ("text/html", TEXT),
        ("text/plain;version=0.0.4;q=0.5,*/*;q=0.1", TEXT),
        ("text/plain;version=1.0.0;escaping=underscores", TEXT),
        ("application/openmetrics-text", OPENMETRICS),
        (
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,*/*;q=0.1",
            OPENMETRICS,
        ),  # Prometheus 2
        (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;q=0.4",
            OPENMETRICS,
        ),  # Prometheus 3
        ("application/openmetrics-text;version=1.0.0;escaping=underscores", OPENMETRICS),
        ("Application/OpenMetrics-Text; version=none", OPENMETRICS),
        ("text/plain;version=none,;=,", TEXT),
    ],
)
def test_the_accept_header_chooses_the_format_and_never_the_names(metrics, report, accept, content_type):
    metrics.observe_report(report)
    use_everything(metrics)
    body, answered = metrics.render(accept)
    assert answered == content_type
    assert body.endswith(b"# EOF\n") == (content_type == OPENMETRICS)
    read = read_openmetrics if content_type == OPENMETRICS else read_text
    assert {sample.name for family in read(body.decode()) for sample in family.samples} == _names(metrics)
    assert b'\nsidestream:num_running_reqs{model_name="tiny"} 4.0\n' in body


def test_objects_share_nothing(clock, report):
    one, other = Metrics("tiny", clock=clock), Metrics("tiny", clock=clock)
    before = {family.name for family in REGISTRY.collect()}
    one.request_received()
    one.observe_report(report)
    assert value(other, "requests_received_total") == 0
    assert value(other, "num_running_reqs") is None
    assert {family.name for family in REGISTRY.collect()} == before
