"""Dropping the cache, aborting requests, replacing the weights."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sidestream import Engine, SamplingParams

PROMPT = list(range(20, 60))


def generate(server: Any, count: int = 8, **body: Any) -> Any:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}, **body}
    answer = server.post("/generate", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="session")
def other_weights(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other numbers."""
    directory = tmp_path_factory.mktemp("other") / "tiny-other"
    shutil.copytree(chat_model, directory)
    torch.manual_seed(7)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    save_file({name: each + 0.05 * torch.randn_like(each) for name, each in tensors.items()}, file, {"format": "pt"})
    return directory


def test_the_cache_is_dropped_with_get_and_post(server: Any) -> None:
    for ask in (server.http.get, server.http.post):
        generate(server)
        assert generate(server)["meta_info"]["cached_tokens"] == 32
        answer = ask("/flush_cache")
        assert answer.status_code == 200
        got = answer.json()
        assert got["success"] is True and got["num_tokens"] >= 32 and f"{got['num_tokens']} tokens" in got["message"]
        assert generate(server)["meta_info"]["cached_tokens"] == 0
        assert server.http.get("/server_info").json()["stats"]["kv_tokens_cached"] > 0


def test_requests_are_aborted_by_their_exact_id(server: Any) -> None:
    answers: dict[str, Any] = {}

    def ask(rid: str) -> None:
        answers[rid] = generate(server, 400, rid=rid)

    threads = [threading.Thread(target=ask, args=(rid,)) for rid in ("a", "ab", "abc")]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 30
    while server.stats()["running"] < 3:
        assert time.monotonic() < until
    assert server.post("/abort_request", {"rid": "a"}).json() == {"success": True, "num_requests": 1}
    assert server.post("/abort_request", {"rid": ["abc", "nobody"]}).json() == {"success": True, "num_requests": 1}
    for thread in threads:
        thread.join()
    reasons = {rid: answer["meta_info"]["finish_reason"]["type"] for rid, answer in answers.items()}
    assert reasons == {"a": "abort", "ab": "length", "abc": "abort"}, "an id that begins with another is another"
    assert server.post("/abort_request", {"rid": "a"}).json()["num_requests"] == 0
    assert server.post("/abort_request", {"rid": "nobody", "abort_message": "x"}).status_code == 200
    for body in ({}, {"rid": ""}, {"rid": None, "abort_all": False}):
        error = server.post("/abort_request", body)
        assert (error.status_code, error.json()["error"]["param"]) == (400, "rid")


def test_all_requests_are_aborted(serve: Callable[..., Any]) -> None:
    server = serve("--max-running-requests", "2")
    answers: list[Any] = []
    body = {"input_ids": [[5, 6], [7], [8], [9]], "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
    thread = threading.Thread(target=lambda: answers.extend(server.post("/generate", body).json()))
    thread.start()
    until = time.monotonic() + 30
    while not server.stats()["running"]:
        assert time.monotonic() < until
    assert server.post("/abort_request", {"abort_all": True}).json()["num_requests"] == 4
    thread.join()
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["abort"] * 4
    stats = server.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["kv_tokens_free"] + stats["kv_tokens_cached"] == stats["kv_tokens_total"]


def test_weights_are_replaced_and_say_so(serve: Callable[..., Any], other_weights: Path) -> None:
    server = serve()
    before = generate(server)
    assert before["meta_info"]["weight_version"] == "default"
    answer = server.post("/update_weights_from_disk", {"model_path": str(other_weights), "load_format": "auto", "torch_empty_cache": True})
    assert answer.status_code == 200
    got = answer.json()
    assert got == {"success": True, "message": f"Weights of {other_weights} loaded.", "num_paused_requests": 0}
    after = generate(server)
    with Engine(str(other_weights), dtype="float32", threads=1, kv_tokens=4096, log_level="warning") as engine:
        want = engine.generate(PROMPT, SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True))
    assert after["output_ids"] == list(want.token_ids) != before["output_ids"]
    assert (after["meta_info"]["weight_version"], after["meta_info"]["cached_tokens"]) == ("1", 0)
    info = server.http.get("/model_info").json()
    assert (info["model_path"], info["weight_version"]) == (str(other_weights), "1")
    server.post("/update_weights_from_disk", {"model_path": str(other_weights), "weight_version": "step-100"})
    assert generate(server)["meta_info"]["weight_version"] == "step-100"
    assert server.stats()["weight_version"] == 2


def test_weights_that_do_not_fit_change_nothing(serve: Callable[..., Any], other_weights: Path, tmp_path: Path) -> None:
    server = serve()
    before = generate(server)
    larger = shutil.copytree(other_weights, tmp_path / "larger")
    config = json.loads((larger / "config.json").read_text())
    (larger / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    broken = shutil.copytree(other_weights, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:1000])
    for path in (tmp_path / "nothing", tmp_path, larger, broken):
        answer = server.post("/update_weights_from_disk", {"model_path": str(path)})
        assert answer.status_code == 400, path
        got = answer.json()
        assert got["success"] is False and got["num_paused_requests"] == 0
        assert path.name in got["message"] and got["message"].endswith("The old weights stay.")
    after = generate(server)
    assert after["output_ids"] == before["output_ids"] and after["meta_info"]["weight_version"] == "default"
    assert server.http.get("/health").status_code == 200
    for body, param in (
        ({}, "model_path"),
        ({"model_path": ""}, "model_path"),
        ({"model_path": "x", "load_format": "dummy"}, "load_format"),
        ({"model_path": "x", "flush_cache": False}, "flush_cache"),
        ({"model_path": "x", "is_async": True}, "is_async"),
    ):
        answer = server.post("/update_weights_from_disk", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_open_requests_end_with_the_old_weights_or_are_aborted(serve: Callable[..., Any], other_weights: Path, chat_model: Path) -> None:
    server = serve()
    want = generate(server, 300)["output_ids"]
    for abort in (False, True):
        answers: list[Any] = []
        thread = threading.Thread(target=lambda into: into.append(generate(server, 300)), args=(answers,))
        thread.start()
        until = time.monotonic() + 30
        while not server.stats()["running"]:
            assert time.monotonic() < until
        got = server.post("/update_weights_from_disk", {"model_path": str(other_weights), "abort_all_requests": abort}).json()
        assert got["success"] is True
        thread.join()
        (answer,) = answers
        assert answer["output_ids"] == want[: len(answer["output_ids"])]
        assert answer["meta_info"]["finish_reason"]["type"] == ("abort" if abort else "length")
        assert generate(server, 300)["output_ids"] != want
        assert server.post("/update_weights_from_disk", {"model_path": str(chat_model)}).json()["success"] is True


def test_control_needs_the_admin_key(serve: Callable[..., Any]) -> None:
    server = serve("--api-key", "user", "--admin-api-key", "admin")
    asked = (("GET", "/flush_cache"), ("POST", "/flush_cache"), ("POST", "/abort_request"), ("POST", "/update_weights_from_disk"))
    for method, path in asked:
        body = {"rid": "nobody"} if path == "/abort_request" else {"model_path": "/nowhere"}
        statuses = [
            server.http.request(method, path, json=body, headers=headers).status_code
            for headers in ({}, {"x-api-key": "user"}, {"x-api-key": "admin"})
        ]
        assert statuses == [401, 403, 400 if "weights" in path else 200], path
