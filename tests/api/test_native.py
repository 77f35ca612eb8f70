"""`/generate`: SGLang's fields and shapes, with the numbers of an engine in this process."""

from __future__ import annotations

import base64
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load as load_tensors

from sidestream import Engine, Output, SamplingParams
from sidestream.output import JSON_MINUS_INFINITY, output_to_dict

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def engine(chat_model: Path) -> Iterator[Engine]:
    with Engine(str(chat_model), dtype="float32", threads=1, kv_tokens=4096, log_level="warning") as opened:
        yield opened


@pytest.fixture(scope="module")
def exact_engine(chat_model: Path) -> Iterator[Engine]:
    with Engine(str(chat_model), dtype="bfloat16", kv_tokens=4096, log_level="warning") as opened:
        yield opened


def ask(server: Any, prompt: Any = PROMPT, **body: Any) -> Any:
    field = "text" if isinstance(prompt, str) or (prompt and isinstance(prompt[0], str)) else "input_ids"
    answer = server.post("/generate", {field: prompt, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return json.loads(answer.content, parse_constant=pytest.fail)


def events(server: Any, **body: Any) -> list[Any]:
    """What a stream says, without its end."""
    with server.http.stream("POST", "/generate", json={"stream": True, **body}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:], parse_constant=pytest.fail) for line in lines[:-1]]


def greedy(count: int, **more: Any) -> dict[str, Any]:
    return {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True, **more}


def near(got: Any, want: Any) -> None:
    """Nested lists with the same numbers to 1e-4."""
    if isinstance(want, list):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            near(one, other)
    elif isinstance(want, float):
        assert got == pytest.approx(want, abs=1e-4)
    else:
        assert got == want


def array(data: str, dtype: str, shape: list[int]) -> Any:
    return np.frombuffer(base64.b64decode(data), dtype).reshape(shape)


def raw(states: dict[str, Any]) -> bytes:
    return base64.b64decode(states["data"])


def test_an_answer_has_exactly_these_fields(server: Any, engine: Engine) -> None:
    server.post("/flush_cache", {})
    got = ask(server, rid="plain", sampling_params=greedy(6))
    want = engine.generate(PROMPT, SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True))
    assert isinstance(want, Output)
    latency = got["meta_info"].pop("e2e_latency")
    assert 0 < latency < 60
    assert got == {
        "text": want.text,
        "output_ids": list(want.token_ids),
        "meta_info": {
            "id": "plain",
            "finish_reason": {"type": "length", "length": 6},
            "prompt_tokens": want.prompt_tokens,
            "completion_tokens": 6,
            "cached_tokens": 0,
            "weight_version": "default",
            "copied_bytes": {"token": 24, "logprob": 0, "hidden": 0},
        },
    }


def test_text_and_ids_are_the_same_prompt(server: Any, engine: Engine) -> None:
    ids = engine.tokenizer.encode(PROMPT)
    text = ask(server, sampling_params=greedy(5), return_prompt_token_ids=True)
    same = ask(server, ids, sampling_params=greedy(5), return_prompt_token_ids=True)
    assert text["output_ids"] == same["output_ids"]
    assert text["prompt_token_ids"] == same["prompt_token_ids"] == ids


