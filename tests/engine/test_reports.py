"""The engine's reports: what metrics and probes are made of. The last one before it is idle shows that it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sidestream import SamplingParams

LONG = SamplingParams(max_new_tokens=400, temperature=0.0, ignore_eos=True)


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_idle_engine_has_reported_that_it_is(open_engine: Callable[..., Any]) -> None:
    with open_engine() as engine:

        def reported() -> dict[str, Any]:
            return dict(engine._router.report.stats) if engine._router.report else {}

        engine.generate([5, 6, 7], SamplingParams(max_new_tokens=3, ignore_eos=True))
        until(lambda: reported().get("generation_tokens") == 3)
        assert (reported()["running"], reported()["requests"], reported()["prompt_tokens"]) == (0, 1, 3)
        stream = engine.stream([5, 6], LONG, rid="a")
        next(stream)
        engine.abort("a")
        list(stream)
        until(lambda: reported()["running"] == 0 and reported()["aborted"] == 1)
        engine.generate(list(range(10, 60)), LONG)
        until(lambda: reported()["kv_tokens_cached"] > 0)
        engine.flush_cache()
        until(lambda: reported()["kv_tokens_cached"] == 0)
        assert reported()["kv_tokens_free"] == reported()["kv_tokens_total"]
