"""The workloads: how many requests of which lengths, and how they are timed. Needs nothing but Python: the drivers of other engines
(benchmarks/peers) run the same in environments of their own."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

FIRST_ID, LAST_ID = 100, 40_000  # ordinary tokens of the default model's vocabulary
WARM_UP_TOKENS = 8

# Prompts as token ids, new tokens of each -> the token ids that came.
Generate = Callable[[list[list[int]], int], Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Work:
    """Requests that are asked at once, greedily and of fixed length. `counts` says which tokens its rate counts: `decode` those after the
    first, in the time after the first; `output` and `prompt` all of them, in the time from the prompts to the last answer."""

    requests: int
    prompt: int
    new: int
    counts: Literal["decode", "output", "prompt"]
    shared: int = 0  # leading prompt tokens that all have
    warm: bool = False  # the shared ones are cached, from the same work run cold before it

    @property
    def tokens(self) -> int:
        """What the rate counts."""
        return self.requests * {"decode": self.new - 1, "output": self.new, "prompt": self.prompt}[self.counts]

    def prompts(self, seed: object, vocab_size: int = LAST_ID) -> list[list[int]]:
        own = f"{seed} warm" if self.warm else seed
        return prompts(seed, self.requests, self.prompt, shared=self.shared, own_seed=own, vocab_size=vocab_size)

    def warm_up(self) -> Work:
        return replace(self, new=min(self.new, WARM_UP_TOKENS))

    def __str__(self) -> str:
        own = f"{self.shared:,} shared + {self.prompt - self.shared}" if self.shared else f"{self.prompt:,}"
        return f"{self.requests} of {own} + {self.new}"


CASES: dict[str, dict[str, Work]] = {
    "single": {"single stream": Work(1, 128, 256, "decode")},
    "batch": {"32 at once": Work(32, 128, 128, "output")},
    "prefill": {"prefill": Work(1, 2048, 1, "prompt")},
    "shared": {
        "shared prefix, cold": Work(32, 1056, 32, "output", shared=1024),
        "shared prefix, warm": Work(32, 1056, 32, "output", shared=1024, warm=True),
    },
}


def prompts(
    seed: object, count: int, length: int, *, shared: int = 0, own_seed: object = None, vocab_size: int = LAST_ID
) -> list[list[int]]:
    """`count` prompts of `length` random token ids; the first `shared` are the same in all and depend on `seed` alone."""
    last = min(LAST_ID, vocab_size)
    ids = range(min(FIRST_ID, last // 2), last)
    own = seed if own_seed is None else own_seed
    common = random.Random(f"shared {seed}").choices(ids, k=shared)
    return [common + random.Random(f"{own} {i}").choices(ids, k=length - shared) for i in range(count)]


def timed(work: Work, seed: object, generate: Generate, empty_cache: Callable[[], object], vocab_size: int = LAST_ID) -> float:
    """Seconds of the tokens that the work counts."""

    def seconds(prompts: list[list[int]], new: int) -> float:
        if not work.warm:
            empty_cache()
        started = time.perf_counter()
        answers = generate(prompts, new)
        spent = time.perf_counter() - started
        lengths = [len(answer) for answer in answers]
        if lengths != [new] * work.requests:
            raise RuntimeError(f"{work}: got answers of {sorted(set(lengths))} tokens, {new} were asked of each")
        return spent

    before = seconds(work.prompts(f"{seed} first", vocab_size), 1) if work.counts == "decode" else 0.0
    return max(seconds(work.prompts(seed, vocab_size), work.new) - before, 1e-9)
