"""Sidestream: LLM inference whose log-probabilities and hidden states are outputs of the same rank as the text."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "AsyncEngine",
    "ConfigError",
    "ContextLengthExceeded",
    "DownloadError",
    "Engine",
    "EngineDead",
    "EngineFault",
    "InvalidRequest",
    "ModelError",
    "NoToken",
    "Output",
    "QueueFull",
    "SamplingParams",
    "SidestreamError",
    "SlowReader",
    "__version__",
]

if TYPE_CHECKING:
    from sidestream.async_client import AsyncEngine as AsyncEngine
    from sidestream.client import Engine as Engine
    from sidestream.errors import ConfigError as ConfigError
    from sidestream.errors import ContextLengthExceeded as ContextLengthExceeded
    from sidestream.errors import DownloadError as DownloadError
    from sidestream.errors import EngineDead as EngineDead
    from sidestream.errors import EngineFault as EngineFault
    from sidestream.errors import InvalidRequest as InvalidRequest
    from sidestream.errors import ModelError as ModelError
    from sidestream.errors import NoToken as NoToken
    from sidestream.errors import QueueFull as QueueFull
    from sidestream.errors import SidestreamError as SidestreamError
    from sidestream.errors import SlowReader as SlowReader
    from sidestream.output import Output as Output
    from sidestream.params import SamplingParams as SamplingParams

_HOMES = {"AsyncEngine": "async_client", "Engine": "client", "Output": "output", "SamplingParams": "params"}  # all others are errors


def __getattr__(name: str) -> Any:
    """Import the public classes when they are first used: the engine brings torch, which takes a second."""
    if name not in __all__:
        raise AttributeError(f"module 'sidestream' has no attribute {name!r}")
    value = getattr(import_module(f"sidestream.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
