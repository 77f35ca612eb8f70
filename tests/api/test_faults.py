"""What clients and operators do to a server: the scenarios of `benchmarks/faults.py`, with less of everything."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = (
    "disconnects",
    "malformed_bodies",
    "slow_readers",
    "memory_growth",
    "half_open",
    "header_floods",
    "pipelined",
    "bodies_at_the_limit",
    "full_queue",
    "abort_queued",
    "loading",
    "engine_killed",
    "server_killed",
    "terminated",
    "terminated_twice",
    "large_hidden",
)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script as a module; it finds its neighbours by their bare names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import faults

    yield faults
    for name in ("faults", "clients", "malformed"):
        sys.modules.pop(name, None)


def test_every_scenario_is_a_test(faults: Any) -> None:
    assert tuple(faults.SCENARIOS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_scenario(faults: Any, serve: Callable[..., Any], name: str) -> None:
    """Nothing hangs, no page leaks, every request has one terminal answer."""
    tally = asyncio.run(faults.SCENARIOS[name](serve, faults.QUICK))
    assert not tally.violations, Counter(tally.violations).most_common(3)
    assert tally.leaked in (0, None)
    assert tally.counts
