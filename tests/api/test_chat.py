"""`/v1/chat/completions`, compared with the engine of the same model in this process."""

from __future__ import annotations

import base64
import json
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from safetensors import safe_open

from sidestream import Engine, Output, SamplingParams
from sidestream.api.chat import ChatRequest

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Žluťoučký kůň?"}]
REQUEST = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def greedy(count: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True, **more)


def ask(server: Any, body: dict[str, Any]) -> Any:
    answer = server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    return json.loads(answer.text, parse_constant=pytest.fail)


def refused(server: Any, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    answer = server.post(CHAT, body)
    assert answer.status_code == status, answer.text
    return dict(answer.json()["error"])


def rows_of(states: dict[str, Any]) -> bytes:
    data = base64.b64decode(states["data"])
    assert len(data) == {"float32": 4, "bfloat16": 2}[states["dtype"]] * int(np.prod(states["shape"]))
    return data


def joined(events: list[Any], index: int) -> dict[str, Any]:
    """One choice of a stream, as it would be whole."""
    made: dict[str, Any] = {"content": "", "logprobs": [], "prompt": None, "token_ids": [], "rows": b"", "positions": []}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            made["content"] += choice["delta"].get("content", "")
            made["token_ids"] += choice.get("token_ids", [])
            if choice["logprobs"] is not None:
                made["logprobs"] += choice["logprobs"]["content"]
                if "prompt" in choice["logprobs"]:
                    assert made["prompt"] is None
                    made["prompt"] = choice["logprobs"]["prompt"]
            if "hidden_states" in choice:
                made["rows"] += rows_of(choice["hidden_states"])
                made["positions"] += choice["hidden_states"]["positions"]
            made["finish_reason"] = choice["finish_reason"]
            made["matched_stop"] = choice.get("matched_stop")
    return made


def whole(choice: dict[str, Any]) -> dict[str, Any]:
    """The same of an answer that was not streamed."""
    return {
        "content": choice["message"]["content"],
        "logprobs": choice["logprobs"]["content"],
        "prompt": choice["logprobs"].get("prompt"),
        "token_ids": choice["token_ids"],
        "rows": rows_of(choice["hidden_states"]),
        "positions": choice["hidden_states"]["positions"],
        "finish_reason": choice["finish_reason"],
        "matched_stop": choice["matched_stop"],
    }


def check_entries(engine: Engine, entries: list[Any], ids: Any, values: Any, tops: Any) -> None:
    """Logprobs on the wire are those of the engine: the same floats."""
    assert len(entries) == len(ids) == len(values)
    for entry, token, value, top in zip(entries, ids, values, tops, strict=True):
        data = engine.tokenizer.token_bytes(token)
        assert (entry["token_id"], entry["logprob"], entry["bytes"]) == (token, value, list(data))
        assert entry["token"] == (data.decode() if valid(data) else written(data))
        assert [(each["logprob"], each["token_id"]) for each in entry["top_logprobs"]] == list(top or ())


def valid(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def written(data: bytes) -> str:
    return "bytes:" + "".join(chr(byte) if byte < 0x80 else f"\\x{byte:02x}" for byte in data)


def test_an_answer_has_openais_shape(server: Any, engine: Engine) -> None:
    answer = ask(server, {"messages": MESSAGES, "max_completion_tokens": 5, "temperature": 0, "ignore_eos": True, "model": "tiny-chat"})
    output = engine.chat(MESSAGES, greedy(5))
    assert isinstance(output, Output)
    assert answer["id"].startswith("chatcmpl-") and answer["system_fingerprint"].startswith("fp_") and answer["created"] > 1.6e9
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert answer == {
        "id": answer["id"],
        "object": "chat.completion",
        "created": answer["created"],
        "model": "tiny-chat",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": output.text, "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "matched_stop": None,
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": output.prompt_tokens,
            "completion_tokens": 5,
            "total_tokens": output.prompt_tokens + 5,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "system_fingerprint": answer["system_fingerprint"],
    }
    assert cached in (0, output.prompt_tokens // 16 * 16)


def test_tokens_logprobs_and_rows_are_those_of_the_engine(server: Any, engine: Engine) -> None:
    answer = ask(
        server,
        REQUEST
        | {"logprobs": True, "top_logprobs": 3, "logprob_start_len": 0, "token_ids_logprob": [7, 300], "return_token_ids": True}
        | {"return_hidden_states": True, "hidden_states_format": "base64", "hidden_states_layers": [2, -1]},
    )
    output = engine.chat(
        MESSAGES,
        greedy(),
        top_logprobs_num=3,
        logprob_start_len=0,
        token_ids_logprob=[7, 300],
        return_hidden_states=True,
        hidden_states_layers=[2, -1],
    )
    assert isinstance(output, Output) and output.logprobs is not None and output.hidden_states is not None
    (choice,) = answer["choices"]
    prompt = engine.encode_chat(MESSAGES)
    assert answer["prompt_token_ids"] == prompt
    assert choice["token_ids"] == output.token_ids
    assert choice["message"]["content"] == output.text
    logprobs = output.logprobs
    check_entries(engine, choice["logprobs"]["content"], output.token_ids, logprobs.output, logprobs.output_top)
    check_entries(engine, choice["logprobs"]["prompt"], prompt, logprobs.input, logprobs.input_top)
    assert choice["logprobs"]["prompt"][0]["logprob"] is None
    for entry, asked in zip(choice["logprobs"]["content"], logprobs.output_ids, strict=True):
        assert [(each["logprob"], each["token_id"]) for each in entry["token_ids_logprobs"]] == list(asked)
    states = choice["hidden_states"]
    assert states["shape"] == [len(prompt) + 11, 2, 64] and states["layers"] == [2, -1]
    assert states["positions"] == list(range(len(prompt) + 11))
    assert rows_of(states) == output.hidden_states.raw.tobytes()


SAMPLED = {"temperature": 1.0, "seed": 5, "n": 2}


@pytest.mark.parametrize(
    "more", [{}, {"stop": "e"}, SAMPLED, {**SAMPLED, "stop": ["i", "ů"]}, {"max_tokens": 1}, {"max_tokens": 0}], ids=str
)
def test_a_stream_put_together_is_the_whole_answer(exact_server: Any, more: dict[str, Any]) -> None:
    body = REQUEST | {"max_tokens": 30, "logprobs": True, "top_logprobs": 2, "logprob_start_len": 3, "return_token_ids": True} | more
    body |= {"return_hidden_states": True, "hidden_states_format": "base64"}
    answer, events = ask(exact_server, body), exact_server.stream(CHAT, body)
    for choice in answer["choices"]:
        got, want = joined(events, choice["index"]), whole(choice)
        if body["max_tokens"] == 0:
            assert want["token_ids"] == want["logprobs"] == [] and want["content"] == "" and want["rows"]
        assert len(want["logprobs"]) == len(want["token_ids"])
        rows = len(answer["prompt_token_ids"]) + max(len(want["token_ids"]), 1) - 1
        assert want["positions"] == list(range(rows)) and len(want["rows"]) == rows * 64 * 2
        assert got == want
    if "n" in more:
        assert len({choice["message"]["content"] for choice in answer["choices"]}) == 2
    assert events[0]["prompt_token_ids"] == answer["prompt_token_ids"]


def test_hidden_states_as_json_are_lists_in_sglangs_shape(server: Any, engine: Engine) -> None:
    body = REQUEST | {"max_tokens": 6, "return_hidden_states": True}
    output = engine.chat(MESSAGES, greedy(6), return_hidden_states=True)
    assert isinstance(output, Output) and output.hidden_states is not None
    rows = output.hidden_states.numbers()[:, 0].astype(float).tolist()
    prompt, *steps = ask(server, body)["choices"][0]["hidden_states"]
    assert (prompt, steps) == (rows[: output.prompt_tokens], rows[output.prompt_tokens :])
    streamed = [row for event in server.stream(CHAT, body) for choice in event["choices"] for row in choice.get("hidden_states", [])]
    assert streamed == [prompt, *steps]
    for last in (body | {"return_hidden_states": "last"}, body | {"return_hidden_states": "last", "hidden_states_start": None}):
        nothing, row = ask(server, last)["choices"][0]["hidden_states"]
        assert nothing == [] and row == pytest.approx(rows[-1], abs=1e-4)  # with a warm cache, which rounds differently
        (event,) = (event for event in server.stream(CHAT, last) if any("hidden_states" in choice for choice in event["choices"]))
        assert event["choices"][0]["hidden_states"] == [[], row]
    late = ask(server, body | {"hidden_states_start": 10**30, "hidden_states_format": "base64"})["choices"][0]["hidden_states"]
    assert (late["shape"], late["data"]) == ([0, 1, 64], "")


def test_a_safetensors_body_holds_rows_and_answer(exact_server: Any, tmp_path: Any) -> None:
    body = REQUEST | {"n": 2, "return_hidden_states": True, "hidden_states_layers": [0, -1], "hidden_states_dtype": "float32"}
    answer = exact_server.post(CHAT, body | {"hidden_states_format": "safetensors"})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/octet-stream")
    file = tmp_path / "answer.safetensors"
    file.write_bytes(answer.content)
    want = ask(exact_server, body | {"hidden_states_format": "base64"})["choices"]
    with safe_open(file, "np") as opened:  # type: ignore[no-untyped-call]
        choices = json.loads(opened.metadata()["answer"])["choices"]
        assert len(choices) == 2
        for got, other in zip(choices, want, strict=True):
            assert got["message"] == other["message"]
            tensor = opened.get_tensor(got["hidden_states"].pop("tensor"))
            assert tensor.tobytes() == base64.b64decode(other["hidden_states"].pop("data"))
            assert got["hidden_states"] == other["hidden_states"] and list(tensor.shape) == got["hidden_states"]["shape"]


def test_chunks_come_in_the_order_that_clients_expect(server: Any) -> None:
    body = REQUEST | {"max_tokens": 3, "n": 2, "stream_options": {"include_usage": True}}
    *chunks, last = server.stream(CHAT, body)
    for index in range(2):
        mine = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["choices"] == [
            {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ]
        assert all(set(chunk["choices"][0]["delta"]) <= {"content"} for chunk in mine[1:])
        assert [chunk["choices"][0]["finish_reason"] for chunk in mine] == [*[None] * (len(mine) - 1), "length"]
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert last["choices"] == [] and last["usage"] == ask(server, body)["usage"]
    assert {(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in chunks} == {
        (last["id"], "chat.completion.chunk", last["created"], last["model"])
    }


def test_usage_comes_when_it_is_asked_for(server: Any) -> None:
    body = REQUEST | {"max_tokens": 4}
    assert not any("usage" in chunk for chunk in server.stream(CHAT, body))
    chunks = server.stream(CHAT, body | {"stream_options": {"continuous_usage_stats": True, "include_usage": False}})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 4 and all(chunk["choices"] for chunk in chunks)
    assert "usage" in ask(server, body | {"stream_options": {"include_usage": False}})  # says nothing without stream


def test_an_answer_without_a_limit_ends_by_eos_or_with_the_context(server: Any, engine: Engine) -> None:
    prompt = len(engine.encode_chat(MESSAGES))
    answer = ask(server, {"messages": MESSAGES, "temperature": 0, "ignore_eos": True})
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (512 - prompt, "length")
    eos = engine.tokenizer.eos_token_ids[0]
    answer = ask(server, {"messages": MESSAGES, "temperature": 0, "logit_bias": {str(eos): 100}, "return_token_ids": True})
    (choice,) = answer["choices"]
    assert choice["token_ids"] == [eos] and choice["message"]["content"] == ""
    # SGLang's clients look for the id; for vLLM's a stop_reason is a stop that the request named.
    assert (choice["finish_reason"], choice["matched_stop"], choice["stop_reason"]) == ("stop", eos, None)
    named = ask(server, {"messages": MESSAGES, "temperature": 0, "logit_bias": {"77": 100}, "stop_token_ids": [77]})["choices"][0]
    assert (named["finish_reason"], named["matched_stop"], named["stop_reason"]) == ("stop", 77, 77)


def test_synonyms_must_agree(server: Any) -> None:
    for fields in ({"max_tokens": 2}, {"max_completion_tokens": 2}, {"max_new_tokens": 2}, {"max_tokens": 2, "max_completion_tokens": 2}):
        assert ask(server, {"messages": MESSAGES, "ignore_eos": True, **fields})["usage"]["completion_tokens"] == 2
    error = refused(server, {"messages": MESSAGES, "max_tokens": 2, "max_completion_tokens": 3})
    assert error["param"] == "max_tokens" and "2" in error["message"] and "max_completion_tokens=3" in error["message"]
    assert refused(server, REQUEST | {"top_logprobs": 2, "top_logprobs_num": 3})["param"] == "top_logprobs"
    assert refused(server, REQUEST | {"min_tokens": 2, "min_new_tokens": 3})["param"] == "min_tokens"


def test_null_is_the_same_as_nothing_for_every_field(server: Any) -> None:
    names = [field.name for field in msgspec.structs.fields(ChatRequest)]
    assert len(names) > 60 and {"stop", "n", "tools", "seed", "chat_template", "hidden_states_layers"} < set(names)
    body = dict.fromkeys(names) | REQUEST
    plain = ask(server, REQUEST)
    answer = ask(server, body)
    assert answer["choices"] == plain["choices"]
    options = dict.fromkeys(["include_usage", "continuous_usage_stats", "include_obfuscation"])
    assert joined(server.stream(CHAT, body | {"stream_options": options}), 0)["content"] == plain["choices"][0]["message"]["content"]
    nulls = ["name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "refusal", "audio", "function_call", "annotations"]
    with_nulls = [dict.fromkeys(nulls) | message for message in MESSAGES]
    assert ask(server, body | {"messages": with_nulls})["choices"] == plain["choices"]


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("messages", [], "length >= 1"),
        ("messages", "hello", "must be array"),
        ("messages.0.role", [{"content": "a"}], "missing"),
        ("messages.0.content", [{"role": "user"}], "missing"),
        ("messages.0.weight", [{"role": "user", "content": "a", "weight": 1}], "not a field"),
        ("messages.1.content.0.type", [MESSAGES[0], {"role": "user", "content": [IMAGE]}], "'image_url'"),
        ("messages.0.content.0.image_url", [{"role": "user", "content": [dict(reversed(IMAGE.items()))]}], "text only"),
        ("messages.0.function_call", [{"role": "assistant", "content": None, "function_call": {}}], "tool_calls"),
        ("messages.0.reasoning", [{"role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": "c"}], "differs"),
        ("n", 129, "<= 128"),
        ("n", 0, ">= 1"),
        ("n", "2", "must be int"),
        ("max_tokens", -1, ">= 0"),
        ("max_tokens", 1.5, "must be int"),
        ("temperature", "hot", "must be float"),
        ("temperature", 101, "<= 100"),
        ("top_logprobs", 21, "<= 20"),
        ("top_logprobs_num", 101, "<= 100"),
        ("logprobs", 1, "true, false"),
        ("logprobs_format", "flat", "without logprobs"),
        ("hidden_states_format", "base64", "without return_hidden_states"),
        ("hidden_states_start", 3, "without return_hidden_states"),
        ("stop", ["x"] * 17, "16"),
        ("stop", "", "empty"),
        ("seed", 2**64, "18446744073709551615"),
        ("logit_bias", {"AI": 1}, "'AI'"),
        ("logit_bias", {"--5": 1}, "'--5'"),
        ("logit_bias", {"05": 1}, "'05'"),
        ("logit_bias", {"320": 1}, "319"),
        ("response_format.json_schema.schema", {"type": "json_schema", "json_schema": {"name": "a"}}, "must be"),
        ("response_format.json_schema", {"type": "text", "json_schema": {"name": "a"}}, "must be left out"),
        ("tools", [{"type": "function", "function": {"name": "f"}}], "takes no tools"),
        ("tool_choice", "required", "left out without tools"),
        ("regex", "a(", "no regular expression"),
        ("ebnf", "root ::= 'a'", "cannot be read"),
        ("json_schema", "{", "no JSON"),
        ("json_schema", {"not": {}}, '"not"'),
        ("json_schema", {"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
        ("structured_outputs.regex", {"regex": "a("}, "no regular expression"),
        ("structured_outputs", {"regex": "a", "choice": ["a"]}, "must have one of"),
        ("reasoning_effort", "low", "does not reason"),
        ("chat_template", "{{ 1 }}", "--chat-template"),
        ("truncate_prompt_tokens", 5, "never cut"),
        ("cache_salt", "s", "--disable-radix-cache"),
        ("priority", 3, "must be 0"),
        ("store", True, "not stored"),
        ("modalities", ["audio"], "text"),
        ("chat_template_kwargs", {"messages": []}, "'messages'"),
        ("chat_template_kwargs", {"self": 1}, "'self'"),
        ("stream_options.usage", {"usage": True}, "not a field"),
        ("guided_json", {}, "response_format"),
        ("functions", [], "tools"),
        ("best_of", 2, "Use n"),
        ("temprature", 1, "Did you mean temperature"),
        ("echo", True, "not a field"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server: Any, field: str, value: Any, words: str) -> None:
    error = refused(server, REQUEST | {field.partition(".")[0]: value})
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_value")
    assert error["param"].startswith(field) and words in error["message"], error


def test_two_different_grammars_are_refused(server: Any) -> None:
    for body, param, words in (
        ({"regex": "a", "structured_outputs": {"regex": "b"}}, "structured_outputs.regex", "must be the same"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "got one beside response_format"),
    ):
        error = refused(server, REQUEST | body)
        assert error["param"] == param and words in error["message"], error


def test_bodies_that_are_no_request_are_refused(server: Any) -> None:
    deep = '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": %s}}' % ("[" * 700 + "]" * 700)
    for body in (b"", b"[]", b"{", b"\xff", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b"[" * 10**6, deep.encode()):
        answer = server.http.post(CHAT, content=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "body"), body[:50]


def test_fields_that_change_no_answer_are_accepted(server: Any) -> None:
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "prompt_cache_retention": "24h",
        "priority": 0,
        "parallel_tool_calls": True,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
    }
    assert ask(server, REQUEST | harmless)["choices"] == ask(server, REQUEST)["choices"]


def test_messages_reach_the_template_as_they_were_sent(server: Any, engine: Engine) -> None:
    def sent(messages: list[Any], **more: Any) -> Any:
        return ask(server, {"messages": messages, "max_tokens": 0, "return_token_ids": True, **more})["prompt_token_ids"]

    tool = {"role": "tool", "name": "weather", "tool_call_id": "call_1", "content": "sunny"}
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}, tool]
    assert sent(messages) == engine.encode_chat(messages)
    assert "tool weather\nsunny" in engine.tokenizer.decode(sent(messages))
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    assert sent([{"role": "user", "content": parts}]) == engine.encode_chat([{"role": "user", "content": "a\nb"}])
    # Whatever name reasoning comes under, the template finds it under both.
    for name in ("reasoning", "reasoning_content"):
        assert "(why|why)yes" in engine.tokenizer.decode(sent([{"role": "assistant", "content": "yes", name: "why"}]))
    assert sent(MESSAGES, chat_template_kwargs={"style": "Rhyme."}) == engine.encode_chat(MESSAGES, style="Rhyme.")
    assert sent(MESSAGES, add_generation_prompt=False) == engine.encode_chat(MESSAGES, add_generation_prompt=False)
    begun = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    continued = sent(begun, continue_final_message=True)
    assert continued == engine.encode_chat(begun, continue_final_message=True, add_generation_prompt=False)
    assert engine.tokenizer.decode(continued).endswith("It is")
    error = refused(server, {"messages": begun, "continue_final_message": True, "add_generation_prompt": True})
    assert error["param"] == "continue_final_message"


def test_the_compact_form_of_logprobs_has_the_same_numbers(server: Any) -> None:
    body = REQUEST | {"max_tokens": 5, "logprobs": True, "top_logprobs": 2, "logprob_start_len": 0, "token_ids_logprob": [9, 4]}
    shaped, flat = (ask(server, body | {"logprobs_format": form})["choices"][0]["logprobs"] for form in ("openai", "flat"))

    def floats(data: str) -> list[float]:
        raw = base64.b64decode(data)
        return list(struct.unpack(f"<{len(raw) // 4}f", raw))

    assert set(flat) == {"input", "output", "input_top", "output_top", "input_ids", "output_ids"}
    assert floats(flat["output"]["data"]) == [entry["logprob"] for entry in shaped["content"]]
    assert floats(flat["input"]["data"])[1:] == [entry["logprob"] for entry in shaped["prompt"][1:]]
    for name, field in (("output_top", "top_logprobs"), ("output_ids", "token_ids_logprobs")):
        assert flat[name]["shape"] == [5, 2]
        assert floats(flat[name]["logprobs"]) == [each["logprob"] for entry in shaped["content"] for each in entry[field]]
        ids = np.frombuffer(base64.b64decode(flat[name]["token_ids"]), "<i4").tolist()
        assert ids == [each["token_id"] for entry in shaped["content"] for each in entry[field]]
    parts = [event["choices"][0]["logprobs"] for event in server.stream(CHAT, body | {"logprobs_format": "flat"})[1:]]
    assert [number for part in parts for number in floats(part["output"]["data"])] == floats(flat["output"]["data"])


def test_our_own_field_gives_more_alternatives_than_openais(server: Any, engine: Engine) -> None:
    (choice,) = ask(server, REQUEST | {"max_tokens": 2, "top_logprobs_num": 100})["choices"]
    for entry in choice["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == 100
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]  # greedy: the very same number
    # Asking for alternatives asks for logprobs; to say no at the same time is a contradiction.
    assert len(ask(server, REQUEST | {"top_logprobs": 1})["choices"][0]["logprobs"]["content"]) == 12
    assert refused(server, REQUEST | {"top_logprobs": 1, "logprobs": False})["param"] == "logprobs"
    assert ask(server, REQUEST | {"top_logprobs": 0, "logprobs": False})["choices"][0]["logprobs"] is None


def test_a_prompt_that_leaves_no_room_is_refused_in_openais_words(server: Any) -> None:
    long = [{"role": "user", "content": "xq" * 400}]
    for body in ({"messages": long}, {"messages": long, "stream": True}, {"messages": [{"role": "user", "content": "a"}] * 600}):
        error = refused(server, body)
        assert (error["code"], error["param"], error["type"]) == ("context_length_exceeded", "messages", "invalid_request_error")
        assert error["message"].startswith("This model's maximum context length is 512 tokens. However, ")


def test_an_aborted_request_ends_with_an_error(serve: Callable[..., Any]) -> None:
    server = serve("--chunked-prefill-size", "1")  # one that takes its time
    body = {"messages": [{"role": "user", "content": "qz" * 200}], "rid": "to be aborted"}

    def abort_soon() -> None:
        while not server.stats()["running"]:
            time.sleep(0.01)
        assert server.post("/abort_request", {"rid": "to be aborted"}).status_code == 200

    for stream in (False, True):
        aborting = threading.Thread(target=abort_soon)
        aborting.start()
        answer = server.post(CHAT, body | {"stream": stream})
        aborting.join()
        if stream:
            *chunks, last = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]
            assert answer.status_code == 200 and all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
            error = last["error"]
        else:
            assert answer.status_code == 499
            error = answer.json()["error"]
        assert error["code"] == "aborted" and "to be aborted" in error["message"]


def test_the_fields_of_the_schema_say_what_they_are_for(server: Any) -> None:
    document = server.http.get("/openapi.json").json()
    schema = document["components"]["schemas"]["ChatRequest"]
    assert schema["required"] == ["messages"] and schema["additionalProperties"] is False
    assert "regular expression" in str(schema["properties"]["regex"])
    assert {"type": "integer", "minimum": 1, "maximum": 128} in [
        {key: value for key, value in each.items() if key != "description"} for each in schema["properties"]["n"]["anyOf"]
    ]
    for field in msgspec.structs.fields(ChatRequest):
        kinds = [field.type, *get_args(field.type)]
        assert field.name == "messages" or type(None) in kinds, f"{field.name} must take null"
