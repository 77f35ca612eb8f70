"""The PyTorch interpreter of a `DecoderSpec`: one forward over the token spans of a step, attention over gathered KV pages.

It knows no architecture by name; what a model does is in its spec. Runs eagerly on the CPU and on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sidestream.models.interpreter import Forwarded, Ints, Memory, Spans, Tap
from sidestream.models.rope import rope_table
from sidestream.models.spec import DecoderSpec

WIDENED_ROWS = 256  # of the LM head are float32 at a time on a CPU: few enough to stay in a core's cache until they are multiplied


class AttentionGroup(NamedTuple):
    """Spans attended to in one call: many spans of one token, or one longer span."""

    rows: Tensor | slice  # the tokens of the step
    queries: int  # tokens per span
    cache_index: Tensor  # [spans * context] int64 token positions of the KV pool, 0 (the null page) where a span is shorter
    spans: int
    context: int
    mask: dict[int | None, Tensor | None]  # by window: [spans, 1, queries, context] bool; None: causal, a prompt from its start


def plan_attention(spec: DecoderSpec, spans: Spans, memory: Memory) -> tuple[AttentionGroup, ...]:
    """Group the spans of a step: host numbers say the shapes, the page table on the device says where the keys are."""
    slots, starts, lengths = spans
    offsets = np.cumsum(lengths) - lengths
    groups = []
    for i in np.flatnonzero(lengths > 1):
        rows = slice(int(offsets[i]), int(offsets[i] + lengths[i]))
        groups.append(_group(spec, memory, slots[i : i + 1], starts[i : i + 1], int(lengths[i]), rows))
    single = np.flatnonzero(lengths == 1)
    if len(single):
        groups.append(_group(spec, memory, slots[single], starts[single], 1, memory.upload(offsets[single])))
    return tuple(groups)


def _group(spec: DecoderSpec, memory: Memory, slots: Ints, starts: Ints, queries: int, rows: Tensor | slice) -> AttentionGroup:
    page_table, page_size, upload = memory.page_table, memory.page_size, memory.upload
    device, context = page_table.device, int(starts.max()) + queries
    first = upload(starts)[:, None]  # [spans, 1]
    column = torch.arange(context, device=device)
    pages = page_table[upload(slots)][:, column // page_size].long()  # [spans, context]
    # Beyond a span's own end the null page is read: a freed page there may hold NaN, and 0 * NaN would spread it.
    index = torch.where(column < first + queries, pages * page_size + column % page_size, 0)
    query = first[:, :, None] + torch.arange(queries, device=device)[:, None]  # [spans, queries, 1] absolute positions
    masks: dict[int | None, Tensor | None] = {}
    for window in set(spec.windows):
        if window is None and queries > 1 and context == queries:
            masks[window] = None
            continue
        mask = column <= query
        if window is not None:
            mask &= column > query - window
        masks[window] = mask[:, None]
    return AttentionGroup(rows, queries, index.flatten(), len(slots), context, masks)


def token_rows(spans: Spans) -> tuple[Ints, Ints]:
    """(slot, position) of every token of a step, each [tokens]."""
    slots, starts, lengths = spans
    offsets = np.cumsum(lengths) - lengths
    return np.repeat(slots, lengths), np.arange(int(lengths.sum())) + np.repeat(starts - offsets, lengths)


class Decoder:
    """The interpreter in PyTorch operations. weights: canonical names, [out, in] matrices of one dtype and device."""

    def __init__(self, spec: DecoderSpec, weights: Mapping[str, Tensor], *, context: int) -> None:
        self.spec = spec
        self.weights = _fuse(spec, dict(weights))
        self.embed = self.weights["embed"]
        self.dtype, self.device = self.embed.dtype, self.embed.device
        cos, sin = rope_table(spec.rope, context)
        self.cos, self.sin = cos.to(self.device), sin.to(self.device)  # [context, rotary/2] float32

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights.values())

    def forward(self, spans: Spans, memory: Memory, taps: Sequence[Tap] = (), logit_rows: Ints | None = None) -> Forwarded:
        """See `Interpreter`."""
        spec, w = self.spec, self.weights
        slots, positions = map(memory.upload, token_rows(spans))  # [tokens] each
        size = memory.page_size
        cache_rows = memory.page_table[slots, positions // size].long() * size + positions % size
        groups = plan_attention(spec, spans, memory)
        tapped = [(memory.upload(tap.rows), tap) for tap in taps]
        x = F.embedding(memory.token_table[slots, positions], self.embed)  # [tokens, hidden]
        if spec.embedding_scale != 1.0:
            x = x * spec.embedding_scale
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]  # [tokens, 1, rotary/2]
        self._tap(tapped, 0, x)
        for i in range(spec.num_layers):
            p = f"layers.{i}."
            keys, values = memory.keys[i], memory.values[i]
            x = x + self._attention(p, i, self._norm(x, w[p + "attn_norm"]), cos, sin, cache_rows, groups, keys, values)
            x = x + self._mlp(p, self._norm(x, w[p + "mlp_norm"]))
            if i + 1 < spec.num_layers:
                self._tap(tapped, i + 1, x)
        x = self._norm(x, w["final_norm"])
        self._tap(tapped, spec.num_layers, x)
        return Forwarded(x, None if logit_rows is None or not len(logit_rows) else self.logits(x[memory.upload(logit_rows)]))

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] after the final norm -> [rows, vocabulary] float32."""
        logits = _wide_product(hidden, self.weights.get("lm_head", self.embed))
        return logits if self.spec.logit_scale == 1.0 else logits * self.spec.logit_scale

    def _attention(
        self,
        p: str,
        i: int,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache_rows: Tensor,
        groups: Sequence[AttentionGroup],
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        spec, w = self.spec, self.weights
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        qkv = F.linear(x, w[p + "qkv"], w.get(p + "qkv_bias")).view(-1, heads + 2 * kv_heads, dim)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], 1)  # [tokens, heads, head_dim]
        if spec.qk_norm:
            q, k = self._norm(q, w[p + "q_norm"]), self._norm(k, w[p + "k_norm"])
        q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        keys.index_copy_(0, cache_rows, k)
        values.index_copy_(0, cache_rows, v)
        out = torch.empty_like(q)
        for group in groups:
            out[group.rows] = self._attend(q[group.rows], keys[group.cache_index], values[group.cache_index], group, i)
        return F.linear(out.flatten(1), w[p + "o"], w.get(p + "o_bias"))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, group: AttentionGroup, i: int) -> Tensor:
        """Softmax attention of one group. q: [spans * queries, heads, head_dim], k and v: [spans * context, kv_heads, head_dim]."""
        spec = self.spec
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        k = k.view(group.spans, group.context, kv_heads, dim).transpose(1, 2)
        v = v.view(group.spans, group.context, kv_heads, dim).transpose(1, 2)
        mask = group.mask[spec.windows[i]]
        if group.queries == 1:
            # The query heads that share a key head are its queries: each key is read once for all of them.
            q = q.view(group.spans, kv_heads, heads // kv_heads, dim)
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.attention_scale)
            return attended.reshape(-1, heads, dim)
        q = q.view(group.spans, group.queries, heads, dim).transpose(1, 2)
        gqa = heads != kv_heads
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=spec.attention_scale, enable_gqa=gqa
        )  # [spans, heads, queries, head_dim]
        return attended.transpose(1, 2).reshape(-1, heads, dim)

    def _mlp(self, p: str, x: Tensor) -> Tensor:
        w = self.weights
        gate, up = F.linear(x, w[p + "gate_up"], w.get(p + "gate_up_bias")).chunk(2, -1)
        return F.linear(_ACTIVATIONS[self.spec.activation](gate) * up, w[p + "down"], w.get(p + "down_bias"))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root mean square norm (arXiv 1910.07467), the mean in float32 as Llama does it."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.spec.norm_eps)
        return weight * wide.to(x.dtype)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding of the first `rope.dim` dimensions of each head, in float32. x: [tokens, heads, head_dim]."""
        rotary = self.spec.rope.dim
        first, second = x[..., :rotary].float().chunk(2, -1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
        return rotated if rotary == x.shape[-1] else torch.cat((rotated, x[..., rotary:]), -1)

    @staticmethod
    def _tap(taps: Sequence[tuple[Tensor, Tap]], layer: int, x: Tensor) -> None:
        for wanted_rows, tap in taps:
            if layer in tap.layers:
                rows = x[wanted_rows]
                for j, wanted in enumerate(tap.layers):
                    if wanted == layer:
                        tap.out[:, j].copy_(rows)


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def _wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in float32, whatever the type of both: logits rounded to bfloat16 would tie. [n, in], [out, in] -> [n, out].

    A CPU has no product that takes bfloat16 and gives float32. Widening the weights piece by piece takes 1.6 times as long as the
    bfloat16 product for one row of the default model, widening them at once 8 times, and float32 weights kept beside would be 113 MB.
    """
    if x.dtype == torch.float32:
        return F.linear(x, weight)
    if x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    x, out = x.float(), torch.empty(len(x), len(weight))
    for rows, columns in zip(torch.split(weight, WIDENED_ROWS), torch.split(out, WIDENED_ROWS, 1), strict=True):
        torch.mm(x, rows.float().T, out=columns)
    return out


def _fuse(spec: DecoderSpec, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """One matrix each for q, k, v and for gate and up: fewer and larger products. The parts are dropped as they are used."""
    for i in range(spec.num_layers):
        for fused, parts in (("qkv", ("q", "k", "v")), ("gate_up", ("gate", "up"))):
            for suffix in ("", "_bias"):
                names = [f"layers.{i}.{part}{suffix}" for part in parts]
                if names[0] in weights:
                    weights[f"layers.{i}.{fused}{suffix}"] = torch.cat([weights.pop(name) for name in names])
    return weights
