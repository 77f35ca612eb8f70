"""Rotary position embeddings: configuration -> `RopeSpec` -> cos/sin table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from sidestream.errors import ModelError
from sidestream.models.spec import RopeScaling, RopeSpec

Positive = Annotated[float, Meta(gt=0)]
Base = Annotated[float, Meta(gt=1)]

KINDS: Mapping[str, RopeScaling] = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
REQUIRED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
LENGTH_DEPENDENT = ("dynamic", "longrope", "su")


class RopeParameters(msgspec.Struct, frozen=True):
    """The fields of `rope_scaling` (transformers before 5) and of `rope_parameters` (5) that have a meaning here."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Base | None = None
    partial_rotary_factor: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Annotated[int, Meta(gt=0)] | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    attention_factor: Positive | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class _Config(msgspec.Struct, frozen=True):
    """The rope fields beside those dictionaries; the old form keeps base and partial factor there."""

    max_position_embeddings: Annotated[int, Meta(gt=0)] = 2048
    original_max_position_embeddings: Annotated[int, Meta(gt=0)] | None = None
    rope_theta: Base | None = None
    partial_rotary_factor: Positive | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None


def rope_from_config(config: Mapping[str, Any], head_dim: int, *, default_theta: float = 10000.0) -> RopeSpec:
    """Read old and new forms with the precedence of transformers. Raises `ModelError` naming a kind that is not supported."""
    try:
        outer = msgspec.convert(dict(config), _Config)
        given = outer.rope_scaling or outer.rope_parameters or {}
        if any(isinstance(value, Mapping) for value in given.values()):
            raise ModelError(f"rope: one set of parameters per kind of layer is not supported ({', '.join(given)})")
        rope = msgspec.convert(given, RopeParameters)
    except msgspec.ValidationError as error:
        raise ModelError(f"rope: {error}") from None
    kind = rope.rope_type or rope.type or "default"
    if kind in LENGTH_DEPENDENT:
        # A key rotated by one angle while the text is short and by another later could be neither cached nor shared.
        raise ModelError(f"rope: kind {kind!r} changes its angles with the running length, which is not supported", hint=_supported())
    if kind not in KINDS:
        raise ModelError(f"rope: unknown kind {kind!r}", hint=_supported())
    for field in REQUIRED.get(kind, ()):
        if getattr(rope, field) is None:
            raise ModelError(f"rope: kind {kind!r} needs {field!r}, which is missing")
    theta = rope.rope_theta or outer.rope_theta or default_theta
    partial = rope.partial_rotary_factor or outer.partial_rotary_factor or 1.0
    dim = int(head_dim * partial)
    if kind == "default":
        return RopeSpec(theta=theta, dim=dim)
    original = outer.original_max_position_embeddings or rope.original_max_position_embeddings or outer.max_position_embeddings
    factor = rope.factor or outer.max_position_embeddings / original
    return RopeSpec(
        theta=theta,
        dim=dim,
        scaling=KINDS[kind],
        factor=factor,
        low_freq_factor=rope.low_freq_factor or 1.0,
        high_freq_factor=rope.high_freq_factor or 4.0,
        original_max_position=original,
        beta_fast=rope.beta_fast or 32.0,
        beta_slow=rope.beta_slow or 1.0,
        truncate=rope.truncate,
        attention_factor=_yarn_attention_factor(rope, factor) if kind == "yarn" else 1.0,
    )


def _supported() -> str:
    return f"Supported kinds: {', '.join(KINDS)}."


def _yarn_attention_factor(rope: RopeParameters, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def rope_table(rope: RopeSpec, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 on the CPU, each [length, dim/2], the attention factor multiplied in.

    Half-split convention: dimension j of a head is rotated together with dimension j + dim/2.
    """
    positions = torch.arange(length, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(rope)  # [length, dim/2] float32
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def inverse_frequencies(rope: RopeSpec) -> Tensor:
    """Angle per position of each rotated pair, [dim/2] float32; operation by operation as transformers computes it."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.scaling == "linear":
        frequencies = frequencies / rope.factor
    elif rope.scaling == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.scaling == "yarn":
        frequencies = _yarn(rope, rope.theta**exponents)
    if rope.divisors is not None:
        frequencies = frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
    return frequencies


def _llama3(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    smooth = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    between = ~(wavelengths < shortest) * ~(wavelengths > longest)
    return torch.where(between, blended, scaled)


def _yarn(rope: RopeSpec, powers: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071): a linear ramp over the dimensions from extrapolation to interpolation."""

    def dimension(rotations: float) -> float:
        return rope.dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    extrapolated = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - extrapolated) + 1.0 / powers * extrapolated
