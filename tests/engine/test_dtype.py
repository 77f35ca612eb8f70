"""Which type `dtype="auto"` is."""

from __future__ import annotations

import pytest
import torch

from sidestream.assemble import pick_dtype
from sidestream.kernels import cpu

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dot_products", "isa", "expected"),
    [
        (True, None, torch.bfloat16),
        (False, None, torch.float32),
        (False, "portable", torch.float32),
        (False, "avx2", torch.bfloat16),
    ],
)
def test_auto_on_a_cpu(monkeypatch: pytest.MonkeyPatch, dot_products: bool, isa: str | None, expected: torch.dtype) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: dot_products)
    monkeypatch.setattr(cpu, "native", lambda: isa and cpu)
    monkeypatch.setattr(cpu, "isa", lambda: isa)
    assert pick_dtype("auto", CPU) == expected
    assert pick_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert pick_dtype("float16", CPU) == torch.float16
