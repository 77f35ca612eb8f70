"""Where results leave the device: conditional device-to-host copies on the side stream, into a reused arena, counted byte by byte.

`GenerationBatchResult.copy_to_cpu` is the one place where a step's results are copied; `Copies.copy_late` fetches `"last"` rows of
requests whose end came as a surprise. The idea of passing `return_hidden_states` from the batch to the copy is SGLang's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from sidestream.engine.outputs import LogitsProcessorOutput, LogprobBlock
from sidestream.engine.streams import Event, Stream

KINDS = ("token", "logprob", "hidden")
ALIGNMENT = 64  # bytes; keeps every tensor of the arena on its own cache line


class Ledger:
    """Bytes per kind and host time of the copies, summed over the engine's life."""

    def __init__(self) -> None:
        self.copied = dict.fromkeys(KINDS, 0)
        self.skipped = dict.fromkeys(KINDS, 0)
        self.discarded = dict.fromkeys(KINDS, 0)
        self.issue_seconds = 0.0
        self.wait_seconds = 0.0

    def as_dict(self) -> dict[str, Any]:
        kinds = {
            kind: {
                "copied_bytes": self.copied[kind],
                "skipped_bytes": self.skipped[kind],
                "discarded_bytes": self.discarded[kind],
            }
            for kind in KINDS
        }
        return {**kinds, "issue_seconds": self.issue_seconds, "wait_seconds": self.wait_seconds}


class ArenaFull(Exception):
    """A step's outputs exceed its block: the scheduler should have made the batch smaller."""


