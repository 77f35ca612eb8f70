"""The declarations fit together, and their page is in step."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
from pathlib import Path

import pytest

from sidestream.observe.series import SERIES, metrics_table, usage, used_tokens

ROOT = Path(__file__).parents[2]


def test_names_are_unique_under_every_prefix():
    for compat in (None, "sglang", "vllm"):
        names = [name for series in SERIES for name in series.names(compat)]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("series", SERIES, ids=lambda series: series.name)
def test_a_declaration_is_whole(series):
    assert re.fullmatch(r"[a-z0-9_]+", series.name)
    assert series.help.endswith(".")
    for name in (series.name, *series.vllm):
        assert name.endswith("_total") == (series.kind == "counter")
    assert bool(series.buckets) == (series.kind == "histogram")
    assert list(series.buckets) == sorted(set(series.buckets))
    assert not (series.buckets and (series.read or series.labels))
    assert all(len(values) == len(series.labels) for values in series.zeros)


def test_the_core_set_has_the_names_that_dashboards_know():
    declared = {series.name: series.vllm for series in SERIES if series.sglang}
    twins = {
        "num_running_reqs": ("num_requests_running",),
        "num_queue_reqs": ("num_requests_waiting",),
        "token_usage": ("kv_cache_usage_perc",),
        "num_used_tokens": (),
        "max_total_num_tokens": (),
        "cache_hit_rate": (),
        "cached_tokens_total": ("prefix_cache_hits_total",),
        "prompt_tokens_total": ("prompt_tokens_total", "prefix_cache_queries_total"),
        "generation_tokens_total": ("generation_tokens_total",),
        "num_requests_total": ("request_success_total",),
        "num_aborted_requests_total": (),
        "num_retracted_requests_total": ("num_preemptions_total",),
        "time_to_first_token_seconds": ("time_to_first_token_seconds",),
        "inter_token_latency_seconds": ("inter_token_latency_seconds",),
        "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
        "queue_time_seconds": ("request_queue_time_seconds",),
        "gen_throughput": (),
        "startup_time_seconds": (),
    }
    assert {name: declared[name] for name in twins} == twins


def test_what_is_only_cached_is_not_in_use(report):
    assert used_tokens(report) == 1600 - 1000 - 400
    assert usage(report) == 200 / 1600
    del report["kv_tokens_evictable"]
    assert used_tokens(report) == 1600 - 1000 - 500
    assert usage({**report, "kv_tokens_total": 0}) == 0.0


def test_the_page_of_metrics_is_in_step_with_the_code():
    loader = importlib.machinery.SourceFileLoader("gendocs", str(ROOT / "scripts" / "gendocs"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gendocs", loader))
    loader.exec_module(module)
    page = ROOT / "docs" / "metrics.md"
    assert page.read_text() == module.PAGES[page], "run scripts/gendocs"
    assert metrics_table() in page.read_text()
