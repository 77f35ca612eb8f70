"""Sidestream: LLM inference whose log-probabilities and hidden states are outputs of the same rank as the text."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Engine", "Output", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from sidestream.client import Engine as Engine
    from sidestream.output import Output as Output
    from sidestream.params import SamplingParams as SamplingParams

_HOMES = {"Engine": "sidestream.client", "Output": "sidestream.output", "SamplingParams": "sidestream.params"}


def __getattr__(name: str) -> Any:
    """Import the public classes when they are first used: the engine brings torch, which takes a second."""
    if name not in _HOMES:
        raise AttributeError(f"module 'sidestream' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
