"""The engine of a command that runs one in its own process: its options, and how much of its log is shown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from sidestream.config import EngineConfig
from sidestream.flags import Parser, add_options, given_options

LOG_LEVEL = "warning"  # one prompt needs no report of the start: that is shown when a log level was asked for


def add_engine_options(parser: Parser) -> None:
    add_options(parser, "engine", EngineConfig, variables=True, defaults={"log_level": LOG_LEVEL})


def engine_options(model: str | None, arguments: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The options of the engine, and the least severity that is shown."""
    given = given_options(arguments, EngineConfig)
    options = dict(vars(EngineConfig.from_env(given.pop("model", model), **given)))
    explicit = "log_level" in arguments or bool(os.environ.get("SIDESTREAM_LOG_LEVEL"))
    return options, options["log_level"] if explicit else LOG_LEVEL


def one_model(parser: Parser, arguments: dict[str, Any], words: Sequence[str]) -> str | None:
    """The model, which other engines call by a flag; None for the default."""
    models = [*words, *([arguments["model"]] if "model" in arguments else [])]
    if len(models) > 1:
        parser.error(f"got {len(models)} models. Give one")
    return models[0] if models else None
