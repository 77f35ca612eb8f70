"""What the server says of itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sidestream

KEY, ADMIN = "key-that-nobody-may-see", "admin-key-that-nobody-may-see"
REST = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_total_reqs": 0, "num_used_tokens": 0, "token_usage": 0.0}


def get(server: Any, path: str) -> Any:
    answer = server.http.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_the_model_is_described_as_sglang_does(server: Any, chat_model: Path, path: str) -> None:
    got = get(server, path)
    assert got.pop("num_parameters") > 100_000
    assert got == {
        "model_path": str(chat_model),
        "tokenizer_path": str(chat_model),
        "served_model_name": str(chat_model),
        "weight_version": "default",
        "is_generation": True,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "preferred_sampling_params": None,
        "context_length": 512,
        "vocab_size": 320,
        "num_layers": 4,
        "hidden_size": 64,
        "dtype": "float32",
        "device": "cpu",
        "backend": "Decoder",
    }


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_the_server_is_described(server: Any, path: str) -> None:
    got = get(server, path)
    assert got["version"] == sidestream.__version__ and got["status"] == "ok"
    assert 0 < got["uptime_seconds"] < 3600
    assert (got["max_total_num_tokens"], got["max_running_requests"]) == (8192, 16)
    assert got["facts"]["kv_tokens"] == 8192 and got["facts"]["page_size"] == 16
    assert got["config"]["kv_tokens"] == 8192 and got["config"]["hidden_states"] == "full" and got["config"]["port"] == 0
    assert set(got["stats"]) >= {"d2h", "running", "waiting", "steps", "kv_tokens_total", "kv_tokens_free", "kv_tokens_cached", "requests"}
    assert got["internal_states"] == [got["load"]]
    assert set(get(server, "/model_info")) < set(got)


def test_statistics_are_of_this_moment(server: Any) -> None:
    before = server.stats()
    server.post("/generate", {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}})
    after = server.stats()
    assert after["requests"] == before["requests"] + 1
    assert after["generation_tokens"] == before["generation_tokens"] + 4


def test_the_load_is_told_in_both_shapes(server: Any) -> None:
    (load,) = get(server, "/v1/loads")["loads"]
    assert {name: load[name] for name in REST} == REST
    assert (load["max_total_num_tokens"], load["max_running_requests"], load["dp_rank"]) == (8192, 16, 0)
    assert get(server, "/get_load") == [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}]
    body = {"rid": "load", "text": "a", "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
    thread = threading.Thread(target=lambda: server.post("/generate", body))
    thread.start()
    until = time.monotonic() + 30
    while not (load := get(server, "/v1/loads")["loads"][0])["num_running_reqs"]:
        assert time.monotonic() < until
    assert load["num_used_tokens"] > 0 and load["token_usage"] == round(load["num_used_tokens"] / 8192, 6)
    assert get(server, "/get_load")[0]["num_reqs"] == 1
    server.post("/abort_request", {"rid": "load"})
    thread.join()


def test_keys_are_not_told(serve: Callable[..., Any]) -> None:
    server = serve("--api-key", KEY, "--admin-api-key", ADMIN, "--served-model-name", "mine")
    for path in ("/server_info", "/model_info", "/tokenizer_info", "/v1/loads", "/get_load"):
        assert server.http.get(path).status_code == 401, path
        answer = server.http.get(path, headers={"Authorization": f"Bearer {KEY}"})
        assert answer.status_code == 200
        assert KEY not in answer.text and ADMIN not in answer.text
    got = server.http.get("/server_info", headers={"x-api-key": KEY}).json()
    assert got["config"]["api_key"] is True and got["config"]["admin_api_key"] is True
    assert got["served_model_name"] == "mine"


def test_the_root_leads_a_browser_to_the_routes(server: Any) -> None:
    assert get(server, "/") == {"name": "sidestream", "version": sidestream.__version__, "docs": "/docs", "openapi": "/openapi.json"}
    answer = server.http.get("/", headers={"Accept": "text/html,application/xhtml+xml"})
    assert (answer.status_code, answer.headers["location"]) == (307, "docs")
