from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sidestream.config import EngineConfig
from sidestream.engine.sizing import size_kv_cache
from sidestream.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mem_fraction": 0.000001}, "mem_fraction: got 1e-06, which gives 0 tokens of 100 bytes, must be at least one page of 16"),
        ({"kv_memory": "1599B"}, "kv_memory: got 1599, which gives 15 tokens of 100 bytes, must be at least one page of 16"),
        ({"kv_tokens": 15}, "kv_tokens: got 15, which gives 15 tokens of 100 bytes, must be at least one page of 16"),
    ],
)
def test_a_cache_of_less_than_a_page_is_refused_by_the_option_that_sets_it(options: dict[str, Any], message: str) -> None:
    spec: Any = SimpleNamespace(kv_bytes_per_token=lambda itemsize: 50 * itemsize, max_position=1000)
    with pytest.raises(ConfigError) as refused:
        size_kv_cache(EngineConfig(**options), spec, itemsize=2, device=torch.device("cpu"), weight_bytes=10**6)
    assert refused.value.message == message