def test_the_reason_of_the_end_is_an_object(server: Any, engine: Engine) -> None:
    free = ask(server, sampling_params=greedy(8))["output_ids"]
    token = free[3]
    first = free.index(token)
    got = ask(server, sampling_params=greedy(8, stop_token_ids=[token]))
    assert got["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert got["output_ids"] == free[: first + 1]
    eos = engine.tokenizer.eos_token_ids[0]
    got = ask(server, sampling_params={"max_new_tokens": 8, "logit_bias": {str(eos): 100}, "temperature": 0})
    assert (got["text"], got["output_ids"]) == ("", [eos])
    assert got["meta_info"]["finish_reason"] == {"type": "stop", "matched": eos}
    text = ask(server, sampling_params=greedy(8))["text"]
    stop = text[2:4]
    got = ask(server, sampling_params=greedy(8, stop=stop))
    assert got["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert got["text"] == text[: text.index(stop)]
    got = ask(server, sampling_params={"max_new_tokens": 0})
    assert (got["text"], got["output_ids"]) == ("", [])
    assert got["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_logprobs_are_sglangs_lists(server: Any, engine: Engine) -> None:
    outputs = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3, "token_ids_logprob": [7, 300]}
    got = ask(server, sampling_params=greedy(5), return_text_in_logprobs=True, **outputs)
    want = engine.generate(PROMPT, SamplingParams(max_new_tokens=5, temperature=0.0, ignore_eos=True), **outputs)
    assert isinstance(want, Output) and want.logprobs is not None
    ids, text_of = engine.tokenizer.encode(PROMPT), engine.tokenizer.token_text
    meta, logprobs = got["meta_info"], want.logprobs

    def triple(value: float | None, token: int) -> list[Any]:
        return [value, token, text_of(token)]

    def rows(given: Any) -> list[Any]:
        return [None if row is None else [triple(*pair) for pair in row] for row in given]

    assert meta["logprob_start_len"] == 0
    near(meta["input_token_logprobs"], list(map(triple, logprobs.input, ids)))
    assert meta["input_token_logprobs"][0] == [None, ids[0], text_of(ids[0])]
    near(meta["output_token_logprobs"], list(map(triple, logprobs.output, want.token_ids)))
    near(meta["input_top_logprobs"], rows(logprobs.input_top))
    near(meta["output_top_logprobs"], rows(logprobs.output_top))
    near(meta["input_token_ids_logprobs"], rows(logprobs.input_ids))
    near(meta["output_token_ids_logprobs"], rows(logprobs.output_ids))
    for chosen, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert chosen == top[0], "the very same number"


def test_only_the_lists_that_were_asked_for_are_there(server: Any) -> None:
    meta = ask(server, sampling_params=greedy(2), return_logprob=True)["meta_info"]
    assert {name for name in meta if "logprob" in name} == {"logprob_start_len", "input_token_logprobs", "output_token_logprobs"}
    assert meta["input_token_logprobs"] == [] and meta["logprob_start_len"] == -1
    assert [entry[2] for entry in meta["output_token_logprobs"]] == [None, None]
    meta = ask(server, sampling_params=greedy(2), return_logprob=False, logprob_start_len=-1, return_routed_experts=False, lora_path=None)
    assert not any("logprob" in name for name in meta["meta_info"]), "as SGLang's benchmark asks"


def test_minus_infinity_is_a_number_of_json(server: Any) -> None:
    sampling = {"max_new_tokens": 2, "temperature": 1.0, "top_k": 1, "ignore_eos": True}
    meta = ask(server, sampling_params=sampling, top_logprobs_num=4, logprobs_mode="processed")["meta_info"]
    for top in meta["output_top_logprobs"]:
        assert [value for value, _, _ in top] == [0.0] + [JSON_MINUS_INFINITY] * 3
    meta = ask(server, sampling_params=sampling, top_logprobs_num=4, logprobs_mode="processed", logprobs_format="flat")["meta_info"]
    top = meta["logprobs"]["output_top"]
    assert array(top["logprobs"], "<f4", top["shape"]).tolist() == [[0.0] + [-math.inf] * 3] * 2


def test_flat_logprobs_hold_the_same_numbers(server: Any, engine: Engine) -> None:
    outputs = {"logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [9]}
    server.post("/flush_cache", {})
    lists = ask(server, sampling_params=greedy(4), **outputs)["meta_info"]
    server.post("/flush_cache", {})
    flat = ask(server, sampling_params=greedy(4), logprobs_format="flat", **outputs)["meta_info"]
    assert not any(name.endswith("logprobs") and name != "logprobs" for name in flat)
    assert set(flat["logprobs"]) == {"input", "output", "input_top", "output_top", "input_ids", "output_ids"}
    for side, name in (("input", "input_token_logprobs"), ("output", "output_token_logprobs")):
        part = flat["logprobs"][side]
        values = array(part["data"], "<f4", part["shape"])
        assert part["dtype"] == "float32"
        near([None if math.isnan(value) else value for value in values.tolist()], [entry[0] for entry in lists[name]])
    for side, name in (
        ("input_top", "input_top_logprobs"),
        ("output_top", "output_top_logprobs"),
        ("output_ids", "output_token_ids_logprobs"),
    ):
        part = flat["logprobs"][side]
        values, ids = array(part["logprobs"], "<f4", part["shape"]), array(part["token_ids"], "<i4", part["shape"])
        for value, token, row in zip(values.tolist(), ids.tolist(), lists[name], strict=True):
            if row is None:
                assert all(map(math.isnan, value)) and token == [-1, -1]
            else:
                near(value, [entry[0] for entry in row])
                assert token == [entry[1] for entry in row]


def test_a_list_of_prompts_gives_a_list_of_answers(server: Any, engine: Engine) -> None:
    prompts = ["one", "two and three", "four"]
    sampling = [greedy(3), greedy(4, n=2), greedy(1)]
    got = ask(
        server,
        prompts,
        rid="list",
        sampling_params=sampling,
        return_logprob=[False, True, None],
        top_logprobs_num=[0, 2, None],
        token_ids_logprob=[None, None, [5, 6]],
        return_hidden_states=["last", False, True],
        hidden_states_layers=[[0, -1], None, [2]],
        hidden_states_format="base64",
    )
    assert [each["meta_info"]["id"] for each in got] == ["list_0", "list_1", "list_1", "list_2"]
    assert [len(each["output_ids"]) for each in got] == [3, 4, 4, 1]
    want = engine.generate(prompts, [SamplingParams(**each) for each in sampling])
    assert isinstance(want, list)
    assert [(each["text"], each["output_ids"]) for each in got] == [(each.text, list(each.token_ids)) for each in want]
    assert ["output_token_logprobs" in each["meta_info"] for each in got] == [False, True, True, True]
    assert [len(row) for row in got[1]["meta_info"]["output_top_logprobs"]] == [2] * 4
    assert [token for _, token, _ in got[3]["meta_info"]["output_token_ids_logprobs"][0]] == [5, 6]
    shapes = [each["meta_info"].get("hidden_states", {}).get("shape") for each in got]
    assert shapes == [[1, 2, 64], None, None, [len(engine.tokenizer.encode("four")), 1, 64]]
    assert len(ask(server, ["one"], sampling_params=greedy(1))) == 1, "a list of one is a list"
    assert len(ask(server, "one", sampling_params=greedy(1, n=3))) == 3


def test_hidden_states_are_the_engines_byte_for_byte(exact_server: Any, exact_engine: Engine) -> None:
    sampling = SamplingParams(max_new_tokens=5, temperature=0.0, ignore_eos=True)
    for outputs in (
        {"return_hidden_states": True},
        {"return_hidden_states": "last"},
        {"return_hidden_states": True, "hidden_states_layers": [0, 2, -1, 2], "hidden_states_start": 3},
        {"return_hidden_states": True, "hidden_states_start": -1, "hidden_states_dtype": "float32"},
        {"return_hidden_states": True, "hidden_states_start": 4000},
    ):
        want = exact_engine.generate(PROMPT, sampling, **outputs)
        assert isinstance(want, Output) and want.hidden_states is not None
        states = ask(exact_server, sampling_params=greedy(5), hidden_states_format="base64", **outputs)["meta_info"]["hidden_states"]
        assert set(states) == {"dtype", "shape", "layers", "positions", "data"}
        assert states["dtype"] == want.hidden_states.dtype and states["shape"] == list(want.hidden_states.shape)
        assert states["positions"] == list(want.hidden_states.positions) and states["layers"] == list(want.hidden_states.layers)
        assert raw(states) == want.hidden_states.raw.tobytes()


def test_hidden_states_as_json_have_sglangs_shape(exact_server: Any, exact_engine: Engine) -> None:
    want = exact_engine.generate(
        PROMPT, SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True), return_hidden_states=True, hidden_states_layers=[-1, 1]
    )
    assert isinstance(want, Output) and want.hidden_states is not None
    numbers, prompt = want.hidden_states.numbers(), want.prompt_tokens
    states = ask(exact_server, sampling_params=greedy(4), return_hidden_states=True)["meta_info"]["hidden_states"]
    assert len(states) == 1 + 3, "the prompt's rows, then one row per step"
    assert np.array_equal(np.array(states[0], np.float32), numbers[:prompt, 0])
    assert np.array_equal(np.array(states[1:], np.float32), numbers[prompt:, 0])
    states = ask(exact_server, sampling_params=greedy(4), return_hidden_states=True, hidden_states_layers=[-1, 1])
    states = states["meta_info"]["hidden_states"]
    assert np.array_equal(np.array(states["data"], np.float32), numbers)
    assert states["shape"] == list(numbers.shape) and states["layers"] == [-1, 1]


def test_a_safetensors_answer_is_one_body(exact_server: Any, exact_engine: Engine, tmp_path: Path) -> None:
    body = {
        "sampling_params": greedy(3),
        "return_hidden_states": True,
        "hidden_states_format": "safetensors",
        "hidden_states_layers": [1, -1],
    }
    answer = exact_server.post("/generate", {"text": PROMPT, **body})
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/octet-stream"
    want = exact_engine.generate(
        PROMPT, SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True), return_hidden_states=True, hidden_states_layers=[1, -1]
    )
    assert isinstance(want, Output) and want.hidden_states is not None
    assert torch.equal(load_tensors(answer.content)["hidden_states"], want.hidden_states.data)
    (tmp_path / "answer").write_bytes(answer.content)
    with safe_open(tmp_path / "answer", "pt") as file:
        told = json.loads(file.metadata()["answer"])
    assert told["text"] == want.text
    states = told["meta_info"]["hidden_states"]
    assert states["tensor"] == "hidden_states" and states["positions"] == list(want.hidden_states.positions)
    answer = exact_server.post("/generate", {"text": ["a", "b"], **body, "sampling_params": [greedy(1, n=2), greedy(2)]})
    tensors = load_tensors(answer.content)
    assert sorted(tensors) == ["0.hidden_states", "1.hidden_states", "2.hidden_states"]
    assert tensors["2.hidden_states"].shape == (2, 2, 64)


OUTPUTS = {
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 2,
    "token_ids_logprob": [3],
    "return_hidden_states": True,
    "hidden_states_format": "base64",
}
LISTS = [f"{side}_{kind}_logprobs" for side in ("input", "output") for kind in ("token", "top", "token_ids")]


def test_a_stream_repeats_what_it_said(exact_server: Any) -> None:
    exact_server.post("/flush_cache", {})
    whole = ask(exact_server, sampling_params=greedy(7), **OUTPUTS)
    parts = events(exact_server, text=PROMPT, sampling_params=greedy(7), **OUTPUTS)
    assert len(parts) > 3 and {part["index"] for part in parts} == {0}
    for before, after in pairwise(parts):
        assert after["text"].startswith(before["text"]) and before["meta_info"]["finish_reason"] is None
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        for name in LISTS:
            assert after["meta_info"][name][: len(before["meta_info"][name])] == before["meta_info"][name]
        assert len(after["meta_info"]["output_token_logprobs"]) == len(after["output_ids"]) == after["meta_info"]["completion_tokens"]
    last = parts[-1]
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
    for name in (*LISTS, "finish_reason", "copied_bytes", "cached_tokens", "prompt_tokens", "completion_tokens"):
        assert last["meta_info"][name] == whole["meta_info"][name]
    assert "e2e_latency" in last["meta_info"] and "e2e_latency" not in parts[0]["meta_info"]
    rows = [part["meta_info"]["hidden_states"] for part in parts if "hidden_states" in part["meta_info"]]
    assert [position for each in rows for position in each["positions"]] == whole["meta_info"]["hidden_states"]["positions"]
    assert b"".join(map(raw, rows)) == raw(whole["meta_info"]["hidden_states"]), "rows are sent once"


def test_an_incremental_stream_joins_to_the_whole(exact_server: Any) -> None:
    exact_server.post("/flush_cache", {})
    prompts, sampling = ["one", "a longer one"], greedy(6, n=2, temperature=1.0, seed=4)
    wanted = {**OUTPUTS, "hidden_states_format": "json"}
    whole = ask(exact_server, prompts, sampling_params=sampling, **wanted)
    parts = events(exact_server, text=prompts, sampling_params=sampling, incremental=True, **wanted)
    assert {part["index"] for part in parts} == {0, 1, 2, 3}
    for index, want in enumerate(whole):
        mine = [part for part in parts if part["index"] == index]
        assert "".join(part["text"] for part in mine) == want["text"]
        assert [token for part in mine for token in part["output_ids"]] == want["output_ids"]
        for name in (*LISTS, "hidden_states"):
            assert [entry for part in mine for entry in part["meta_info"].get(name, [])] == want["meta_info"][name], name
        assert mine[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 6}


@pytest.mark.parametrize("incremental", [False, True])
def test_flat_logprobs_stream_too(exact_server: Any, incremental: bool) -> None:
    wanted = {name: value for name, value in OUTPUTS.items() if "hidden" not in name} | {"logprobs_format": "flat"}
    whole = ask(exact_server, sampling_params=greedy(5), **wanted)["meta_info"]["logprobs"]
    parts = events(exact_server, text=PROMPT, sampling_params=greedy(5), incremental=incremental, **wanted)
    told = [part["meta_info"]["logprobs"] for part in parts]
    if not incremental:
        assert told[-1] == whole
        assert told[0]["output"]["shape"] == [1] and told[0]["input"] == whole["input"]
        return
    data = b"".join(base64.b64decode(part["output"]["data"]) for part in told)
    assert data == base64.b64decode(whole["output"]["data"])
    ids = b"".join(base64.b64decode(part["output_top"]["token_ids"]) for part in told)
    assert ids == base64.b64decode(whole["output_top"]["token_ids"])
    assert [("input" in part) for part in told] == [True] + [False] * (len(told) - 1)


def test_the_last_row_of_a_stream_comes_once(exact_server: Any) -> None:
    whole = ask(exact_server, sampling_params=greedy(4), return_hidden_states="last")["meta_info"]["hidden_states"]
    parts = events(exact_server, text=PROMPT, sampling_params=greedy(4), return_hidden_states="last")
    assert [part["meta_info"].get("hidden_states") for part in parts] == [None] * (len(parts) - 1) + [whole]
    parts = events(exact_server, text=PROMPT, sampling_params=greedy(2), return_hidden_states=True, hidden_states_start=99)
    assert [part["meta_info"].get("hidden_states", {}).get("shape") for part in parts] == [None, [0, 1, 64]]


def test_a_seed_has_two_names(server: Any) -> None:
    def text(**seed: int) -> str:
        return str(ask(server, sampling_params={"max_new_tokens": 12, "ignore_eos": True, **seed})["text"])

    assert text(seed=5) == text(sampling_seed=5) == text(seed=5, sampling_seed=5)
    assert text(seed=6) != text(seed=5)


def test_an_abort_is_a_reason_of_the_end(server: Any) -> None:
    got: list[Any] = []
    body = {"rid": "to-abort", "sampling_params": greedy(480)}
    thread = threading.Thread(target=lambda: got.append(ask(server, **body)))
    thread.start()
    until = time.monotonic() + 30
    while not server.post("/abort_request", {"rid": "to-abort"}).json()["num_requests"]:
        assert time.monotonic() < until
        time.sleep(0.005)
    thread.join(timeout=60)
    meta = got[0]["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": f"the request was aborted after {meta['completion_tokens']} tokens"}
    assert meta["completion_tokens"] == len(got[0]["output_ids"]) < 480


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({}, "text", "got neither of text and input_ids"),
    ({"text": "a", "input_ids": [1]}, "text", "got both"),
    ({"text": ""}, "text", "empty prompt"),
    ({"text": ["a", ""]}, "text.1", "empty prompt"),
    ({"text": []}, "text", "between 1 and 4096"),
    ({"text": 5}, "text", "got 5"),
    ({"input_ids": [5, [6]]}, "input_ids.1", "must be a token id"),
    ({"input_ids": [[5], 6]}, "input_ids.1", "must be a prompt of its own"),
    ({"input_ids": [5, 320]}, "input_ids", "got token id 320, must be between 0 and 319"),
    ({"input_ids": [[5], [-1]]}, "input_ids.1", "got token id -1"),
    ({"input_ids": [5] * 513}, "input_ids", "maximum context length is 512 tokens"),
    ({"text": "a", "temperature": 0}, "temperature", "It goes into sampling_params."),
    ({"text": "a", "sampling_params": {"return_logprob": True}}, "sampling_params.return_logprob", "It goes beside sampling_params."),
    ({"text": "a", "sampling_params": {"max_tokens": 1}}, "sampling_params.max_tokens", "Did you mean max_new_tokens?"),
    ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature", "got -1"),
    ({"text": "a", "sampling_params": {"min_new_tokens": 200}}, "sampling_params.min_new_tokens", "at most max_new_tokens, 128"),
    ({"text": "a", "sampling_params": {"stop_token_ids": [10**7]}}, "sampling_params.stop_token_ids", "10000000"),
    ({"text": "a", "sampling_params": {"logit_bias": {"AI": 1}}}, "sampling_params.logit_bias", "AI"),
    ({"text": "a", "sampling_params": {"seed": 1, "sampling_seed": 2}}, "sampling_params.seed", "sampling_seed=2"),
    ({"text": ["a", "b"], "sampling_params": [{}, {"min_new_tokens": 200}]}, "sampling_params.1.min_new_tokens", "got 200"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params", "got 1 values for 2 prompts"),
    ({"text": ["a", "b"], "top_logprobs_num": [1]}, "top_logprobs_num", "got 1 values for 2 prompts"),
    ({"text": "a", "top_logprobs_num": 101}, "top_logprobs_num", "got 101"),
    ({"text": "a", "token_ids_logprob": [-1]}, "token_ids_logprob.0", "got -1"),
    ({"text": "a", "token_ids_logprob": [10**7]}, "token_ids_logprob", "10000000"),
    ({"text": "a", "hidden_states_layers": [1]}, "hidden_states_layers", "without return_hidden_states"),
    ({"text": "a", "hidden_states_format": "base64"}, "hidden_states_format", "without return_hidden_states"),
    ({"text": "a", "return_hidden_states": "first"}, "return_hidden_states", "must be one of true, false"),
    ({"text": "a", "return_hidden_states": True, "hidden_states_format": "safetensors", "stream": True}, "hidden_states_format", "stream"),
    ({"text": "a", "logprobs_format": "flat"}, "logprobs_format", "without return_logprob"),
    (
        {"text": "a", "return_logprob": True, "logprobs_format": "flat", "return_text_in_logprobs": True},
        "return_text_in_logprobs",
        "arrays hold no texts",
    ),
    ({"text": "a", "incremental": True}, "incremental", "without stream"),
    ({"text": "a", "rid": ""}, "rid", "length"),
    ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid", "more than one prompt"),
    ({"text": "a", "image_data": "x"}, "image_data", "the model reads text only"),
    ({"text": "a", "lora_path": "x"}, "lora_path", "no LoRA adapters"),
    ({"text": "a", "session_params": {"id": "x"}}, "session_params", "no sessions"),
    ({"text": "a", "custom_logit_processor": "x"}, "custom_logit_processor", "no custom logit processors"),
    ({"text": "a", "priority": 3}, "priority", "no priorities"),
    *(
        ({"text": "a", "sampling_params": {name: value}}, f"sampling_params.{name}", words)
        for name, value, words in (
            ("json_schema", "x", "no JSON"),
            ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "Unsatisfiable"),
            ("regex", "[^\\s\\S]", "admits no text"),
            ("ebnf", "x", "cannot be read"),
            ("structural_tag", "[]", "structural_tag"),
            ("stop_regex", "(", "regular expression"),
            ("stop_regex", "a*", "empty text"),
            ("require_reasoning", True, "without a grammar"),
            ("max_thinking_tokens", 5, "does not reason"),
        )
    ),
    ({"text": "a", "sampling_params": {"no_stop_trim": True}}, "sampling_params.no_stop_trim", "output_ids have all of it"),
    ({"text": "a", "sampling_params": {"custom_params": {"a": 1}}}, "sampling_params.custom_params", "no custom logit processors"),
]


