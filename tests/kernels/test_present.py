"""The extension is part of what is tested: its absence must not pass for success."""

from __future__ import annotations

import os

import pytest

from sidestream import Engine
from sidestream.errors import ConfigError
from sidestream.kernels import cpu


def test_the_extension_is_built() -> None:
    """SIDESTREAM_TEST_NO_NATIVE=1 says that it is absent on purpose."""
    absent = os.environ.get("SIDESTREAM_TEST_NO_NATIVE") == "1"
    assert (cpu.native() is None) == absent, f"native backend: {cpu.native()}, {cpu.WHY_NOT}"


@pytest.mark.skipif(cpu.native() is None, reason="no native backend")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_unknown_instruction_set_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """In float32 too, where only sampling is native: not in the first step, which would end the engine."""
    monkeypatch.setenv(cpu.ISA_VARIABLE, "sse9")
    with pytest.raises(ConfigError, match=r"SIDESTREAM_CPU_ISA: got 'sse9', this processor can run .*portable"):
        Engine("no/such/model", dtype=dtype, device="cpu")
