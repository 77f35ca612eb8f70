"""What a decoder computes, as plain numbers: the one description that every interpreter executes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, Protocol

from sidestream.errors import ModelError

RopeScaling = Literal["none", "linear", "llama3", "yarn"]
Activation = Literal["silu", "gelu", "gelu_tanh"]

# Hugging Face spells the same function in several ways; the spec has one name for each.
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding, evaluated by `rope.rope_table`. Fields that a kind of scaling does not use keep their default."""

    theta: float
    dim: int  # rotated dimensions of a head, even
    scaling: RopeScaling = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 0  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whole dimensions as bounds of the ramp
    attention_factor: float = 1.0  # multiplies cos and sin
    divisors: tuple[float, ...] | None = None  # dim/2 numbers, inverse frequencies are divided by them (GGUF's llama3)


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A decoder-only transformer. Raises `ModelError` when the numbers contradict each other."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    norm: Literal["rms"] = "rms"
    activation: Activation = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...]  # one per layer: sliding window, None = full
    rope: RopeSpec
    attention_scale: float
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    tie_word_embeddings: bool
    max_position: int

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "max_position",
        ):
            if getattr(self, name) < 1:
                raise ModelError(f"{self.model_type}: {name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.model_type}: {self.num_heads} heads cannot share {self.num_kv_heads} key/value heads evenly")
        if self.rope.dim % 2 or not 0 < self.rope.dim <= self.head_dim:
            raise ModelError(
                f"{self.model_type}: {self.rope.dim} rotary dimensions in a head of {self.head_dim}; "
                "the number must be even and fit the head"
            )
        if self.rope.divisors is not None and len(self.rope.divisors) != self.rope.dim // 2:
            raise ModelError(f"{self.model_type}: {len(self.rope.divisors)} rope divisors for {self.rope.dim // 2} frequencies")
        if len(self.windows) != self.num_layers:
            raise ModelError(f"{self.model_type}: {len(self.windows)} attention windows for {self.num_layers} layers")

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of every weight, in the order of the computation; matrices are [out, in]."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (self.hidden_size,),
            "q": (queries, self.hidden_size),
            "k": (keys, self.hidden_size),
            "v": (keys, self.hidden_size),
            "o": (self.hidden_size, queries),
            "mlp_norm": (self.hidden_size,),
            "gate": (self.intermediate_size, self.hidden_size),
            "up": (self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
        }
        biased = ("q", "k", "v") * self.qkv_bias + ("o",) * self.o_bias + ("gate", "up", "down") * self.mlp_bias
        layer |= {f"{name}_bias": layer[name][:1] for name in biased}
        if self.qk_norm:
            layer |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, self.hidden_size)}
        for i in range(self.num_layers):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        shapes["final_norm"] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes["lm_head"] = (self.vocab_size, self.hidden_size)
        return shapes

    @property
    def num_parameters(self) -> int:
        """Parameters stored; a tied head counts once."""
        return sum(prod(shape) for shape in self.weight_shapes().values())

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values that one token position occupies over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


class Architecture(Protocol):
    """What a module `models/<model_type>.py` provides. Name maps have one entry per kind of weight, with `{i}` for the layer."""

    @property
    def HUGGINGFACE_NAMES(self) -> Mapping[str, str]: ...
    @property
    def GGUF_NAMES(self) -> Mapping[str, str]: ...
    @property
    def GGUF_INTERLEAVED(self) -> frozenset[str]:
        """Kinds of weights whose rows GGUF stores with the two rotary halves of each head interleaved."""

    def spec_from_config(self, config: Mapping[str, Any]) -> DecoderSpec:
        """`config.json` -> spec. Raises `ModelError` naming a field that is missing, malformed or not supported."""

    def config_from_gguf(self, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """GGUF metadata and tensor shapes -> the same fields that `config.json` would have."""


def weight_kind(name: str) -> tuple[str, int | None]:
    """`layers.3.q` -> (`layers.{i}.q`, 3); `embed` -> (`embed`, None)."""
    if not name.startswith("layers."):
        return name, None
    _, layer, kind = name.split(".", 2)
    return "layers.{i}." + kind, int(layer)


def stored_name(names: Mapping[str, str], name: str) -> str:
    """The name under which a file stores the canonical weight `name`, by an architecture's name map."""
    kind, layer = weight_kind(name)
    return names[kind].replace("{i}", str(layer))
