"""The immutable plan of one forward step, complete when constructed: nothing reads live scheduler state later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sidestream.engine.memory import TokenUpload
from sidestream.engine.outputs import OutputLayout
from sidestream.engine.request import Feature, Request
from sidestream.engine.sampling import SamplingPlan

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Which requests, which token span of each. Arrays are host memory of this batch alone."""

    step: int
    requests: tuple[Request, ...]  # [spans]
    slots: Ints  # [spans] rows of the token and page tables
    starts: Ints  # [spans] absolute position of the first token
    lengths: Ints  # [spans]
    sampled: tuple[int, ...]  # spans whose last position samples a token, in order
    page_updates: Ints  # [n, 3] of (slot, column, page): what the page table lacks
    token_uploads: tuple[TokenUpload, ...]  # of newly admitted requests, and tokens appended without being sampled
    appended: Mapping[int, int]  # by span: how many of those tokens this step returns
    outputs: OutputLayout
    sampling: SamplingPlan
    features: int

    @property
    def return_logprob(self) -> bool:
        return self.outputs.next_token is not None or self.outputs.input_token is not None

    @property
    def return_hidden_states(self) -> bool:
        return self.outputs.taps is not None and bool(self.outputs.taps.copied)

    @property
    def has_constraint(self) -> bool:
        """Whether a sampled row has a grammar: its mask needs the token of the step before."""
        return bool(self.sampling.features & Feature.CONSTRAINT)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def sampled_rows(self) -> Ints:
        """Rows of the step's tokens that sample, [sampled]."""
        return (np.cumsum(self.lengths) - 1)[list(self.sampled)]


def union_of_features(requests: Sequence[Request]) -> int:
    features = 0
    for request in requests:
        features |= request.features
    return features
