"""`POST /v1/responses`, against the chat route: the same conversation gets the same text, logprobs and rows."""

from __future__ import annotations

import base64
import json
import os
import signal
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

USER = {"role": "user", "content": "The quick brown fox"}
SYSTEM = {"role": "system", "content": "Once upon a time"}
GREEDY = {"temperature": 0.0, "ignore_eos": True}
ORDER = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
ENDING = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


def chat(server: Any, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/chat/completions", {"messages": messages, **GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def ask(server: Any, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post("/v1/responses", {**GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def events_of(server: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of each event; every one is named by its type, and they are numbered."""
    answer = server.post("/v1/responses", {**GREEDY, **body, "stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.text
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    return events


def error_of(server: Any, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    answer = server.post("/v1/responses", body)
    assert answer.status_code == status, answer.text
    return dict(answer.json()["error"])


def test_a_text_is_a_users_message(server: Any) -> None:
    expected = chat(server, [USER], max_tokens=6)
    answer = ask(server, {"input": USER["content"], "max_output_tokens": 6, "metadata": {"a": "b"}, "user": "me"})
    (message,) = answer["output"]
    assert message["content"] == [
        {"type": "output_text", "text": expected["choices"][0]["message"]["content"], "annotations": [], "logprobs": []}
    ]
    assert (message["type"], message["role"], message["status"], message["matched_stop"]) == ("message", "assistant", "incomplete", None)
    assert answer["id"].startswith("resp_") and message["id"] == "msg_" + answer["id"].removeprefix("resp_")
    assert (answer["object"], answer["status"], answer["incomplete_details"]) == ("response", "incomplete", {"reason": "max_output_tokens"})
    prompt = expected["usage"]["prompt_tokens"]
    cached = answer["usage"].pop("input_tokens_details")["cached_tokens"]
    assert 0 <= cached < prompt
    assert answer["usage"] == {
        "input_tokens": prompt,
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + 6,
    }
    assert (answer["metadata"], answer["user"], answer["max_output_tokens"], answer["temperature"]) == ({"a": "b"}, "me", 6, 0.0)
    assert (answer["store"], answer["background"], answer["previous_response_id"]) == (False, False, None)
    assert (answer["tools"], answer["tool_choice"], answer["error"], answer["text"]) == ([], "auto", None, {"format": {"type": "text"}})


def test_a_conversation_with_instructions_is_that_of_chat(server: Any) -> None:
    conversation = [SYSTEM, USER, {"role": "assistant", "content": "jumps"}, {"role": "user", "content": "over"}]
    expected = chat(server, conversation, max_tokens=5)
    answer = ask(
        server,
        {
            "instructions": SYSTEM["content"],
            "input": [
                USER,
                {
                    "type": "message",
                    "role": "assistant",
                    "id": "msg_1",
                    "content": [{"type": "output_text", "text": "jumps", "annotations": []}],
                },
                {"role": "user", "content": [{"type": "input_text", "text": "over"}]},
            ],
            "max_output_tokens": 5,
        },
    )
    assert answer["output"][0]["content"][0]["text"] == expected["choices"][0]["message"]["content"]
    assert answer["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]
    developer = ask(server, {"input": [{"role": "developer", "content": SYSTEM["content"]}, *conversation[1:]], "max_output_tokens": 5})
    assert developer["output"][0]["content"] == answer["output"][0]["content"]


def test_an_answer_can_be_sent_in_again_as_it_came(server: Any) -> None:
    extras = {"return_hidden_states": "last", "logprob_start_len": 0, "include": ["message.output_text.logprobs"], "stop": "e"}
    first = ask(server, {"input": USER["content"], "max_output_tokens": 4, **extras})
    text = first["output"][0]["content"][0]["text"]
    again = ask(server, {"input": [USER, *first["output"], {"role": "user", "content": "x"}], "max_output_tokens": 4})
    expected = chat(server, [USER, {"role": "assistant", "content": text}, {"role": "user", "content": "x"}], max_tokens=4)
    assert again["output"][0]["content"][0]["text"] == expected["choices"][0]["message"]["content"]


def test_a_stop_string_completes_the_answer(server: Any) -> None:
    whole = ask(server, {"input": USER["content"], "max_output_tokens": 12})["output"][0]["content"][0]["text"]
    stop = whole[len(whole) // 2 :][:2]
    answer = ask(server, {"input": USER["content"], "max_output_tokens": 12, "stop": [stop]})
    (message,) = answer["output"]
    assert message["content"][0]["text"] == whole[: whole.index(stop)]
    assert (answer["status"], answer["incomplete_details"], message["status"], message["matched_stop"]) == (
        "completed",
        None,
        "completed",
        stop,
    )
    assert answer["completed_at"] >= answer["created_at"]


def test_without_a_limit_the_context_is_the_limit(server: Any) -> None:
    answer = ask(server, {"input": USER["content"]})
    assert answer["usage"]["total_tokens"] == 512 and answer["max_output_tokens"] is None
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}


def test_the_stream_has_every_event_in_order(server: Any) -> None:
    body = {"input": USER["content"], "max_output_tokens": 8, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = ask(server, body)
    events = events_of(server, body)
    types = [each["type"] for each in events]
    deltas = [each for each in events if each["type"] == "response.output_text.delta"]
    assert types == [*ORDER, *["response.output_text.delta"] * len(deltas), *ENDING, "response.incomplete"] and len(deltas) > 2
    created, item = events[0]["response"], events[2]["item"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert item == {"id": item["id"], "type": "message", "status": "in_progress", "role": "assistant", "content": []}
    assert events[3]["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    for each in (*deltas, *events[-4:-2]):
        assert (each["item_id"], each["output_index"], each["content_index"]) == (item["id"], 0, 0)
    text, logprobs = whole["output"][0]["content"][0]["text"], whole["output"][0]["content"][0]["logprobs"]
    assert "".join(each["delta"] for each in deltas) == text
    assert len(logprobs) == 8 and [entry["token"] for each in deltas for entry in each["logprobs"]] == [
        entry["token"] for entry in logprobs
    ]
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)
    done, part, ended, last = events[-4:]
    assert done["text"] == text and done["logprobs"] == part["part"]["logprobs"] == [entry for each in deltas for entry in each["logprobs"]]
    assert ended["item"]["content"] == [part["part"]] and part["part"]["text"] == text
    assert last["response"]["output"] == [ended["item"]] and last["response"]["id"] == created["id"]
    assert last["response"]["usage"]["output_tokens"] == 8 and last["response"]["status"] == "incomplete"


def test_a_stream_that_stops_is_completed(server: Any) -> None:
    first = ask(server, {"input": USER["content"], "max_output_tokens": 3})["output"][0]["content"][0]["text"]
    last = events_of(server, {"input": USER["content"], "max_output_tokens": 9, "stop": first[-2:]})[-1]
    assert last["type"] == "response.completed" and last["response"]["status"] == "completed"


def test_logprobs_are_those_of_chat(server: Any) -> None:
    fields = {"logprob_start_len": 2, "top_logprobs_num": 3, "token_ids_logprob": [7, 9]}
    expected = chat(server, [USER], max_tokens=4, logprobs=True, **fields)["choices"][0]["logprobs"]
    (message,) = ask(server, {"input": USER["content"], "max_output_tokens": 4, **fields})["output"]
    for mine, theirs in ((message["content"][0]["logprobs"], expected["content"]), (message["prompt_logprobs"], expected["prompt"])):
        assert [entry["token_id"] for entry in mine] == [entry["token_id"] for entry in theirs] != []
        for one, other in zip(mine, theirs, strict=True):
            assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
            assert len(one["top_logprobs"]) == 3 and [each["token_id"] for each in one["token_ids_logprobs"]] == [7, 9]


def test_flat_logprobs_are_all_in_one_object(server: Any) -> None:
    body = {"input": USER["content"], "max_output_tokens": 4, "top_logprobs": 2, "logprob_start_len": 1}
    listed = ask(server, body)["output"][0]
    (message,) = ask(server, {**body, "logprobs_format": "flat"})["output"]
    flat = message["flat_logprobs"]
    assert message["content"][0]["logprobs"] == [] and "prompt_logprobs" not in message
    assert set(flat) == {"input", "output", "input_top", "output_top"}
    values = np.frombuffer(base64.b64decode(flat["output"]["data"]), "<f4")
    np.testing.assert_allclose(values, [entry["logprob"] for entry in listed["content"][0]["logprobs"]], atol=1e-4)
    deltas = [each for each in events_of(server, {**body, "logprobs_format": "flat"}) if each["type"].endswith(".delta")]
    assert sum(each["flat_logprobs"]["output"]["shape"][0] for each in deltas) == 4
    assert deltas[0]["flat_logprobs"]["input"]["shape"] == flat["input"]["shape"] and "input" not in deltas[1]["flat_logprobs"]


@pytest.mark.parametrize("form", ["json", "base64"])
def test_hidden_states_are_those_of_chat_and_come_in_parts_when_streamed(server: Any, form: str) -> None:
    fields = {"return_hidden_states": True, "hidden_states_layers": [1, -1], "hidden_states_format": form, "hidden_states_start": -1}
    expected = chat(server, [USER], max_tokens=5, **fields)["choices"][0]["hidden_states"]
    (message,) = ask(server, {"input": USER["content"], "max_output_tokens": 5, **fields})["output"]
    events = events_of(server, {"input": USER["content"], "max_output_tokens": 5, **fields})

    def rows(states: dict[str, Any]) -> Any:
        data = states["data"]
        numbers = np.frombuffer(base64.b64decode(data), "<f4") if form == "base64" else np.array(data, np.float32)
        return numbers.reshape(states["shape"])

    assert expected["positions"] == message["hidden_states"]["positions"] and expected["shape"] == [5, 2, 64]
    np.testing.assert_allclose(rows(message["hidden_states"]), rows(expected), atol=1e-4)
    parts = [each["hidden_states"] for each in events if each["type"].endswith("text.delta") and "hidden_states" in each]
    assert [position for part in parts for position in part["positions"]] == expected["positions"] and len(parts) > 1
    np.testing.assert_allclose(np.concatenate([rows(part) for part in parts]), rows(expected), atol=1e-4)
    assert "hidden_states" not in events[-1]["response"]["output"][0], "they went out before"


def test_safetensors_are_the_whole_answer_as_one_body(server: Any) -> None:
    fields = {"return_hidden_states": "last", "hidden_states_format": "safetensors"}
    answer = server.post("/v1/responses", {"input": USER["content"], "max_output_tokens": 3, **GREEDY, **fields})
    assert answer.headers["content-type"] == "application/octet-stream"
    head = json.loads(answer.content[8 : 8 + int.from_bytes(answer.content[:8], "little")])
    told = json.loads(head["__metadata__"]["answer"])
    states = told["output"][0]["hidden_states"]
    assert load(answer.content)[states["tensor"]].shape == tuple(states["shape"]) == (1, 1, 64)
    assert told["usage"]["output_tokens"] == 3


def test_our_own_names_work_too(server: Any) -> None:
    one = ask(server, {"input": USER["content"], "max_output_tokens": 6, "seed": 3, "temperature": 1.5, "top_k": 20})
    other = ask(server, {"input": USER["content"], "max_new_tokens": 6, "seed": 3, "temperature": 1.5, "top_k": 20, "rid": "resp_mine"})
    assert one["output"][0]["content"] == other["output"][0]["content"]
    assert (other["id"], other["output"][0]["id"]) == ("resp_mine", "msg_mine")


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("previous_response_id", "resp_1", "previous_response_id"),
        ("conversation", {"id": "x"}, "conversation"),
        ("prompt", {"id": "x"}, "prompt"),
        ("background", True, "background"),
        ("store", True, "store"),
        ("tools", [{"type": "function", "name": "f"}], "tools"),
        ("tool_choice", "required", "tool_choice"),
        ("tool_choice", {"type": "function", "name": "f"}, "tool_choice"),
        ("text", {"format": {"type": "json_schema", "name": "n"}}, "text.format.schema"),
        ("text", {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}}, "text.format.schema"),
        ("text", {"format": {"type": "xml"}}, "text.format.type"),
        ("text", {"verbosity": "low"}, "text.verbosity"),
        ("reasoning", {"effort": "high"}, "reasoning.effort"),
        ("reasoning", {"summary": "auto"}, "reasoning.summary"),
        ("truncation", "auto", "truncation"),
        ("context_management", [{"type": "compaction"}], "context_management"),
        ("moderation", {"model": "x"}, "moderation"),
        ("include", ["nothing.known"], "include.0"),
        ("n", 2, "n"),
        ("top_logprobs", 21, "top_logprobs"),
        ("max_output_tokens", -1, "max_output_tokens"),
        ("metadata", {"a": 1}, "metadata.*"),
        ("max_tokens", 5, "max_tokens"),
        ("input", [{"type": "item_reference", "id": "x"}], "input.0.type"),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}], "input.0.content.0.type"),
        ("input", [{"role": "tool", "content": "x"}], "input.0.role"),
        ("input", [], "input"),
        ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs"),
        ("logprobs_format", "flat", "logprobs_format"),
        ("hidden_states_layers", [1], "hidden_states_layers"),
    ],
)
def test_what_is_not_done_is_refused_by_its_name(server: Any, field: str, value: Any, param: str) -> None:
    error = error_of(server, {"input": "x", field: value})
    assert (error["param"], error["type"]) == (param, "invalid_request_error") and param.split(".")[0] in error["message"], error


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False, "background": False, "tools": [], "tool_choice": "none", "parallel_tool_calls": False, "max_tool_calls": 3},
        {"text": {"format": {"type": "text"}}, "truncation": "disabled", "reasoning": {}, "include": ["reasoning.encrypted_content"]},
        {"user": "a", "safety_identifier": "b", "prompt_cache_key": "c", "service_tier": "flex", "prompt_cache_retention": "24h"},
        dict.fromkeys(["tools", "store", "text", "reasoning", "include", "metadata", "instructions", "stream", "temperature", "stop"]),
        {"previous_response_id": None, "conversation": None, "prompt": None},
    ],
)
def test_what_changes_nothing_is_accepted(server: Any, fields: dict[str, Any]) -> None:
    assert ask(server, {"input": "x", "max_output_tokens": 1, **fields})["usage"]["output_tokens"] == 1


