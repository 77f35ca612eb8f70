"""What runs a `DecoderSpec`: the interface that the PyTorch interpreter (`models/decoder.py`) and the native one (`kernels/cpu`) share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sidestream.models.spec import DecoderSpec

Ints = npt.NDArray[np.int64]


class Tap(NamedTuple):
    """Rows to keep while the forward runs. `out[:, j]` receives layer `layers[j]` of `rows`, converted to its dtype."""

    rows: Ints  # [n] tokens of the step
    layers: tuple[int, ...]
    out: Tensor  # [n, layers, hidden]


class Spans(NamedTuple):
    """Which tokens a step computes: of the request in each slot, `lengths[i]` positions from `starts[i]`. Host arrays, [spans]."""

    slots: Ints
    starts: Ints
    lengths: Ints


class Memory(Protocol):
    """Where the tokens, keys and values of the requests are; `engine.memory.DeviceMemory` says how they are laid out."""

    page_size: int
    keys: Tensor
    values: Tensor
    page_table: Tensor
    token_table: Tensor

    def upload(self, array: npt.NDArray[np.generic]) -> Tensor: ...


class Forwarded(NamedTuple):
    hidden: Tensor  # [tokens, hidden] after the final norm: the input of the LM head
    logits: Tensor | None  # [logit rows, vocabulary] float32; None when none are wanted


class Interpreter(Protocol):
    """Weights of one model and the forward over them. Everything runs on the compute stream, one call at a time."""

    spec: DecoderSpec
    dtype: torch.dtype  # of keys, values and hidden rows
    device: torch.device

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take in memory."""

    def forward(self, spans: Spans, memory: Memory, taps: Sequence[Tap] = (), logit_rows: Ints | None = None) -> Forwarded:
        """One step: writes keys and values into the memory's pages, and the taps. logit_rows: tokens whose logits are wanted."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] after the final norm -> [rows, vocabulary] float32."""
