"""The list of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_the_model_is_listed_with_its_context(server: Any) -> None:
    answer = server.http.get("/v1/models").json()
    (model,) = answer["data"]
    assert answer["object"] == "list"
    assert model["created"] > 1.6e9
    name = model["id"]
    assert model == {
        "id": name,
        "object": "model",
        "created": model["created"],
        "owned_by": "sidestream",
        "root": name,
        "parent": None,
        "max_model_len": 512,
    }
    assert name.endswith("tiny-chat")


def test_one_model_is_found_under_each_of_its_names(server: Any) -> None:
    (model,) = server.http.get("/v1/models").json()["data"]
    for name in (model["id"], "tiny-chat"):  # the path that was asked for, and the model's own name
        assert server.http.get(f"/v1/models/{name}").json() == model | {"id": name}
    assert server.http.get("/v1//models").json()["data"] == server.http.get("/v1/models/").json()["data"] == [model]
    answer = server.http.get("/v1/models/someone/other")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("model_not_found", "invalid_request_error")
    assert "someone/other" in error["message"] and model["id"] in error["message"]


def test_a_model_may_be_served_under_another_name(serve: Callable[..., Any]) -> None:
    server = serve("--served-model-name", "my/model")
    assert [model["id"] for model in server.http.get("/v1/models").json()["data"]] == ["my/model"]
    for name in ("my/model", "tiny-chat"):
        answer = server.post("/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1})
        assert (answer.status_code, answer.json()["model"]) == (200, name)
    assert server.post("/v1/completions", {"prompt": "a"}).json()["model"] == "my/model"
    answer = server.post("/v1/completions", {"model": "gpt-9", "prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    # OpenAI's default of 16 tokens surprises everyone: the log says so, once.
    server.post("/v1/completions", {"prompt": "a"})
    assert server.log.count("without max_tokens") == 1
