"""What docs/http.md shows works."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from sidestream.api.chat import ChatRequest
from sidestream.api.completions import CompletionRequest

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()


def test_every_request_of_the_page_is_answered(server: Any, tool_server: Any) -> None:
    asked = re.findall(r"^curl (?:-N )?localhost:30000(/\S+)(?: -d '(.*)')?$", PAGE, flags=re.MULTILINE)
    assert len(asked) >= 7
    for path, body in asked:
        body = body.replace("[504, 3575]", "[50, 35]")  # the tests' vocabulary is smaller
        asking = tool_server.http if '"tools"' in body else server.http
        answer = asking.post(path, content=body.encode()) if body else asking.get(path)
        assert answer.status_code == 200, (path, answer.text)


def test_the_json_of_the_page_is_json() -> None:
    blocks = re.findall(r"^```json\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 6
    for block in blocks:
        json.loads(block)


def test_the_page_names_every_field_that_is_not_refused() -> None:
    for kind in (ChatRequest, CompletionRequest):
        schema = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
        pinned = {"store", "priority", "modalities"}
        fields = {name for name, field in schema.items() if field.get("type") != "null"} - pinned
        assert fields <= set(re.findall(r"`(\w+)`", PAGE)), fields - set(re.findall(r"`(\w+)`", PAGE))
