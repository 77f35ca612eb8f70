from __future__ import annotations

from typing import Any

import pytest

from sidestream.errors import ModelError
from sidestream.models import llama
from sidestream.models.loader import ARCHITECTURES
from sidestream.models.spec import stored_name, weight_kind

CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}  # fmt: skip


def test_fields_of_a_configuration() -> None:
    spec = llama.spec_from_config(CONFIG)
    assert (spec.model_type, spec.vocab_size, spec.hidden_size, spec.num_layers) == ("llama", 40, 64, 2)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.intermediate_size) == (4, 2, 16, 96)
    assert (spec.norm, spec.norm_eps, spec.activation, spec.attention_scale) == ("rms", 1e-5, "silu", 0.25)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm) == (False,) * 4
    assert spec.windows == (None, None) and spec.tie_word_embeddings and spec.max_position == 128
    assert (spec.embedding_scale, spec.logit_scale) == (1.0, 1.0)
    assert spec.rope.theta == 10000.0 and spec.rope.dim == 16 and spec.rope.scaling == "none"


def test_defaults_and_explicit_head_dim() -> None:
    config = {key: value for key, value in CONFIG.items() if key not in ("num_key_value_heads", "tie_word_embeddings")}
    spec = llama.spec_from_config(config | {"head_dim": 32, "hidden_act": "gelu_pytorch_tanh"})
    assert (spec.num_kv_heads, spec.head_dim, spec.attention_scale, spec.rope.dim) == (4, 32, 32**-0.5, 32)
    assert spec.activation == "gelu_tanh" and not spec.tie_word_embeddings
    assert spec.weight_shapes()["layers.0.q"] == (128, 64) and spec.weight_shapes()["lm_head"] == (40, 64)


def test_derived_sizes() -> None:
    spec = llama.spec_from_config(CONFIG)
    layer = 2 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64
    assert spec.num_parameters == 40 * 64 + 64 + 2 * layer
    assert spec.kv_bytes_per_token(2) == 2 * 2 * 2 * 16 * 2
    biased = llama.spec_from_config(CONFIG | {"attention_bias": True, "mlp_bias": True})
    assert biased.num_parameters == spec.num_parameters + 2 * (64 + 32 + 32 + 64 + 96 + 96 + 64)
    assert {"layers.1.q_bias", "layers.1.o_bias", "layers.1.down_bias"} <= biased.weight_shapes().keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu2"}, "'relu2'"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"head_dim": 15}, "rotary"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"attention_bias": 1}, "attention_bias"),
    ],
)
def test_refusals_name_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        llama.spec_from_config(CONFIG | change)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ModelError, match="num_hidden_layers"):
        llama.spec_from_config({key: value for key, value in CONFIG.items() if key != "num_hidden_layers"})


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_name_maps_cover_every_weight(kind: str) -> None:
    architecture = ARCHITECTURES[kind]
    spec = architecture.spec_from_config(CONFIG | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False})
    kinds = {weight_kind(name)[0] for name in spec.weight_shapes()}
    assert kinds == set(architecture.HUGGINGFACE_NAMES) == set(architecture.GGUF_NAMES)
    assert kinds >= architecture.GGUF_INTERLEAVED


def test_stored_names() -> None:
    assert stored_name(llama.HUGGINGFACE_NAMES, "layers.11.q") == "model.layers.11.self_attn.q_proj.weight"
    assert stored_name(llama.GGUF_NAMES, "layers.0.mlp_norm") == "blk.0.ffn_norm.weight"
    assert stored_name(llama.GGUF_NAMES, "final_norm") == "output_norm.weight"
