from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sidestream.errors import ModelError
from sidestream.models.rope import inverse_frequencies, rope_from_config, rope_table

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "old_linear": {"type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128},
    "yarn_ratio": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512},
    "yarn_all": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "attention_factor": 0.8,
        "original_max_position_embeddings": 256,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 256,
    },
    "yarn_default_original": {"rope_type": "yarn", "factor": 4.0},
}


def reference(config: LlamaConfig, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half], sin[0, :, :half]


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_equals_transformers_in_both_forms(scaling: dict[str, Any] | None, theta: float) -> None:
    old: dict[str, Any] = {"head_dim": 64, "max_position_embeddings": 2048, "rope_theta": theta}
    if scaling is not None:
        old["rope_scaling"] = scaling
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, **{k: dict(v) if isinstance(v, dict) else v for k, v in old.items()})
    new = config.to_dict()  # transformers 5 writes `rope_parameters`
    assert "rope_parameters" in new
    for form in (old, new):
        cos, sin = rope_table(rope_from_config(form, 64), 2048)
        assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (2048, 32)
        for ours, theirs in zip((cos, sin), reference(config, 2048), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_divisors_as_gguf_stores_llama3() -> None:
    config = {"max_position_embeddings": 2048, "rope_theta": 10000.0}
    plain, scaled = rope_from_config(config, 64), rope_from_config(config | {"rope_scaling": LLAMA3}, 64)
    divisors = tuple((inverse_frequencies(plain) / inverse_frequencies(scaled)).tolist())
    ours = rope_table(dataclasses.replace(plain, divisors=divisors), 2048)
    for got, want in zip(ours, rope_table(scaled, 2048), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=5e-5)  # one more rounding of the frequency, times 2048 positions
    assert (ours[0] - rope_table(plain, 2048)[0]).abs().max() > 0.5


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope"])
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ModelError, match=f"'{kind}'.*\n.*yarn"):
        rope_from_config({"rope_scaling": {"type": kind, "factor": 2.0}}, 64)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "linear"}, "'factor'"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "'low_freq_factor'"),
        ({"rope_type": "linear", "factor": "2"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}, "full_attention"),
    ],
)
def test_malformed_parameters_are_named(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        rope_from_config({"rope_parameters": scaling}, 64)


def test_llama3_with_equal_factors_does_not_divide_by_zero() -> None:
    rope = rope_from_config({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, 64)
    assert torch.isfinite(rope_table(rope, 64)[0]).all()
