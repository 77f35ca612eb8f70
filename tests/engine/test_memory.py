"""The tables and the cache of the device, as the steps find them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sidestream.engine.memory import DeviceMemory
from sidestream.engine.rows import NOT_FINITE, NOTHING_ADMITTED
from sidestream.models.spec import DecoderSpec, RopeSpec


@pytest.fixture
def memory() -> DeviceMemory:
    spec = DecoderSpec(
        model_type="test",
        vocab_size=50,
        hidden_size=8,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        intermediate_size=8,
        norm_eps=1e-5,
        windows=(None, None),
        rope=RopeSpec(theta=1e4, dim=4),
        attention_scale=0.5,
        tie_word_embeddings=True,
        max_position=32,
    )
    return DeviceMemory(spec, num_pages=3, page_size=4, slots=3, context=8, dtype=torch.bfloat16, device=torch.device("cpu"))


def test_a_row_without_a_token_feeds_the_next_step_with_one_that_exists(memory: DeviceMemory) -> None:
    tokens = torch.tensor([NOTHING_ADMITTED, 7, NOT_FINITE], dtype=torch.int32)
    memory.put_tokens(np.array([0, 2, 1]), np.array([3, 5, 0]), tokens)
    assert (memory.token_table[0, 3], memory.token_table[2, 5], memory.token_table[1, 0]) == (0, 7, 0)
    assert tokens.tolist() == [NOTHING_ADMITTED, 7, NOT_FINITE]  # the host still learns of them


def test_the_null_page_is_zero(memory: DeviceMemory) -> None:
    assert memory.keys.shape == memory.values.shape == (2, 16, 1, 4) and memory.keys.is_contiguous()
    assert not memory.keys[:, :4].any() and not memory.values[:, :4].any()
