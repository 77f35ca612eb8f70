"""The native interpreter of a `DecoderSpec`: one call that releases the GIL runs a whole step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sidestream.kernels.cpu import _extension, isa, native
from sidestream.models.interpreter import Forwarded, Ints, Memory, Spans, Tap
from sidestream.models.loader import Weights
from sidestream.models.rope import rope_table
from sidestream.models.spec import DecoderSpec

MAX_HEAD_DIM = 1024
MAX_GROUP = 48  # query heads that share a key head

# The enumerations of common.h and pack.h.
STORED = {"BF16": 0, "Q4_0": 1, "Q4_1": 2, "Q8_0": 3}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
PACKINGS = {"auto": 0, "w8a8": 1, "w4a8": 2}
ROW_TYPES = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2}

Source = tuple[str, Tensor]  # how a matrix is stored, and its rows


def why_not(spec: DecoderSpec) -> str | None:
    """What of the spec the native interpreter cannot run; None if it can."""
    if native() is None:
        return "it is not installed"
    if spec.activation not in ACTIVATIONS or spec.norm != "rms":
        return f"it has no {spec.activation} with {spec.norm} norm"
    if spec.head_dim % 2 or spec.head_dim > MAX_HEAD_DIM:
        return f"heads of {spec.head_dim} are not even, or more than {MAX_HEAD_DIM}"
    if spec.num_heads // spec.num_kv_heads > MAX_GROUP:
        return f"{spec.num_heads // spec.num_kv_heads} query heads share a key head, more than {MAX_GROUP}"
    return None


class NativeDecoder:
    """Weights packed for the kernels: quantised matrices in their file's own blocks, everything else in bfloat16; norms in float32.

    With `quantization` w8a8 or w4a8 activations are rounded to 8 bits, with a scale for each 32 of a row, and products are integer. w8a8
    makes every matrix Q8_0; w4a8 keeps Q4_0 and Q4_1 and makes the others Q4_1, but the embedding and the head are Q8_0.

    Each row of a step is computed in one order of additions that depends on nothing but its own position: the same request gives the
    same bits whatever the batch, cache, chunks, page size or number of threads.
    """

    dtype = torch.bfloat16
    device = torch.device("cpu")

    def __init__(self, spec: DecoderSpec, weights: Weights, *, context: int, threads: int, quantization: str = "auto") -> None:
        self.spec = spec
        self.context = context
        self.threads = threads
        self.isa = isa()
        self.quantization = quantization
        cos, sin = (table.contiguous() for table in rope_table(spec.rope, context))
        self._native = _extension().Decoder(
            self.isa,
            [
                spec.vocab_size,
                spec.hidden_size,
                spec.num_layers,
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_dim,
                spec.intermediate_size,
                spec.rope.dim,
            ],
            [spec.norm_eps, spec.attention_scale, spec.embedding_scale, spec.logit_scale],
            ACTIVATIONS[spec.activation],
            spec.qk_norm,
            [window or 0 for window in spec.windows],
            quantization != "auto",
            cos.data_ptr(),
            sin.data_ptr(),
            context,
        )
        self._pack(weights)
        self._memory: Memory | None = None

    @property
    def weight_bytes(self) -> int:
        return int(self._native.weight_bytes)

    @property
    def step_bytes(self) -> int:
        """What every step reads of the weights: all of them, but of an embedding that is not also the head only a few rows."""
        return self.weight_bytes - (0 if self.spec.tie_word_embeddings else self._embedding_bytes)

    def _pack(self, weights: Weights) -> None:
        def source(name: str) -> Source:
            quantized = weights.quantized(name)
            return (quantized.type, quantized.blocks) if quantized else ("BF16", weights.read(name, torch.bfloat16))

        def vector(name: str, layer: int = 0) -> None:
            values = weights.read(name, torch.float32)
            self._native.set_vector(layer, name.rpartition(".")[2], values.data_ptr(), len(values))

        def matrix(layer: int, name: str, parts: Sequence[str], *, alternate: bool = False) -> None:
            prefix = "" if name in ("embed", "lm_head") else f"layers.{layer}."
            sources = [source(prefix + part) for part in parts]
            shapes = [weights.shape(prefix + part) for part in parts]
            if alternate and len({stored for stored, _ in sources}) > 1:
                sources = [("BF16", weights.read(prefix + part, torch.bfloat16)) for part in parts]
            grouped = [sources] if alternate else [[each] for each in sources]
            packed = [
                (STORED[group[0][0]], [rows.data_ptr() for _, rows in group], *shape) for group, shape in zip(grouped, shapes, strict=False)
            ]
            eight = name in ("embed", "lm_head") and self.quantization == "w4a8"
            self._native.set_matrix(layer, name, packed, PACKINGS["w8a8" if eight else self.quantization])
            if f"{prefix}{parts[0]}_bias" in weights:
                biases = [weights.read(f"{prefix}{part}_bias", torch.float32) for part in parts]
                self._native.set_bias(layer, name, [(bias.data_ptr(), len(bias)) for bias in biases], alternate)

        matrix(0, "embed", ["embed"])
        self._embedding_bytes = self.weight_bytes
        for i in range(self.spec.num_layers):
            matrix(i, "qkv", ["q", "k", "v"])
            matrix(i, "o", ["o"])
            matrix(i, "gate_up", ["gate", "up"], alternate=True)
            matrix(i, "down", ["down"])
            for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm"):
                if f"layers.{i}.{name}" in weights:
                    vector(f"layers.{i}.{name}", i)
        vector("final_norm")
        if "lm_head" in weights:
            matrix(0, "lm_head", ["lm_head"])

    def forward(self, spans: Spans, memory: Memory, taps: Sequence[Tap] = (), logit_rows: Ints | None = None) -> Forwarded:
        """See `Interpreter`."""
        spec = self.spec
        slots, starts, lengths = (np.ascontiguousarray(array, np.int64) for array in spans)
        self._check(memory, slots, starts, lengths)
        tokens = int(lengths.sum())
        rows = np.empty(0, np.int64) if logit_rows is None else np.ascontiguousarray(logit_rows, np.int64)
        _check_range("logit_rows", rows, tokens)
        hidden = torch.empty(tokens, spec.hidden_size, dtype=torch.bfloat16)
        logits = torch.empty(len(rows), spec.vocab_size) if len(rows) else None
        wanted = [(np.ascontiguousarray(tap.rows, np.int64), tap) for tap in taps]
        for tap_rows, tap in wanted:
            _check_range("rows of a tap", tap_rows, tokens)
            _check_range("layers of a tap", np.asarray(tap.layers), spec.num_layers + 1)
            shape = (len(tap_rows), len(tap.layers), spec.hidden_size)
            if tap.out.shape != shape or not tap.out.is_contiguous() or tap.out.dtype not in ROW_TYPES:
                raise ValueError(f"out of a tap: got {tuple(tap.out.shape)} {tap.out.dtype}, must be contiguous {shape}")
        token_table, page_table = memory.token_table, memory.page_table
        self._native.forward(
            (len(slots), slots.ctypes.data, starts.ctypes.data, lengths.ctypes.data),
            (token_table.data_ptr(), token_table.stride(0)),
            (page_table.data_ptr(), page_table.stride(0), memory.page_size),
            (memory.keys.data_ptr(), memory.values.data_ptr(), memory.keys.stride(0)),
            [(r.ctypes.data, len(r), list(tap.layers), ROW_TYPES[tap.out.dtype], tap.out.data_ptr()) for r, tap in wanted],
            hidden.data_ptr(),
            (rows.ctypes.data, len(rows), 0 if logits is None else logits.data_ptr()),
            self.threads,
        )
        return Forwarded(hidden, logits)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Interpreter`."""
        if hidden.dim() != 2 or hidden.shape[1] != self.spec.hidden_size or hidden.dtype != torch.bfloat16:
            raise ValueError(f"hidden: got {tuple(hidden.shape)} {hidden.dtype}, must be [rows, {self.spec.hidden_size}] bfloat16")
        hidden = hidden.contiguous()
        out = torch.empty(len(hidden), self.spec.vocab_size)
        if len(hidden):
            self._native.logits(hidden.data_ptr(), len(hidden), out.data_ptr(), self.threads)
        return out

    def _check(self, memory: Memory, slots: Ints, starts: Ints, lengths: Ints) -> None:
        spec = self.spec
        if memory is not self._memory:
            _check_tensors(
                {
                    "keys": (memory.keys, (spec.num_layers, None, spec.num_kv_heads, spec.head_dim), torch.bfloat16),
                    "values": (memory.values, tuple(memory.keys.shape), torch.bfloat16),
                    "page_table": (memory.page_table, (None, None), torch.int32),
                    "token_table": (memory.token_table, (len(memory.page_table), None), torch.int32),
                }
            )
            size = memory.page_size
            if size < 1 or size & (size - 1) or size > 256:
                raise ValueError(f"page_size: got {size}, must be a power of two, at most 256")
            self._memory = memory
        if not len(slots) == len(starts) == len(lengths) or not len(slots) or lengths.min() < 1 or starts.min() < 0:
            raise ValueError("spans: starts must not be negative, and lengths be at least 1")
        _check_range("slots", slots, len(memory.page_table))
        most = min(self.context, memory.token_table.shape[1], memory.page_table.shape[1] * memory.page_size)
        if int((starts + lengths).max()) > most:
            raise ValueError(f"spans: a span ends at position {int((starts + lengths).max())}, the tables have room for {most}")


def _check_range(what: str, values: Any, limit: int) -> None:
    if len(values) and not (values.min() >= 0 and values.max() < limit):
        raise ValueError(f"{what}: got values from {values.min()} to {values.max()}, must be from 0 to {limit - 1}")


def _check_tensors(tensors: Mapping[str, tuple[Tensor, tuple[int | None, ...], torch.dtype]]) -> None:
    for name, (tensor, shape, dtype) in tensors.items():
        fits = tensor.dim() == len(shape) and all(want in (None, got) for want, got in zip(shape, tensor.shape, strict=True))
        if not fits or tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: got {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, must be contiguous {shape} {dtype} on the CPU"
            )
