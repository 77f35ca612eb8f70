"""Scoring of a row: the same bits alone and in a batch, with two threads and a vocabulary large enough to be split over them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from sidestream.engine.outputs import ScorePlan
from sidestream.engine.sampling import score
from sidestream.kernels import cpu

VOCABULARY = 128_256  # of Llama 3


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(cpu.native() is None, reason="PyTorch adds a single long row in pieces, one a thread: another order than several rows")
def test_logprobs_of_a_row_do_not_depend_on_the_batch() -> None:
    logits = torch.randn(9, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    together = scores(logits)
    assert together[0].shape == (9,) and together[1].shape == (9 * 4,)
    alone = [scores(logits[row : row + 1]) for row in range(9)]
    assert all(torch.equal(torch.cat(parts), whole) for parts, whole in zip(zip(*alone, strict=True), together, strict=True))


def scores(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of a chosen token, the four best, and one asked for."""
    rows = np.arange(len(logits))
    plan = ScorePlan(rows, None, None, 4, np.arange(4 * len(rows)), rows, np.full(len(rows), 77))
    block = score(logits, torch.full((len(rows),), 5), plan, torch.from_numpy)
    assert block.top_values is not None and block.id_values is not None
    return block.chosen, block.top_values, block.id_values
