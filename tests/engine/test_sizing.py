from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sidestream import assemble
from sidestream.config import EngineConfig
from sidestream.engine import sizing
from sidestream.engine.sizing import size_kv_cache
from sidestream.errors import ConfigError

SPEC: Any = SimpleNamespace(kv_bytes_per_token=lambda itemsize: 50 * itemsize, max_position=1000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mem_fraction": 0.000001}, "mem_fraction: got 1e-06, which gives 0 tokens of 100 bytes, must be at least one page of 16"),
        ({"kv_memory": "1599B"}, "kv_memory: got 1599, which gives 15 tokens of 100 bytes, must be at least one page of 16"),
        ({"kv_tokens": 15}, "kv_tokens: got 15, which gives 15 tokens of 100 bytes, must be at least one page of 16"),
    ],
)
def test_a_cache_of_less_than_a_page_is_refused_by_the_option_that_sets_it(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        size_kv_cache(EngineConfig(**options), SPEC, itemsize=2, device=torch.device("cpu"), weight_bytes=10**6)
    assert refused.value.message == message


@pytest.mark.parametrize(("fraction", "left"), [(None, 85 - 10 - 30), (0.5, 50 - 10 - 30)])
def test_a_gpu_gives_what_weights_and_others_leave(monkeypatch: pytest.MonkeyPatch, fraction: float | None, left: int) -> None:
    """Of 100 MB the weights use 30, and others 10."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * 10**6, 100 * 10**6))
    config = EngineConfig(mem_fraction=fraction, page_size=1)
    size = size_kv_cache(config, SPEC, itemsize=2, device=torch.device("cuda"), weight_bytes=30 * 10**6)
    assert size.bytes == pytest.approx(left * 10**6, abs=200)


def test_a_share_of_the_host_holds_the_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "available_memory", lambda: 70 * 10**6)
    config = EngineConfig(mem_fraction=0.8, page_size=1)
    size = size_kv_cache(config, SPEC, itemsize=2, device=torch.device("cpu"), weight_bytes=30 * 10**6)
    assert size.bytes == pytest.approx(50 * 10**6, abs=200)


def test_the_weights_are_in_memory_when_the_cache_is_sized(open_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spied(config: EngineConfig, spec: Any, **options: Any) -> sizing.KVSize:
        seen.append(options["weight_bytes"])
        return size_kv_cache(config, spec, **options)

    monkeypatch.setattr(assemble, "size_kv_cache", spied)
    with open_engine() as engine:
        assert seen == [engine._parts.loop.runner.decoder.weight_bytes] and seen[0] > 0
