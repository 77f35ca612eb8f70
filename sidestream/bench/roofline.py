"""The roofline: the time that a workload cannot beat, from what its steps read and compute and what the machine can do.

A step takes at least max(bytes / bandwidth, operations / rate) (Williams, Waterman, Patterson: Roofline, 2009). The bytes are those of
the weights, once per step, and of the keys and values that its rows attend to, once for those that requests share.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from sidestream.bench.work import Work
from sidestream.models.spec import DecoderSpec


class Limits(NamedTuple):
    """What the machine can do at most."""

    bandwidth: float  # bytes per second, read from a buffer as large as the weights
    compute: float  # floating-point operations per second

    def seconds(self, steps: Sequence[Step]) -> float:
        return sum(max(step.bytes / self.bandwidth, step.flop / self.compute) for step in steps)


class Step(NamedTuple):
    bytes: int
    flop: int


class Costs(NamedTuple):
    """What one model costs."""

    spec: DecoderSpec
    weight_bytes: int  # that each step reads
    itemsize: int  # of a key or value

    @property
    def token_flop(self) -> int:
        """Products and additions of all layers' matrices for one token."""
        return 2 * sum(prod(shape) for name, shape in self.spec.weight_shapes().items() if name.startswith("layers.") and len(shape) == 2)

    @property
    def head_flop(self) -> int:
        """Of one row of logits."""
        return 2 * self.spec.vocab_size * self.spec.hidden_size

    def keys(self, context: int) -> int:
        """Keys that a token sees in all layers together, `context` positions with its own being there."""
        return sum(context if window is None else min(window, context) for window in self.spec.windows)

    def attention_flop(self, keys: int) -> int:
        """Of scores and weighted values."""
        return 4 * self.spec.num_heads * self.spec.head_dim * keys

    def kv_bytes(self, keys: int) -> int:
        return 2 * self.spec.num_kv_heads * self.spec.head_dim * self.itemsize * keys

    def prefill(self, work: Work) -> Step:
        """All prompts in one step, what they share computed once, or read if it is cached. It gives each request's first token."""
        shared, own = range(1, work.shared + 1), range(work.shared + 1, work.prompt + 1)
        computed = ([] if work.warm else [(1, shared)]) + [(work.requests, own)]
        flop = work.requests * self.head_flop
        for times, contexts in computed:
            flop += times * (len(contexts) * self.token_flop + self.attention_flop(sum(map(self.keys, contexts))))
        return Step(self.weight_bytes + (self.kv_bytes(self.keys(work.shared)) if work.warm else 0), flop)

    def decode(self, work: Work, context: int) -> Step:
        """One token for each request, each seeing `context` positions."""
        shared = self.keys(work.shared)
        keys = shared + work.requests * (self.keys(context) - shared)
        flop = work.requests * (self.token_flop + self.head_flop + self.attention_flop(self.keys(context)))
        return Step(self.weight_bytes + self.kv_bytes(keys), flop)

    def steps(self, work: Work) -> list[Step]:
        """The fewest steps that do what the work counts."""
        decode = [self.decode(work, work.prompt + i) for i in range(1, work.new)]
        return decode if work.counts == "decode" else [self.prefill(work), *decode]
