"""Llama: configuration -> `DecoderSpec`, and the names of its weights in both file formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from sidestream.errors import ModelError
from sidestream.models.rope import rope_from_config
from sidestream.models.spec import ACTIVATIONS, DecoderSpec

# A hostile file must not make us list a billion layers before the first missing one is noticed.
Count = Annotated[int, Meta(gt=0, le=1 << 31)]
LayerCount = Annotated[int, Meta(gt=0, le=4096)]

HUGGINGFACE_NAMES: Mapping[str, str] = {
    "embed": "model.embed_tokens.weight",
    "layers.{i}.attn_norm": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.q": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.k": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.v": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.o": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.gate": "model.layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.up": "model.layers.{i}.mlp.up_proj.weight",
    "layers.{i}.down": "model.layers.{i}.mlp.down_proj.weight",
    "layers.{i}.q_bias": "model.layers.{i}.self_attn.q_proj.bias",
    "layers.{i}.k_bias": "model.layers.{i}.self_attn.k_proj.bias",
    "layers.{i}.v_bias": "model.layers.{i}.self_attn.v_proj.bias",
    "layers.{i}.o_bias": "model.layers.{i}.self_attn.o_proj.bias",
    "layers.{i}.gate_bias": "model.layers.{i}.mlp.gate_proj.bias",
    "layers.{i}.up_bias": "model.layers.{i}.mlp.up_proj.bias",
    "layers.{i}.down_bias": "model.layers.{i}.mlp.down_proj.bias",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}

GGUF_NAMES: Mapping[str, str] = {
    "embed": "token_embd.weight",
    "layers.{i}.attn_norm": "blk.{i}.attn_norm.weight",
    "layers.{i}.q": "blk.{i}.attn_q.weight",
    "layers.{i}.k": "blk.{i}.attn_k.weight",
    "layers.{i}.v": "blk.{i}.attn_v.weight",
    "layers.{i}.o": "blk.{i}.attn_output.weight",
    "layers.{i}.mlp_norm": "blk.{i}.ffn_norm.weight",
    "layers.{i}.gate": "blk.{i}.ffn_gate.weight",
    "layers.{i}.up": "blk.{i}.ffn_up.weight",
    "layers.{i}.down": "blk.{i}.ffn_down.weight",
    "layers.{i}.q_bias": "blk.{i}.attn_q.bias",
    "layers.{i}.k_bias": "blk.{i}.attn_k.bias",
    "layers.{i}.v_bias": "blk.{i}.attn_v.bias",
    "layers.{i}.o_bias": "blk.{i}.attn_output.bias",
    "layers.{i}.gate_bias": "blk.{i}.ffn_gate.bias",
    "layers.{i}.up_bias": "blk.{i}.ffn_up.bias",
    "layers.{i}.down_bias": "blk.{i}.ffn_down.bias",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
}

# llama.cpp rotates neighbouring dimensions, so its converter stores rows j and j + dim/2 of every head side by side.
GGUF_INTERLEAVED = frozenset({"layers.{i}.q", "layers.{i}.k", "layers.{i}.q_bias", "layers.{i}.k_bias"})

GGUF_FIELDS = {  # field of config.json -> (key of the metadata, is it required)
    "hidden_size": ("llama.embedding_length", True),
    "intermediate_size": ("llama.feed_forward_length", True),
    "num_hidden_layers": ("llama.block_count", True),
    "num_attention_heads": ("llama.attention.head_count", True),
    "num_key_value_heads": ("llama.attention.head_count_kv", False),
    "head_dim": ("llama.attention.key_length", False),
    "rms_norm_eps": ("llama.attention.layer_norm_rms_epsilon", True),
    "max_position_embeddings": ("llama.context_length", True),
    "rope_theta": ("llama.rope.freq_base", False),
    "vocab_size": ("llama.vocab_size", False),
}


class LlamaConfig(msgspec.Struct, frozen=True):
    """The fields of `config.json` that decide what is computed; defaults are those of transformers."""

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: LayerCount
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    hidden_act: str = "silu"
    rms_norm_eps: Annotated[float, Meta(gt=0)] = 1e-6
    max_position_embeddings: Count = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """`config.json` -> spec. Raises `ModelError` naming a field that is missing, malformed or not supported."""
    try:
        llama = msgspec.convert(dict(config), LlamaConfig)
    except msgspec.ValidationError as error:
        raise ModelError(f"llama configuration: {error}") from None
    if llama.hidden_act not in ACTIVATIONS:
        raise ModelError(f"llama: activation {llama.hidden_act!r} is not supported", hint=f"Supported: {', '.join(ACTIVATIONS)}.")
    head_dim = llama.head_dim or llama.hidden_size // llama.num_attention_heads
    rope = rope_from_config(config, head_dim)
    if rope.dim != head_dim:
        raise ModelError(f"llama: rotating {rope.dim} of {head_dim} dimensions of a head (partial rotary) is not supported")
    return DecoderSpec(
        model_type="llama",
        vocab_size=llama.vocab_size,
        hidden_size=llama.hidden_size,
        num_layers=llama.num_hidden_layers,
        num_heads=llama.num_attention_heads,
        num_kv_heads=llama.num_key_value_heads or llama.num_attention_heads,
        head_dim=head_dim,
        intermediate_size=llama.intermediate_size,
        norm_eps=llama.rms_norm_eps,
        activation=ACTIVATIONS[llama.hidden_act],
        qkv_bias=llama.attention_bias,
        o_bias=llama.attention_bias,
        mlp_bias=llama.mlp_bias,
        windows=(None,) * llama.num_hidden_layers,
        rope=rope,
        attention_scale=head_dim**-0.5,
        tie_word_embeddings=llama.tie_word_embeddings,
        max_position=llama.max_position_embeddings,
    )


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """GGUF metadata -> the fields of `config.json`; biases and tying are read off the tensors that are there."""
    config: dict[str, Any] = {"model_type": "llama"}
    for field, (key, required) in GGUF_FIELDS.items():
        if key in metadata:
            config[field] = metadata[key]
        elif required:
            raise ModelError(f"llama GGUF: metadata key {key!r} is missing")
    if metadata.get("llama.expert_count"):
        raise ModelError(f"llama GGUF: a mixture of {metadata['llama.expert_count']} experts is not supported")
    if metadata.get("llama.attention.causal") is False:
        raise ModelError("llama GGUF: attention that is not causal is not supported")
    if "vocab_size" not in config:
        # Files of before 2024 do not state it; the embedding has one row per token.
        config["vocab_size"] = shapes.get("token_embd.weight", (0,))[0]
    rotated = metadata.get("llama.rope.dimension_count")
    if rotated is not None and config.setdefault("head_dim", rotated) != rotated:
        raise ModelError(f"llama GGUF: rotating {rotated} of {config['head_dim']} dimensions of a head is not supported")
    config["rope_scaling"] = _rope_scaling(metadata)
    config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in shapes
    config["tie_word_embeddings"] = "output.weight" not in shapes
    return config


def _rope_scaling(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """llama.cpp's keys in transformers' words; llama3 scaling is not among them, it comes as the tensor `rope_freqs.weight`."""
    prefix = "llama.rope.scaling."
    kind = metadata.get(prefix + "type", "none")
    if kind == "none":
        return None
    for key in ("attn_factor", "yarn_ext_factor", "yarn_attn_factor", "yarn_log_multiplier"):
        if metadata.get(prefix + key, 1.0) != 1.0:
            raise ModelError(f"llama GGUF: {prefix + key} = {metadata[prefix + key]} is not supported")
    keys = {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    scaling = {field: metadata[prefix + key] for key, field in keys.items() if prefix + key in metadata}
    return {"rope_type": kind, **scaling}
