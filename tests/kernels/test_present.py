"""The extension is part of what is tested: its absence must not pass for success."""

from __future__ import annotations

import os

from sidestream.kernels import cpu


def test_the_extension_is_built() -> None:
    """SIDESTREAM_TEST_NO_NATIVE=1 says that it is absent on purpose."""
    absent = os.environ.get("SIDESTREAM_TEST_NO_NATIVE") == "1"
    assert (cpu.native() is None) == absent, f"native backend: {cpu.native()}, {cpu.WHY_NOT}"
