"""GGUF tensor types: how many bytes a block takes, and dequantisation straight into the target tensor.

The arithmetic is that of ggml, in its order, in float32: results are bit-for-bit those of `gguf.quants.dequantize`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# 32,000 values: below the 32,768 at which torch splits an operation over its threads. Loading the default model takes 0.4 s this
# way and 0.3 s with large chunks, but on a machine whose cores are all busy 1.7 s against 27 s: each operation waits for a thread
# to be scheduled. The scratch, 125 KiB of float32, also is all the extra memory a load takes.
CHUNK_BLOCKS = 1000


@dataclass(frozen=True)
class QuantType:
    """`block` values are stored in `size` bytes. Plain types have a torch dtype, the others a function blocks -> values."""

    name: str
    block: int
    size: int
    dtype: torch.dtype | None = None
    unpack: Callable[[Tensor, Tensor], None] | None = None  # (uint8 [n, size], float32 [n, block])


def _scale(blocks: Tensor, start: int) -> Tensor:
    return blocks[:, start : start + 2].view(torch.float16).float()  # [n, 1]


def _nibbles(packed: Tensor, values: Tensor) -> None:
    values[:, :16] = packed & 0x0F
    values[:, 16:] = packed >> 4


def _q4_0(blocks: Tensor, values: Tensor) -> None:
    _nibbles(blocks[:, 2:], values)
    values.sub_(8).mul_(_scale(blocks, 0))


def _q4_1(blocks: Tensor, values: Tensor) -> None:
    _nibbles(blocks[:, 4:], values)
    values.mul_(_scale(blocks, 0)).add_(_scale(blocks, 2))  # two roundings, as ggml: no fused multiply-add


def _q8_0(blocks: Tensor, values: Tensor) -> None:
    values.copy_(blocks[:, 2:].view(torch.int8)).mul_(_scale(blocks, 0))


SUPPORTED: Mapping[int, QuantType] = {
    0: QuantType("F32", 1, 4, dtype=torch.float32),
    1: QuantType("F16", 1, 2, dtype=torch.float16),
    30: QuantType("BF16", 1, 2, dtype=torch.bfloat16),
    8: QuantType("Q8_0", 32, 34, unpack=_q8_0),
    2: QuantType("Q4_0", 32, 18, unpack=_q4_0),
    3: QuantType("Q4_1", 32, 20, unpack=_q4_1),
}

# Only so that a refusal can say what the file holds.
OTHER_NAMES: Mapping[int, str] = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip


def type_name(type_id: int) -> str:
    """The name ggml gives a type, or its number."""
    kind = SUPPORTED.get(type_id)
    return kind.name if kind else OTHER_NAMES.get(type_id, f"number {type_id}")


def dequantize_into(raw: Tensor, kind: QuantType, out: Tensor) -> None:
    """Write the values of `raw` (uint8, contiguous, whole blocks) into `out` (contiguous, any dtype and device)."""
    if kind.dtype is not None:
        out.view(-1).copy_(raw.reshape(-1).view(kind.dtype))
        return
    assert kind.unpack is not None
    blocks = raw.view(-1, kind.size)
    flat = out.view(-1, kind.block)
    direct = out.dtype == torch.float32 and out.device.type == "cpu"
    scratch = torch.empty(0 if direct else min(CHUNK_BLOCKS, len(blocks)), kind.block, dtype=torch.float32)
    for start in range(0, len(blocks), CHUNK_BLOCKS):
        chunk, target = blocks[start : start + CHUNK_BLOCKS], flat[start : start + CHUNK_BLOCKS]
        values = target if direct else scratch[: len(chunk)]
        kind.unpack(chunk, values)
        if not direct:
            target.copy_(values)
