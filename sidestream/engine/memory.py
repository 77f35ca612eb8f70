"""The engine's memory on the device: KV pages, the page table and the token table."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sidestream.models.spec import DecoderSpec

Ints = npt.NDArray[np.int64]
TokenUpload = tuple[int, int, npt.NDArray[np.int32]]  # slot, first position, token ids


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, page_size: int) -> Tensor:
    """Only the null page is zero for sure: pages that were never written are never read, and host memory that was never touched costs
    nothing. On a CPU in huge pages where there are any: attention reads a few kilobytes here and there, and looking up small pages took
    a fifth of a step of many requests."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        tensor = torch.empty(shape, dtype=dtype, device=device)
        tensor[:, :page_size].zero_()
        return tensor
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class DeviceMemory:
    """Allocated once; every change is made on the compute stream, in the order of the steps.

    keys, values: [layers, (pages + 1) * page_size, kv_heads, head_dim], page 0 the null page, always zero.
    page_table:   [slots, pages of the longest request] int32, 0 where a request has no page.
    token_table:  [slots, longest request] int32: the sampler writes step k's token there, step k+1 gathers its input from it.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        num_pages: int,
        page_size: int,
        slots: int,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.device = device
        shape = (spec.num_layers, (num_pages + 1) * page_size, spec.num_kv_heads, spec.head_dim)
        self.keys = _allocate(shape, dtype, device, page_size)
        self.values = _allocate(shape, dtype, device, page_size)
        self.page_table = torch.zeros(slots, -(-context // page_size), dtype=torch.int32, device=device)
        self.token_table = torch.zeros(slots, context + 1, dtype=torch.int32, device=device)

    def upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        """A host array on the device, in the order of the current stream. The array must not be changed afterwards."""
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)

    def update(self, page_updates: Ints, token_uploads: Sequence[TokenUpload]) -> None:
        """Bring the tables to the state a batch was planned on. page_updates: [n, 3] of (slot, column, page)."""
        for slot, start, tokens in token_uploads:
            self.token_table[slot, start : start + len(tokens)] = self.upload(tokens)
        if len(page_updates):
            slots, columns, pages = self.upload(page_updates).unbind(1)
            self.page_table[slots, columns] = pages.to(torch.int32)

    def put_tokens(self, slots: Ints, positions: Ints, tokens: Tensor) -> None:
        """What was sampled becomes input. A row without a token gets 0: the next step may be under way when the host learns of it."""
        if self.device.type == "cpu":  # PyTorch takes longer to see that there is little to do
            self.token_table.numpy()[slots, positions] = np.maximum(tokens.numpy(), 0)
        else:
            self.token_table[self.upload(slots), self.upload(positions)] = tokens.clamp(min=0)

    def poison(self, pages: list[int]) -> None:
        """Fill pages with NaN: for tests, so that reading a page after it was freed becomes visible."""
        index = torch.tensor(pages, device=self.device)[:, None] * self.page_size + torch.arange(self.page_size, device=self.device)
        self.keys[:, index.flatten()] = torch.nan
        self.values[:, index.flatten()] = torch.nan
