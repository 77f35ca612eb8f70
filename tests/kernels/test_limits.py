"""The machine's limits, as the native module measures them. No speed is asserted, only that something was measured."""

from __future__ import annotations

import pytest

from sidestream.kernels import cpu

pytestmark = pytest.mark.skipif(cpu.native() is None, reason="the native backend is not built")
# Far below the slowest processor and above the fastest: a loop that the compiler removed would take no time, and exceed them.
LEAST, MOST = 0.01, 50000.0


@pytest.mark.parametrize("nbytes", [1, 100_000, 40 << 20])
@pytest.mark.parametrize("threads", [1, 2])
def test_memory_is_read(use_isa, nbytes, threads):
    assert LEAST < cpu.memory_read_gbs(nbytes, threads) < MOST


@pytest.mark.parametrize("threads", [1, 2])
def test_dot_products_are_computed(use_isa, threads):
    assert LEAST < cpu.dot_gflops(threads) < MOST


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="nbytes: got 0, must be at least 1"):
        cpu.memory_read_gbs(0, 1)
    with pytest.raises(ValueError, match="threads: got 0, must be at least 1"):
        cpu.memory_read_gbs(1, 0)
    with pytest.raises(ValueError, match="threads: got -1, must be at least 1"):
        cpu.dot_gflops(-1)
