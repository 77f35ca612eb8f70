"""The native CPU backend: which of it this machine can use, and the functions that need no model.

The extension gets addresses and trusts them; everything is checked here. It is built with the package, for several instruction sets at
once, and one of them is chosen when it is first used. Without it (no compiler at installation) everything runs in PyTorch.
"""

from __future__ import annotations

import functools
import os
from importlib import import_module
from types import ModuleType

# torch goes first: the extension then shares the OpenMP runtime, and with it the team of threads, that torch has loaded.
import torch
from torch import Tensor

from sidestream.errors import ConfigError

_native: ModuleType | None
WHY_NOT = ""
try:
    _native = import_module("sidestream.kernels.cpu._native")
except ImportError as error:  # not built, or built for another Python
    _native, WHY_NOT = None, str(error)

ISA_VARIABLE = "SIDESTREAM_CPU_ISA"


def native() -> ModuleType | None:
    """The extension, if it is installed."""
    return _native


@functools.cache
def _choose(wanted: str) -> str:
    assert _native is not None
    supported: list[str] = _native.supported()
    if wanted and wanted not in supported:
        raise ConfigError(f"{ISA_VARIABLE}: got {wanted!r}, this processor can run {', '.join(supported)}")
    return wanted or supported[0]


def isa() -> str:
    """The instruction set in use: `amx`, `avx512`, `avx2` or `portable`. Raises ConfigError if `SIDESTREAM_CPU_ISA` names another."""
    return _choose(os.environ.get(ISA_VARIABLE, ""))


def admit(logits: Tensor, masks: Tensor) -> Tensor:
    """A copy with -inf where the masks have no bit: id i is bit i % 32 of word i // 32. [rows, n], [rows, ceil(n/32)] int32."""
    rows, n = _check_rows(logits)
    if masks.shape != (rows, -(-n // 32)) or masks.dtype != torch.int32 or not masks.is_contiguous():
        raise ValueError(f"masks: got {tuple(masks.shape)} {masks.dtype}, must be contiguous ({rows}, {-(-n // 32)}) int32")
    out = torch.empty_like(logits)
    _extension().admit(isa(), logits.data_ptr(), masks.data_ptr(), rows, n, out.data_ptr(), torch.get_num_threads())
    return out


def greedy(logits: Tensor, nothing: int, not_finite: int) -> Tensor:
    """The index of the largest value of each row, of equal ones the first. [rows, n] -> int32 [rows]

    In its place `nothing` where all are -inf, and `not_finite` where it is infinite, or one is NaN.
    """
    rows, n = _check_rows(logits)
    ids = torch.empty(rows, dtype=torch.int32)
    _extension().greedy(isa(), logits.data_ptr(), rows, n, nothing, not_finite, ids.data_ptr(), torch.get_num_threads())
    return ids


def logsumexp(logits: Tensor) -> Tensor:
    """log(sum(exp(row))) of each row, the same bits whatever the other rows. [rows, n] float32 -> [rows] float32."""
    rows, n = _check_rows(logits)
    out = torch.empty(rows, dtype=torch.float32)
    _extension().logsumexp(isa(), logits.data_ptr(), rows, n, out.data_ptr(), torch.get_num_threads())
    return out


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row, best first, of equal ones the lower index first: [rows, k] float32 and int32."""
    rows, n = _check_rows(logits)
    if not 1 <= k <= n:
        raise ValueError(f"k: got {k}, must be from 1 to {n} (the length of a row)")
    values, ids = torch.empty(rows, k, dtype=torch.float32), torch.empty(rows, k, dtype=torch.int32)
    _extension().top_k(isa(), logits.data_ptr(), rows, n, k, values.data_ptr(), ids.data_ptr(), torch.get_num_threads())
    return values, ids


def nucleus(logits: Tensor, top_p: Tensor) -> Tensor:
    """The smallest logit of the nucleus of each row: its best ids that have at least `top_p` of the mass. [rows, n] -> [rows]."""
    rows, n = _check_rows(logits)
    masses, out = top_p.to(torch.float32).contiguous(), torch.empty(rows)
    if len(masses) != rows:
        raise ValueError(f"top_p: got {len(masses)} values for {rows} rows")
    _extension().nucleus(isa(), logits.data_ptr(), rows, n, masses.data_ptr(), out.data_ptr(), torch.get_num_threads())
    return out


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """One id of each row by inverse CDF in the order of ids, from numbers in [0, 1). [rows, n], [rows] float64 -> [rows] int64."""
    rows, n = _check_rows(logits)
    numbers, out = uniform.to(torch.float64).contiguous(), torch.empty(rows, dtype=torch.int64)
    if len(numbers) != rows:
        raise ValueError(f"uniform: got {len(numbers)} values for {rows} rows")
    _extension().draw(isa(), logits.data_ptr(), rows, n, numbers.data_ptr(), out.data_ptr(), torch.get_num_threads())
    return out


def memory_read_gbs(nbytes: int, threads: int) -> float:
    """GB/s (1e9 bytes) at which so many threads read a buffer of so many bytes together: the best pass of about 0.1 s."""
    _check_positive("nbytes", nbytes)
    _check_positive("threads", threads)
    return float(_extension().memory_read_gbs(isa(), nbytes, threads))


def dot_gflops(threads: int) -> float:
    """GFLOP/s of the dot products that the kernels are made of, in registers alone: the best pass of about 0.1 s."""
    _check_positive("threads", threads)
    return float(_extension().dot_gflops(isa(), threads))


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}: got {value}, must be at least 1")


def _extension() -> ModuleType:
    if _native is None:
        raise RuntimeError(f"the native CPU backend is not installed: {WHY_NOT}")
    return _native


def _check_rows(logits: Tensor) -> tuple[int, int]:
    plain = logits.dtype == torch.float32 and logits.device.type == "cpu" and logits.is_contiguous()
    if not plain or logits.dim() != 2 or not logits.shape[1]:
        got = f"{tuple(logits.shape)} {logits.dtype} on {logits.device}"
        raise ValueError(f"logits: got {got}, must be contiguous [rows, n] float32 on the CPU")
    return logits.shape[0], logits.shape[1]
