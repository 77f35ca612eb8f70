"""What docs/http_dialects.md shows works."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from sidestream.api.messages import MessagesBody
from sidestream.api.responses import ResponsesBody
from sidestream.api.routes import ROUTES

PAGE = (Path(__file__).parents[2] / "docs" / "http_dialects.md").read_text()


def test_every_request_of_the_page_is_answered(server: Any) -> None:
    asked = re.findall(r"^curl localhost:30000(/\S+) -d '(.*)'$", PAGE, flags=re.MULTILINE)
    assert [path for path, _ in asked] == ["/v1/responses", "/v1/messages", "/v1/messages/count_tokens"]
    for path, body in asked:
        answer = server.http.post(path, content=body.encode())
        assert answer.status_code == 200, (path, answer.text)


def test_the_answers_of_the_page_have_the_fields_of_the_servers(server: Any) -> None:
    shown = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)]
    bodies = [body for _, body in re.findall(r"^curl localhost:30000(/\S+) -d '(.*)'$", PAGE, flags=re.MULTILINE)]
    for example, path, body in zip(shown, ("/v1/responses", "/v1/messages"), bodies, strict=False):
        answer = server.http.post(path, content=body.encode()).json()
        assert set(example) - {"…"} <= set(answer), path
        assert set(example["usage"]) == set(answer["usage"]), path
    assert set(shown[0]["output"][0]) == set(server.post("/v1/responses", {"input": "x"}).json()["output"][0])


def test_every_field_and_event_of_the_page_exists() -> None:
    fields = set(ResponsesBody.__struct_fields__) | set(MessagesBody.__struct_fields__)
    for table in re.findall(r"\| field \| meaning \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE):
        for row in table.splitlines():
            for name in re.findall(r"`([a-z_]+)[:`]", row.split(" | ")[0]):
                assert name in fields, name
    events = {event for route in ROUTES if route.events is not None for event in _tags(route.events)}
    named = set(re.findall(r"`(response\.[a-z_.]+|message_[a-z]+|content_block_[a-z]+|ping)`", PAGE)) - {"response.error.message"}
    assert named == events - {"error"}


def _tags(union: Any) -> list[str]:
    return [str(each.__struct_config__.tag) for each in getattr(union, "__args__", ())]
