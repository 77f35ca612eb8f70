"""The formats in which models write calls, and which of them a model's chat template teaches."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from sidestream.errors import ConfigError
from sidestream.text.tools import hermes, llama, mistral, pythonic
from sidestream.text.tools.grammar import Special
from sidestream.text.tools.parser import CallParser
from sidestream.text.tools.tool import Tool

ALPHANUMERICS = string.ascii_letters + string.digits


class Rules(Protocol):
    def __call__(self, tools: Sequence[Tool], *, parallel: bool, free: bool, special: Special) -> list[str]: ...


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls. `markers` are what the text must show of it: some tokenizers count them among their special tokens."""

    name: str
    parser_type: type[CallParser]
    rules: Rules
    markers: tuple[str, ...] = ()
    short_ids: bool = False  # the template refuses longer ones than nine letters and digits

    def parser(self, names: Collection[str], prefix: str = "call_") -> CallParser:
        """For one answer; `prefix` is what the ids of its calls begin with."""
        return self.parser_type(names, _short_id if self.short_ids else _long_id(prefix))

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, free: bool, special: Special) -> str:
        """Lark for an answer that is calls of these tools, at least one; if not `parallel`, one.

        `free`: among any text, or none at all, and only the parameters of strict tools are enforced.
        `special`: ids of special tokens, by their texts. Raises InvalidRequest for a schema that the format has no place for.
        """
        return "\n".join(self.rules(tools, parallel=parallel, free=free, special=special))


HERMES = ToolFormat("hermes", hermes.HermesParser, hermes.hermes_rules, (hermes.OPEN, hermes.CLOSE))
LLAMA = ToolFormat("llama3_json", llama.LlamaParser, llama.llama_rules)
PYTHONIC = ToolFormat("pythonic", pythonic.PythonicParser, pythonic.pythonic_rules)
MISTRAL = ToolFormat("mistral", mistral.MistralParser, mistral.listed_rules, (mistral.MARK, mistral.CALL_ID, mistral.ARGS), short_ids=True)
FORMATS: Mapping[str, ToolFormat] = {each.name: each for each in (HERMES, LLAMA, PYTHONIC, MISTRAL)}
NAMES = ("auto", "none", *FORMATS)


def format_of(template_source: str | None, name: str = "auto") -> ToolFormat | None:
    """The format that a chat template teaches, or the one called `name`. None where it teaches none that is known.

    Raises ConfigError for a name that is not in NAMES.
    """
    if name not in NAMES:
        raise ConfigError(f"tool_call_parser: got {name!r}, must be one of {', '.join(NAMES)}")
    source = template_source or ""
    found = _taught(source) if name == "auto" else FORMATS.get(name)
    if found is MISTRAL and mistral.ARGS in source:
        return replace(MISTRAL, rules=mistral.identified_rules if mistral.CALL_ID in source else mistral.named_rules)
    return found


def _taught(source: str) -> ToolFormat | None:
    if hermes.OPEN in source:  # others put something else than JSON between these markers
        return None if "<function=" in source or "<arg_key>" in source else HERMES
    if mistral.MARK in source:
        return MISTRAL
    if re.search(r"\[func\w*\(", source):
        return PYTHONIC
    if llama.TAG in source or re.search(r'\{"name": function name, "parameters":', source):
        return LLAMA
    return None


def _short_id() -> str:
    return "".join(secrets.choice(ALPHANUMERICS) for _ in range(9))


def _long_id(prefix: str) -> Callable[[], str]:
    return lambda: f"{prefix}{secrets.token_hex(12)}"
