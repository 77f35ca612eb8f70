"""`POST /v1/messages` and `/v1/messages/count_tokens`, against the chat route: the same conversation gets the same answer."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

USER = {"role": "user", "content": "The quick brown fox"}
SYSTEM = "Once upon a time"
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def chat(server: Any, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/chat/completions", {"messages": messages, **GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def ask(server: Any, **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/messages", {"messages": [USER], "max_tokens": 6, **GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def events_of(server: Any, **fields: Any) -> list[dict[str, Any]]:
    """The data of each event, which is named by its type."""
    answer = server.post("/v1/messages", {"messages": [USER], "max_tokens": 6, **GREEDY, **fields, "stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.text
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def error_of(server: Any, body: dict[str, Any], status: int = 400, path: str = "/v1/messages") -> dict[str, Any]:
    answer = server.post(path, body)
    assert answer.status_code == status, answer.text
    told = answer.json()
    assert set(told) == {"type", "error", "request_id"} and told["type"] == "error" and set(told["error"]) == {"type", "message"}
    assert told["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    return dict(told["error"])


def test_an_answer_is_that_of_chat(server: Any) -> None:
    expected = chat(server, [USER], max_tokens=6)
    answer = server.post("/v1/messages", {"messages": [USER], "max_tokens": 6, **GREEDY}, headers={"X-Request-Id": "mine"})
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == "mine"
    told = answer.json()
    usage = told.pop("usage")
    assert told == {
        "id": told["id"],
        "type": "message",
        "role": "assistant",
        "model": expected["model"],
        "content": [{"type": "text", "text": expected["choices"][0]["message"]["content"], "citations": None}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
    }
    assert told["id"].startswith("msg_")
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == expected["usage"]["prompt_tokens"]
    assert (usage["output_tokens"], usage["cache_creation_input_tokens"]) == (6, 0)


def test_what_the_cache_had_is_not_counted_twice(server: Any) -> None:
    long = {"role": "user", "content": "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 2}
    first, second = (ask(server, messages=[long])["usage"] for _ in range(2))
    assert second["cache_read_input_tokens"] >= 16
    assert sum(first[name] for name in ("input_tokens", "cache_read_input_tokens")) == sum(
        second[name] for name in ("input_tokens", "cache_read_input_tokens")
    )
    start = events_of(server, messages=[long])[0]["message"]["usage"]
    assert start == {**second, "output_tokens": 0}


def test_the_system_message_and_blocks_are_those_of_chat(server: Any) -> None:
    conversation = [
        {"role": "system", "content": SYSTEM},
        USER,
        {"role": "assistant", "content": "jumps"},
        {"role": "user", "content": "on"},
    ]
    expected = chat(server, conversation, max_tokens=6)["choices"][0]["message"]["content"]
    blocks = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral", "ttl": "5m"}}]
    for system in (SYSTEM, blocks):
        answer = ask(
            server, system=system, messages=[USER, {"role": "assistant", "content": [{"type": "text", "text": "jumps"}]}, conversation[3]]
        )
        assert answer["content"][0]["text"] == expected
    assert ask(server, messages=conversation)["content"][0]["text"] == expected


def test_messages_of_one_role_that_follow_each_other_are_one(server: Any) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}, {"type": "text", "text": "three"}]
    apart = [{"role": "user", "content": "one"}, {"role": "user", "content": parts[1:]}]
    assert ask(server, messages=apart)["content"] == ask(server, messages=[{"role": "user", "content": parts}])["content"]


def test_an_answer_that_was_begun_is_continued(server: Any) -> None:
    begun = [USER, {"role": "assistant", "content": "jumps over"}]
    expected = chat(server, begun, max_tokens=6, continue_final_message=True)
    answer = ask(server, messages=begun)
    assert answer["content"][0]["text"] == expected["choices"][0]["message"]["content"]
    assert sum(answer["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")) == expected["usage"]["prompt_tokens"]


def test_the_reason_of_the_end(server: Any) -> None:
    whole = ask(server, max_tokens=12)["content"][0]["text"]
    stop = whole[len(whole) // 2 :][:2]
    answer = ask(server, max_tokens=12, stop_sequences=["never there", stop])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert answer["content"][0]["text"] == whole[: whole.index(stop)]
    tokens = server.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}).json()["output_ids"]
    assert (
        ask(server, messages=[{"role": "user", "content": "x"}], logit_bias={str(tokens[0]): 100}, stop_token_ids=tokens)["stop_reason"]
        == "end_turn"
    )
    long = ask(server, max_tokens=5000)
    assert long["stop_reason"] == "model_context_window_exceeded"
    assert sum(long["usage"].values()) == 512


def test_the_stream_has_every_event_in_order(server: Any) -> None:
    whole, events = ask(server, max_tokens=8), events_of(server, max_tokens=8)
    types = [each["type"] for each in events]
    deltas = [each for each in events if each["type"] == "content_block_delta"]
    assert len(deltas) > 2
    assert types == [
        *["message_start", "content_block_start", "ping"],
        *["content_block_delta"] * len(deltas),
        *["content_block_stop", "message_delta", "message_stop"],
    ]
    start, block = events[0]["message"], events[1]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert block == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "", "citations": None}}
    assert all(set(each) == {"type", "index", "delta"} and each["delta"]["type"] == "text_delta" for each in deltas)
    assert "".join(each["delta"]["text"] for each in deltas) == whole["content"][0]["text"]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 8
    assert start["usage"] == {**events[-2]["usage"], "output_tokens": 0}


def test_logprobs_stand_beside_the_text_as_chat_has_them(server: Any) -> None:
    fields = {"logprob_start_len": 1, "top_logprobs_num": 2}
    expected = chat(server, [USER], max_tokens=5, logprobs=True, **fields)["choices"][0]["logprobs"]
    told = ask(server, max_tokens=5, **fields)["logprobs"]
    deltas = [each["logprobs"] for each in events_of(server, max_tokens=5, **fields) if each["type"] == "content_block_delta"]
    for name in ("content", "prompt"):
        ids = [entry["token_id"] for entry in expected[name]]
        assert [entry["token_id"] for entry in told[name]] == ids == [entry["token_id"] for each in deltas for entry in each.get(name, ())]
        np.testing.assert_allclose([each["logprob"] for each in told[name]], [each["logprob"] for each in expected[name]], atol=1e-4)
    flat = ask(server, max_tokens=5, **fields, logprobs_format="flat")["logprobs"]
    values = np.frombuffer(base64.b64decode(flat["output"]["data"]), "<f4")
    np.testing.assert_allclose(values, [each["logprob"] for each in expected["content"]], atol=1e-4)


def test_hidden_states_are_those_of_chat_and_come_in_parts_when_streamed(server: Any) -> None:
    fields = {"return_hidden_states": True, "hidden_states_layers": [0, -1], "hidden_states_dtype": "float32"}
    expected = chat(server, [USER], max_tokens=4, **fields)["choices"][0]["hidden_states"]
    told = ask(server, max_tokens=4, **fields)["hidden_states"]
    assert (told["positions"], told["shape"], told["dtype"]) == (expected["positions"], expected["shape"], "float32")
    np.testing.assert_allclose(told["data"], expected["data"], atol=1e-4)
    parts = [each["hidden_states"] for each in events_of(server, max_tokens=4, **fields) if "hidden_states" in each]
    assert [position for part in parts for position in part["positions"]] == expected["positions"] and len(parts) > 1
    np.testing.assert_allclose([row for part in parts for row in part["data"]], expected["data"], atol=1e-4)


def test_rows_in_sglangs_shape_join_to_the_whole(server: Any) -> None:
    told = ask(server, max_tokens=4, return_hidden_states=True)["hidden_states"]
    parts = [each["hidden_states"] for each in events_of(server, max_tokens=4, return_hidden_states=True) if "hidden_states" in each]
    joined = [row for part in parts for row in part]
    assert len(joined) == len(told) == 1 + 3
    np.testing.assert_allclose(joined[0], told[0], atol=1e-4)
    np.testing.assert_allclose(joined[1:], told[1:], atol=1e-4)


def test_safetensors_are_the_whole_answer_as_one_body(server: Any) -> None:
    body = {"messages": [USER], "max_tokens": 3, "return_hidden_states": "last", "hidden_states_format": "safetensors"}
    answer = server.post("/v1/messages", {**body, **GREEDY})
    assert answer.headers["content-type"] == "application/octet-stream", answer.text
    head = json.loads(answer.content[8 : 8 + int.from_bytes(answer.content[:8], "little")])
    told = json.loads(head["__metadata__"]["answer"])
    assert load(answer.content)[told["hidden_states"]["tensor"]].shape == tuple(told["hidden_states"]["shape"]) == (1, 1, 64)
    assert error_of(server, {**body, "stream": True})["message"].startswith("hidden_states_format: got 'safetensors'")


def test_tokens_are_counted_as_the_answer_counts_them(server: Any) -> None:
    for body in (
        {"messages": [USER]},
        {"messages": [USER], "system": SYSTEM},
        {"messages": [USER, {"role": "assistant", "content": "jumps"}]},
    ):
        told = server.post("/v1/messages/count_tokens", {"model": "default", **body, "tools": [], "thinking": {"type": "disabled"}})
        assert told.status_code == 200 and told.headers["request-id"], told.text
        usage = ask(server, **body)["usage"]
        assert told.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("tools", [{"name": "f", "input_schema": {}}], "tools: got 1, but the chat template of tiny-chat takes no tools"),
        ("tool_choice", {"type": "any"}, "tool_choice: got 'any', must be left out without tools"),
        ("thinking", {"type": "enabled", "budget_tokens": 1024}, "thinking.type: got 'enabled', but tiny-chat does not reason"),
        ("thinking", {"type": "adaptive"}, "thinking.type: got 'adaptive', but tiny-chat does not reason"),
        ("output_config", {"effort": "low"}, "output_config.effort: got"),
        ("output_config", {"format": {"type": "json_schema", "schema": {"not": {}}}}, "output_config.format.schema: "),
        ("output_config", {"format": {"type": "text"}}, "output_config.format.type: got"),
        ("container", "c", "container: got"),
        ("mcp_servers", [{}], "mcp_servers: got"),
        ("context_management", {"edits": []}, "context_management: got"),
        ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}], "messages.0.content.0.type: got 'image'"),
        (
            "messages",
            [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}],
            "messages.0.content.0.type: got 'tool_result'",
        ),
        ("messages", [{"role": "tool", "content": "x"}], "messages.0.role: got 'tool'"),
        ("messages", [], "messages: got []"),
        ("system", [{"type": "document"}], "system.0.type: got 'document'"),
        ("max_tokens", -1, "max_tokens: got -1"),
        ("max_tokens", None, "max_tokens: got None"),
        ("stop_sequences", ["a"] * 17, "stop_sequences: got 17"),
        ("n", 2, "n: got 2"),
        ("input", "x", "input: is not a field"),
        ("top_p", 0, "top_p: got 0"),
        ("hidden_states_dtype", "float32", "hidden_states_dtype: got"),
    ],
)
def test_what_is_not_done_is_refused_by_its_name(server: Any, field: str, value: Any, said: str) -> None:
    error = error_of(server, {"messages": [USER], "max_tokens": 2, field: value})
    assert error["type"] == "invalid_request_error" and error["message"].startswith(said), error


def test_what_changes_nothing_is_accepted(server: Any) -> None:
    fields = {"metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}, "tool_choice": {"type": "auto"}}
    nothing = dict.fromkeys(["system", "stop_sequences", "tools", "thinking", "stream", "top_k", "temperature", "metadata"])
    for each in (fields, nothing, {"tools": [], "speed": "standard", "thinking": {"type": "disabled"}}):
        assert ask(server, max_tokens=1, **each)["usage"]["output_tokens"] == 1


def test_errors_have_the_types_of_this_api(server: Any, serve: Any) -> None:
    assert error_of(server, {"messages": [USER]})["message"] == "max_tokens: is missing"
    assert error_of(server, {"messages": [USER], "max_tokens": 1, "model": "other"}, 404)["type"] == "not_found_error"
    long = error_of(server, {"messages": [{"role": "user", "content": "x y " * 600}], "max_tokens": 1})
    assert long["type"] == "invalid_request_error" and long["message"].startswith("prompt is too long: ")
    assert "maximum context length is 512 tokens" in long["message"]
    assert error_of(server, {"messages": [], "max_tokens": 1}, path="/v1/messages/count_tokens")["type"] == "invalid_request_error"
    assert server.http.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"
    other = serve("--api-key", "k", "--max-body-size", "1KiB")
    assert error_of(other, {"messages": [USER], "max_tokens": 1}, 401)["type"] == "authentication_error"
    other.http.headers["x-api-key"] = "k"
    assert error_of(other, {"messages": [USER], "max_tokens": 1, "system": "x" * 2000}, 413)["type"] == "request_too_large"
    assert ask(other)["usage"]["output_tokens"] == 6


def test_an_aborted_request_is_an_error(server: Any) -> None:
    body = {"messages": [USER], "max_tokens": 480, "rid": "msg_abort", "stream": True, **GREEDY}
    seen: list[dict[str, Any]] = []
    with server.http.stream("POST", "/v1/messages", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                seen.append(json.loads(line.removeprefix("data: ")))
                if len(seen) == 6:
                    assert server.post("/abort_request", {"rid": "msg_abort"}).status_code == 200
    assert seen[0]["message"]["id"] == "msg_abort"
    assert seen[-1]["type"] == "error" and "aborted" in seen[-1]["error"]["message"]
