"""What the tests of the observing side share: a full report of an engine, and a clock that is set by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest

REPORT: dict[str, Any] = {
    "d2h": {
        "token": {"copied_bytes": 400, "skipped_bytes": 0, "discarded_bytes": 4},
        "logprob": {"copied_bytes": 80, "skipped_bytes": 320, "discarded_bytes": 0},
        "hidden": {"copied_bytes": 0, "skipped_bytes": 115200, "discarded_bytes": 0},
        "issue_seconds": 0.25,
        "wait_seconds": 0.5,
    },
    "running": 4,
    "waiting": 2,
    "kv_tokens_total": 1600,
    "kv_tokens_free": 1000,
    "kv_tokens_cached": 500,
    "kv_tokens_evictable": 400,
    "page_size": 16,
    "steps": 30,
    "forward_tokens": 160,
    "retracted": 1,
    "prompt_tokens": 100,
    "generation_tokens": 100,
    "cached_tokens": 40,
    "aborted": 3,
    "step_seconds": {"plan": 0.125, "launch": 0.5, "process": 0.25},
}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def report() -> dict[str, Any]:
    return copy.deepcopy(REPORT)


@pytest.fixture
def clock() -> Clock:
    return Clock()
