"""The native kernels on their own: every instruction set of this processor in turn, and a decoder of made-up weights."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from sidestream.kernels import cpu

NATIVE = cpu.native()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "isa" in metafunc.fixturenames:
        metafunc.parametrize("isa", NATIVE.supported() if NATIVE else [pytest.param("", marks=pytest.mark.skip("no native backend"))])


@pytest.fixture(scope="session")
def native() -> ModuleType:
    if NATIVE is None:
        pytest.skip(f"no native backend: {cpu.WHY_NOT}")
    return NATIVE


@pytest.fixture
def use_isa(isa: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The functions of `sidestream.kernels.cpu` run on this instruction set."""
    monkeypatch.setenv(cpu.ISA_VARIABLE, isa)
    assert cpu.isa() == isa
    return isa


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine a team of threads waits for its slowest member all the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