def test_two_names_of_one_field_must_agree(server: Any) -> None:
    error = error_of(server, {"input": "x", "max_output_tokens": 3, "max_new_tokens": 4})
    assert error["param"] == "max_output_tokens" and "max_new_tokens=4" in error["message"]


def test_too_long_a_conversation_says_how_long_it_may_be(server: Any) -> None:
    for stream in (False, True):
        error = error_of(server, {"input": "x y " * 600, "stream": stream})
        assert error["code"] == "context_length_exceeded" and error["param"] == "input"
        assert "maximum context length is 512 tokens" in error["message"]
    assert error_of(server, {"input": "x", "model": "other"}, 404)["code"] == "model_not_found"


def test_an_aborted_stream_ends_with_what_there_was(server: Any) -> None:
    body = {"input": USER["content"], "rid": "resp_abort", "stream": True, **GREEDY}
    seen: list[dict[str, Any]] = []
    with server.http.stream("POST", "/v1/responses", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                seen.append(json.loads(line.removeprefix("data: ")))
                if len(seen) == 8:
                    assert server.post("/abort_request", {"rid": "resp_abort"}).status_code == 200
    last = seen[-1]["response"]
    assert (seen[-1]["type"], last["status"], last["output"][0]["status"]) == ("response.incomplete", "cancelled", "incomplete")
    assert last["output"][0]["content"][0]["text"] == "".join(each["delta"] for each in seen if each["type"].endswith("text.delta"))
    assert 0 < last["usage"]["output_tokens"] < 450


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/v1/responses", {"input": USER["content"]}, "response.failed"),
        ("/v1/messages", {"messages": [USER], "max_tokens": 500}, "error"),
    ],
)
def test_an_engine_that_dies_ends_the_stream_with_an_event_that_says_so(serve: Any, path: str, body: dict[str, Any], last: str) -> None:
    server = serve()
    seen: list[dict[str, Any]] = []
    with server.http.stream("POST", path, json={**body, **GREEDY, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                seen.append(json.loads(line.removeprefix("data: ")))
                if len(seen) == 6:
                    os.kill(server.engine_pid, signal.SIGKILL)
    assert seen[-1]["type"] == last
    if last == "error":
        assert seen[-1]["error"]["type"] == "api_error" and "signal 9" in seen[-1]["error"]["message"]
    else:
        failed = seen[-1]["response"]
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error") and "signal 9" in failed["error"]["message"]
        assert failed["output"][0]["content"][0]["text"] == "".join(each["delta"] for each in seen if each["type"].endswith("text.delta"))