class Arena:
    """Host memory of the outputs of at most two steps in flight: two blocks used in turn; pinned where the device is CUDA."""

    def __init__(self, block_bytes: int, *, pinned: bool, poison: bool = False) -> None:
        self.block_bytes = block_bytes
        self._poison = poison
        # Untouched pages of ordinary memory cost nothing: an engine whose requests ask for no rows never pays for the block.
        self._blocks = [torch.empty(block_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._turn = 0
        self._offset = 0

    def begin_step(self) -> None:
        """Start on the other block. The step before last must have been processed: its outputs are overwritten now."""
        self._turn ^= 1
        self._offset = 0
        if self._poison:
            self._blocks[self._turn].fill_(0xFF)  # NaN in every float type, -1 in every integer type

    def take(self, like: Tensor) -> Tensor:
        """Uninitialised host tensor with the shape and dtype of `like`."""
        size = like.numel() * like.element_size()
        start = self._offset
        if start + size > self.block_bytes:
            raise ArenaFull(f"step outputs need {start + size} bytes, the arena block has {self.block_bytes}")
        self._offset = start + -(-size // ALIGNMENT) * ALIGNMENT
        return self._blocks[self._turn][start : start + size].view(like.dtype).view(like.shape)


class Copies:
    """The side stream with its arena and ledger."""

    def __init__(self, compute: Stream, side: Stream, arena: Arena, ledger: Ledger, *, hidden_size: int = 0, itemsize: int = 4) -> None:
        self.compute = compute
        self.side = side
        self.arena = arena
        self.ledger = ledger
        self.hidden_size = hidden_size
        self.itemsize = itemsize  # of the compute type: what an ungated copy of every final row would move

    def issue(self, source: Tensor, kind: str) -> Tensor:
        """Copy on the side stream, in its order. Returns the host tensor, which is valid once the step's `copy_done` is complete."""
        target = self.arena.take(source)
        self.side.launch(_copy, target, source)
        self.ledger.copied[kind] += source.numel() * source.element_size()
        return target

    def copy_late(self, tensor: Tensor, row: int) -> Tensor:
        """Fetch one kept row [layers, hidden] now, with an event of its own, and wait for it. Returns a host tensor [1, layers, hidden]."""
        started = time.perf_counter()
        # A slice is a view, made without a kernel; the row was written by a step whose `copy_done` is complete.
        source = tensor[row : row + 1]
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        self.side.launch(_copy, target, source)
        event = self.side.record()
        issued = time.perf_counter()
        event.synchronize()
        self.ledger.issue_seconds += issued - started
        self.ledger.wait_seconds += time.perf_counter() - issued
        self.ledger.copied["hidden"] += source.numel() * source.element_size()
        return target

    def wait(self, event: Event) -> None:
        started = time.perf_counter()
        event.synchronize()
        self.ledger.wait_seconds += time.perf_counter() - started


def host_array(tensor: Tensor) -> npt.NDArray[Any]:
    """The numpy view of a host tensor whose copy is complete: the one door through which values leave torch."""
    assert tensor.device.type == "cpu", "a device tensor leaves only through copy_to_cpu or copy_late"
    return tensor.numpy()


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


@dataclass
class GenerationBatchResult:
    """What one step produces. Device tensors until `copy_to_cpu`, host tensors of the arena after it."""

    logits_output: LogitsProcessorOutput
    next_token_ids: Tensor | None  # [sampled rows] int32; None until a delayed sampling has run
    copies: Copies
    kept_hidden_states: tuple[Tensor, ...] = ()  # candidates for "last" rows: [rows, layers, hidden] each; they stay on the device
    delay_sample_func: Callable[[Any], tuple[Tensor, LogprobBlock | None]] | None = None
    copy_done: Event | None = None
    forward_tokens: int = 0
    sampled_rows: int = 0
    final_bytes: int = 0  # of the bytes of `logits_output.hidden_states`, those of the final layer
    skipped_hidden: int = field(default=0, init=False)
    sources: list[Tensor] = field(default_factory=list, init=False)  # what the side stream still reads

    def copy_to_cpu(self, return_logprob: bool, return_hidden_states: bool = True) -> None:
        """Issue the copies of this step; the results are valid once `copy_done` is complete.

        Next token ids always leave the device, logprobs and hidden states only if asked for. What is not copied is dropped at once: a
        device tensor kept alive in the result queue is memory the next step does not have. The default `True` keeps a caller right
        that does not know the flag.
        """
        started = time.perf_counter()
        copies, output = self.copies, self.logits_output
        copies.side.wait(copies.compute.record())
        copies.arena.begin_step()
        if self.next_token_ids is not None:
            self.next_token_ids = self._copy(self.next_token_ids, "token")
        hidden = output.hidden_states if return_hidden_states else None
        self.logits_output = LogitsProcessorOutput(
            next_token_logprobs=self._copy_block(output.next_token_logprobs) if return_logprob else None,
            input_token_logprobs=self._copy_block(output.input_token_logprobs) if return_logprob else None,
            hidden_states=None if hidden is None else tuple(self._copy(rows, "hidden") for rows in hidden),
        )
        self._count_skipped(hidden)
        copies.ledger.issue_seconds += time.perf_counter() - started
        self.copy_done = copies.side.record()

    def _copy(self, source: Tensor, kind: str) -> Tensor:
        self.sources.append(source)
        return self.copies.issue(source, kind)

    def _copy_block(self, block: LogprobBlock | None) -> LogprobBlock | None:
        if block is None:
            return None
        return LogprobBlock(*(None if part is None else self._copy(part, "logprob") for part in block))

    def _count_skipped(self, hidden: tuple[Tensor, ...] | None) -> None:
        """What an engine without gates would have moved, less what was moved of it."""
        ledger, copies = self.copies.ledger, self.copies
        final_bytes = 0 if hidden is None else self.final_bytes
        self.skipped_hidden = max(0, self.forward_tokens * copies.hidden_size * copies.itemsize - final_bytes)
        block = self.logits_output.next_token_logprobs
        chosen = 0 if block is None else block.chosen.numel() * 4
        ledger.skipped["hidden"] += self.skipped_hidden
        ledger.skipped["logprob"] += max(0, self.sampled_rows * 4 - chosen)

    def count_late(self, final_bytes: int) -> None:
        """A late copy moved `final_bytes` of this step's final rows: they were not skipped after all."""
        moved = min(self.skipped_hidden, final_bytes)
        self.skipped_hidden -= moved
        self.copies.ledger.skipped["hidden"] -= moved