@pytest.mark.parametrize(("body", "param", "words"), REFUSED, ids=[f"{param}-{at}" for at, (_, param, _) in enumerate(REFUSED)])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_cannot_be_done_is_refused_by_name(server: Any, body: dict[str, Any], param: str, words: str, stream: bool) -> None:
    if stream and "incremental" in body:
        return
    answer = server.post("/generate", {**body, "stream": stream or body.get("stream")})
    assert answer.status_code == 400, "an error before the first event is a status"
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == ("context_length_exceeded" if "maximum context" in words else "invalid_value")


def test_fields_that_say_nothing_are_taken(server: Any) -> None:
    null = dict.fromkeys(("rid", "stream", "return_logprob", "token_ids_logprob", "image_data", "session_params", "model", "lora_path"))
    nothing = {"spaces_between_special_tokens": True, "no_stop_trim": False, "json_schema": None, "stop": None, "custom_params": {}}
    got = ask(server, sampling_params=greedy(2, **nothing), log_metrics=True, custom_labels={"a": "b"}, priority=0, **null)
    assert len(got["output_ids"]) == 2
    answer = server.post("/generate", {"text": "a", "model": "another"})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


def test_several_requests_may_have_one_request_id(server: Any) -> None:
    answers: list[Any] = []

    def post() -> None:
        answers.append(server.http.post("/generate", json={"text": "a", "sampling_params": greedy(40)}, headers={"X-Request-Id": "same"}))

    threads = [threading.Thread(target=post) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 4
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
    assert len({answer.json()["meta_info"]["id"] for answer in answers}) == 4


@pytest.mark.parametrize(
    ("ceiling", "allowed"), [("off", [False]), ("last", [False, "last"]), ("full", [False, "last", True])], ids=["off", "last", "full"]
)
def test_the_operator_has_a_ceiling(serve: Callable[..., Any], ceiling: str, allowed: list[Any]) -> None:
    server = serve("--hidden-states", ceiling)
    for mode in (False, "last", True):
        for value in (mode, [mode, False]):
            texts = ["a", "b"] if isinstance(value, list) else "a"
            answer = server.post("/generate", {"text": texts, "return_hidden_states": value, "sampling_params": greedy(1)})
            assert answer.status_code == (200 if mode in allowed else 400), (mode, value)
            if answer.status_code == 400:
                error = answer.json()["error"]
                assert error["param"] == "return_hidden_states" and f"--hidden-states {ceiling}" in error["message"]


def test_a_list_may_be_longer_than_the_queue(serve: Callable[..., Any], engine: Engine) -> None:
    server = serve("--max-running-requests", "2", "--max-queued-requests", "3")
    prompts = [f"number {number}" for number in range(13)]
    hidden: list[Any] = [False] * 11 + ["last", False]
    got = ask(server, prompts, sampling_params=greedy(3, n=2), return_hidden_states=hidden, hidden_states_layers=[0, 1])
    want = engine.generate(prompts, SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True, n=2))
    assert isinstance(want, list)
    assert [each["output_ids"] for each in got] == [list(each.token_ids) for each in want]
    assert ["hidden_states" in each["meta_info"] for each in got] == [False] * 22 + [True] * 2 + [False] * 2
    answer = server.post("/generate", {"text": prompts, "stream": True, "sampling_params": greedy(3)})
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"


def test_the_schema_shows_the_limits(server: Any) -> None:
    document = server.http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert document["paths"]["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/Generate")
    fields = schemas["Generate"]["properties"]
    assert fields["top_logprobs_num"]["anyOf"][0]["maximum"] == 100
    assert fields["image_data"]["enum"] == [None, False, 0, "", [], {}]
    assert schemas["Sampling"]["properties"]["n"]["anyOf"][0]["maximum"] == 128
    assert set(schemas["MetaInfo"]["properties"]) >= {"finish_reason", "output_token_logprobs", "hidden_states", "copied_bytes"}


def test_answers_match_the_outputs_of_the_engine(server: Any, engine: Engine) -> None:
    """Every number of an output is in an answer, under SGLang's name."""
    want = engine.generate(PROMPT, SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True), return_logprob=True)
    assert isinstance(want, Output)
    got = ask(server, sampling_params=greedy(2), return_logprob=True)
    plain = output_to_dict(want)
    assert got["output_ids"] == plain["token_ids"]
    near([entry[0] for entry in got["meta_info"]["output_token_logprobs"]], plain["logprobs"]["output"])
    assert got["meta_info"]["copied_bytes"] == plain["copied_bytes"]
