"""What docs/http_native.md shows works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sidestream.api.routes import ROUTES

PAGE = (Path(__file__).parents[2] / "docs" / "http_native.md").read_text()


def test_every_request_of_the_page_is_answered(server: Any) -> None:
    asked = re.findall(r"^curl (?:-N )?localhost:30000(/\S+) -d '(.*)'$", PAGE, flags=re.MULTILINE)
    assert len(asked) >= 9
    for path, body in asked:
        answer = server.http.post(path, content=body.encode())
        assert answer.status_code == 200, (path, answer.text)


def test_every_route_of_the_page_exists() -> None:
    known = {path for route in ROUTES for path in (route.path, *route.aliases)}
    named = set(re.findall(r"`(?:GET |POST |GET` or `POST )?(/[a-z_/0-9]*)`", PAGE))
    assert named - {"/v1"} <= known and len(named) > 15
