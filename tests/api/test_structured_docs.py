"""What docs/structured.md shows works over HTTP, and it says what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from sidestream import params
from sidestream.api.structured import ResponseFormat, StructuredOutputs
from sidestream.text import json_formats, stop_regex

PAGE = (Path(__file__).parents[2] / "docs" / "structured.md").read_text()


def test_every_request_of_the_page_is_answered(server: Any) -> None:
    asked = re.findall(r"^curl localhost:30000(/\S+) -d '(.*)'$", PAGE, flags=re.MULTILINE)
    assert len(asked) == 3
    for path, body in asked:
        answer = server.http.post(path, content=body.encode())
        assert answer.status_code == 200, (path, answer.text)


def test_every_way_to_ask_is_on_the_page() -> None:
    names = set(re.findall(r"`([\w.]+)", PAGE))
    assert set(params.GRAMMARS) <= names
    ways = {name for name in StructuredOutputs.__struct_fields__ if not name.startswith(("disable", "whitespace"))}
    assert {f"structured_outputs.{name}" for name in ways} <= names
    (types,) = (field.type for field in msgspec.structs.fields(ResponseFormat) if field.name == "type")
    assert all(f"type `{name}`" in PAGE for name in types.__args__ if name != "text")


def test_limits_and_formats_are_as_the_page_says() -> None:
    assert f"at most {params.MAX_GRAMMAR_BYTES // 1024} KiB and {params.MAX_CHOICES:,} choices" in PAGE
    assert f"{stop_regex.SECONDS * 1000:g} ms for a step" in PAGE
    for name in (*json_formats.PATTERNS, *json_formats.BOUNDS, *json_formats.WITHOUT_EFFECT):
        assert f"`{name}`" in PAGE, name
