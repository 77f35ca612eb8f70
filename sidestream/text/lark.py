"""Pieces of grammars in Lark, as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from sidestream.errors import InvalidRequest
from sidestream.text.json_schema import enforceable

ANY_TEXT = "/(?s:.*)/"
# Between two tokens of JSON: nothing, a space, or a new line and its indentation. Free whitespace lets a model write it for ever.
WHITESPACE = r"(?: |\n[ \t]{0,20})?"
# Lenient would ignore keywords that cannot be enforced. With \u a name could be written so that it is not known for what it is.
OPTIONS = {"whitespace_pattern": WHITESPACE, "lenient": False, "json_allowed_escapes": 'nrbtf\\"'}


def literal(text: str, special: Mapping[str, int]) -> str:
    """A text, in which special tokens are those tokens: as a string alone they would not be admitted."""
    if not text:
        return '""'
    if not special:
        return quoted(text)
    pattern = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    pieces = re.split(f"({pattern})", text)
    return " ".join(f"<[{special[piece]}]>" if piece in special else quoted(piece) for piece in pieces if piece)


def lark_regex(pattern: str) -> str:
    """A regular expression in place. `\\d` is a digit from 0 to 9, as in the patterns of JSON Schema: models write others, too."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern, 'd')}/"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def schema(value: Mapping[str, Any], field: str = "schema") -> str:
    """A JSON Schema in place. Raises InvalidRequest where it cannot be enforced."""
    return "%json " + json.dumps({**enforceable(field, value), "x-guidance": OPTIONS}, ensure_ascii=False)


def check_schema(field: str, value: Mapping[str, Any]) -> None:
    """The compiler takes options from a schema, among them to ignore what it cannot enforce. Raises InvalidRequest."""
    if "x-guidance" in value:
        raise InvalidRequest(field, "got the keyword x-guidance, which is no keyword of JSON Schema, must be left out")
