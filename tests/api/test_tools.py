"""Tools and reasoning on the three routes of conversations. What the model writes is forced, or constrained by the tools themselves."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sidestream import Engine, Output, SamplingParams

USER = {"role": "user", "content": "Sun?"}
FLAG = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": FLAG}},
    {"type": "function", "function": {"name": "wait"}},
]
CALL = '<tool_call>\n{"name": "look", "arguments": {"sunny": true}}\n</tool_call>'
UNKNOWN = '<tool_call>{"name": "fly", "arguments": {}}</tool_call>'
TWO = f'Well.\n\n{CALL}\n<tool_call>\n{{"name": "wait", "arguments": {{}}}}\n</tool_call>'
SILENT = {"reasoning_effort": "none"}  # else the grammar lets this model think, which it would for ever
FORCED = {"require_reasoning": False}  # a text that is forced has its reasoning in it
DISABLED = {"thinking": {"type": "disabled"}}
THOUGHT = f"<think>\nIt may rain.\n</think>\n\nLet us see. {CALL}"


@pytest.fixture
def tools(tool_server: Any) -> Any:
    return tool_server


def chat(server: Any, **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/chat/completions", {"messages": [USER], "tools": TOOLS, "temperature": 0, "max_tokens": 200, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def written(server: Any, text: str, **fields: Any) -> dict[str, Any]:
    """The choice of a chat in which the model writes a text."""
    return dict(chat(server, choice=[text], **FORCED, **fields)["choices"][0])


def chunks(server: Any, text: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": [USER], "tools": TOOLS, "temperature": 0, "max_tokens": 200, "choice": [text], **FORCED, **fields}
    return list(server.stream("/v1/chat/completions", body))


def joined(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message of a choice that was streamed, and beside it all that goes with tokens."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    beside: dict[str, Any] = {"logprobs": [], "token_ids": [], "rows": b"", "positions": [], "finish_reason": None}
    for choice in (choice for event in events for choice in event["choices"] if choice["index"] == index):
        delta = choice["delta"]
        for name in ("content", "reasoning_content", "reasoning"):
            if delta.get(name):
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": call["type"], "function": {"name": call["function"]["name"], "arguments": ""}})
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        beside["logprobs"] += (choice["logprobs"] or {}).get("content", [])
        beside["token_ids"] += choice.get("token_ids", [])
        if "hidden_states" in choice:
            beside["rows"] += base64.b64decode(choice["hidden_states"]["data"])
            beside["positions"] += choice["hidden_states"]["positions"]
        beside["finish_reason"] = choice["finish_reason"]
    return {"message": message, **beside}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": ""} for call in message.get("tool_calls", ())]
    assert all(call["id"].startswith("call_") for call in message.get("tool_calls", ()))
    return message | ({"tool_calls": calls} if calls else {})


def called(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "", "type": "function", "function": {"name": name, "arguments": arguments}}


MESSAGES = [
    (CALL, {"content": None, "tool_calls": [called("look", '{"sunny": true}')]}, "tool_calls"),
    (TWO, {"content": "Well.", "tool_calls": [called("look", '{"sunny": true}'), called("wait", "{}")]}, "tool_calls"),
    (
        THOUGHT,
        {"content": "Let us see.", "reasoning_content": "It may rain.", "reasoning": "It may rain."}
        | {"tool_calls": [called("look", '{"sunny": true}')]},
        "tool_calls",
    ),
    ("No <tool_call> here", {"content": "No <tool_call> here"}, "stop"),
    (
        '<tool_call>{"name": "fly", "arguments": {}}</tool_call>',
        {"content": '<tool_call>{"name": "fly", "arguments": {}}</tool_call>'},
        "stop",
    ),
    ("<think>Hm.</think>", {"content": None, "reasoning_content": "Hm.", "reasoning": "Hm."}, "stop"),
]


@pytest.mark.parametrize(("text", "message", "reason"), MESSAGES)
def test_what_the_model_writes_is_told_apart(tools: Any, text: str, message: dict[str, Any], reason: str) -> None:
    expected = {"role": "assistant", "refusal": None, **message}
    choice = written(tools, text)
    assert (without_ids(choice["message"]), choice["finish_reason"]) == (expected, reason)
    streamed = joined(chunks(tools, text))
    assert (without_ids(streamed["message"]), streamed["finish_reason"]) == (expected, reason)


@pytest.mark.parametrize("text", [TWO, THOUGHT, "<think>Hm.</think>"])
def test_no_token_loses_what_belongs_to_it(tools: Any, text: str) -> None:
    """One entry and one row for each token, also where markers are dropped and text is held back: the same as without tools."""
    fields = {"logprobs": True, "top_logprobs": 2, "return_hidden_states": True, "hidden_states_format": "base64", "return_token_ids": True}
    plain = written(tools, text, tool_choice="none", separate_reasoning=False, **fields)
    same = chat(tools, choice=[text], **FORCED, **fields)["choices"][0]
    streamed = joined(chunks(tools, text, **fields))
    assert plain["message"]["content"] == text and plain["token_ids"] == same["token_ids"] == streamed["token_ids"]
    assert same["logprobs"]["content"] == streamed["logprobs"] and len(streamed["logprobs"]) == len(streamed["token_ids"])
    assert base64.b64decode(same["hidden_states"]["data"]) == streamed["rows"]
    assert same["hidden_states"]["positions"] == streamed["positions"] == list(range(len(streamed["positions"])))


def test_arguments_come_in_deltas(tools: Any) -> None:
    text = CALL.replace("true", "true, " + ", ".join(f'"k{place}": "{"x" * 20}"' for place in range(5)))
    events = chunks(tools, text, max_tokens=400, stream_options={"include_usage": True})
    deltas = [call for event in events for choice in event["choices"] for call in choice["delta"].get("tool_calls", ())]
    assert len(deltas) > 2 and all(delta["index"] == 0 for delta in deltas)
    begun = [("id" in delta, "type" in delta, "name" in delta["function"]) for delta in deltas]
    assert begun == [(True,) * 3] + [(False,) * 3] * (len(deltas) - 1)
    assert json.loads("".join(delta["function"]["arguments"] for delta in deltas))["k4"] == "x" * 20


def test_several_choices_have_calls_of_their_own(tools: Any) -> None:
    answer = chat(tools, choice=[TWO], n=3, **FORCED)
    ids = [call["id"] for choice in answer["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 6 and {choice["finish_reason"] for choice in answer["choices"]} == {"tool_calls"}
    events = chunks(tools, TWO, n=2)
    assert [without_ids(joined(events, index)["message"]) for index in (0, 1)] == [without_ids(answer["choices"][0]["message"])] * 2


def test_a_call_that_the_limit_cuts_is_one(tools: Any) -> None:
    count = len(tools.post("/tokenize", {"prompt": CALL.partition("true")[0], "add_special_tokens": False}).json()["tokens"])
    choice = written(tools, CALL, max_tokens=count)
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length" and call["function"]["arguments"].startswith('{"sunny":')


# What the model must do


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"].get("tool_calls", [])
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize("seed", range(4))
def test_required_calls_keep_the_schemas(tools: Any, seed: int) -> None:
    """The model is a random one: what it writes is what it must."""
    answer = chat(tools, tool_choice="required", parallel_tool_calls=False, temperature=1, seed=seed, n=4, **SILENT)
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        ((name, arguments),) = calls_of(choice)
        assert (name == "wait" and arguments == {}) or (name == "look" and arguments in ({"sunny": True}, {"sunny": False}))


def test_a_named_tool_is_called_once(tools: Any) -> None:
    body = {"tool_choice": {"type": "function", "function": {"name": "look"}}, "temperature": 1, **SILENT}
    for seed in range(4):
        ((name, _),) = calls_of(chat(tools, seed=seed, **body)["choices"][0])
        assert name == "look"
    events = list(tools.stream("/v1/chat/completions", {"messages": [USER], "tools": TOOLS, "seed": 3, "max_tokens": 200, **body}))
    streamed = joined(events)
    assert streamed["finish_reason"] == "tool_calls" and calls_of(streamed)[0][0] == "look"


def test_required_calls_may_be_several(tools: Any) -> None:
    choices = chat(tools, tool_choice="required", temperature=1, seed=1, n=16, **SILENT)["choices"]
    counts = {len(calls_of(choice)) for choice in choices if choice["finish_reason"] == "tool_calls"}
    assert min(counts) == 1 and max(counts) > 1


def test_reasoning_comes_before_required_calls(tools: Any) -> None:
    """What the model thinks is free; a budget ends it."""
    fields = {"chat_template_kwargs": {"enable_thinking": True}, "max_thinking_tokens": 12}
    answer = chat(tools, tool_choice="required", parallel_tool_calls=False, temperature=1, seed=5, **fields)
    (choice,) = answer["choices"]
    assert len(calls_of(choice)) == 1 and choice["message"]["reasoning_content"] and choice["message"]["content"] is None
    assert 12 < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] < answer["usage"]["completion_tokens"]


def test_strict_tools_keep_their_schemas_where_the_model_may_choose(tools: Any) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    bias = {"logit_bias": {str(tools.post("/tokenize", {"prompt": "<", "add_special_tokens": False}).json()["tokens"][0]): 0}}
    answer = chat(tools, tools=strict, temperature=1, seed=2, n=4, max_tokens=30, **bias)
    assert all(choice["finish_reason"] in ("stop", "length", "tool_calls") for choice in answer["choices"])
    begun = [USER, {"role": "assistant", "content": '<tool_call>\n{"name": "look", "arguments": {"sunny": '}]
    assert chat(tools, tools=strict, messages=begun, max_tokens=4)["choices"]


# Reasoning


def test_reasoning_that_the_prompt_began(tools: Any) -> None:
    """A grammar is for the answer: the model thinks first, as long as it may."""
    for fields in ({"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "low"}):
        asked = {"choice": ["Yes."], "tools": None, "max_thinking_tokens": 6, **fields}
        message = chat(tools, **asked)["choices"][0]["message"]
        assert message["content"] == "Yes." and message["reasoning_content"] == message["reasoning"] != ""
        assert joined(list(tools.stream("/v1/chat/completions", {"messages": [USER], "temperature": 0, **asked})))["message"] == message
    none = chat(tools, choice=["Maybe</think>Yes."], reasoning_effort="none", tools=None)["choices"][0]["message"]
    assert none == {"role": "assistant", "content": "Maybe</think>Yes.", "refusal": None}


def test_a_grammar_in_place_of_reasoning(tools: Any) -> None:
    fields = {"tools": None, "reasoning_effort": "high", "require_reasoning": False}
    assert chat(tools, choice=["Yes."], **fields)["choices"][0]["message"]["content"] == "Yes."


def test_reasoning_stays_in_the_content_where_that_is_asked(tools: Any) -> None:
    message = written(tools, THOUGHT, separate_reasoning=False)["message"]
    assert message["content"] == THOUGHT.partition(" <tool_call>")[0] and "reasoning" not in message and len(message["tool_calls"]) == 1


def test_tokens_of_reasoning_are_counted(tools: Any) -> None:
    def tokens(text: str) -> int:
        return len(tools.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"])

    text = "<think>It may rain.</think>Yes"
    usage = chat(tools, choice=[text], tools=None, **FORCED)["usage"]
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 0 <= reasoning - tokens("<think>It may rain.</think>") <= 1  # a token may belong to both
    last = chunks(tools, text, tools=None, stream_options={"include_usage": True})[-1]
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] == reasoning
    assert chat(tools, choice=["Yes"], tools=None, **FORCED)["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    responses = tools.post("/v1/responses", {"input": "Sun?", "choice": [text], "temperature": 0, **FORCED}).json()
    assert responses["usage"]["output_tokens_details"]["reasoning_tokens"] == reasoning


# What is refused


def function(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools.2.function.name", "got 'look' a second time"),
        ({"tools": [TOOLS[1]] * 129}, "tools", "<= 128"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "got 'a b', must"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 65}}]}, "tools.0.function.name", "64"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type", "function"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools.0.function.parameters.type",
            "must be 'object'",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "fly"}}},
            "tool_choice.function.name",
            "got 'fly', must be one of look, wait",
        ),
        ({"tool_choice": "any"}, "tool_choice", "any"),
        ({"tool_choice": "required", "regex": "a"}, "tool_choice", "beside regex"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice", "beside response_format"),
        ({"tool_choice": "required", "tools": [function("f", {"not": {}})]}, "tool_choice", '"not"'),
        (
            {"tool_choice": "required", "tools": [function("f", {"properties": {"a": {"type": "number", "minimum": 2**80}}})]},
            "tools.0.function.parameters",
            "must be between",
        ),
        ({"tools": [function("f", {"properties": {"a": {"type": "text"}}})]}, "tools.0.function.parameters.properties.a", "JSON Schema"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 300_000}}]}, "tools", "at most 262144"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "'tools'"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort", "low"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tools: Any, fields: dict[str, Any], param: str, words: str) -> None:
    for stream in (False, True):
        answer = tools.post("/v1/chat/completions", {"messages": [USER], "tools": TOOLS, "max_tokens": 5, "stream": stream, **fields})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param and words in error["message"], error


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "parameters": "SCHEMA"}}]}),
        ("/v1/responses", {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": "SCHEMA"}]}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 5, "tools": [{"name": "f", "input_schema": "SCHEMA"}]}),
    ],
)
def test_deep_schemas_are_refused_or_answered(tools: Any, path: str, body: dict[str, Any]) -> None:
    for depth in (100, 300, 900, 100_000):
        schema = '{"properties": {"a": ' * depth + "{}" + "}}" * depth
        for more in ({}, {"tool_choice": {"type": "any"} if path.endswith("messages") else "required"}):
            answer = tools.http.post(path, content=json.dumps(body | more).replace('"SCHEMA"', schema).encode())
            assert answer.status_code in (200, 400), answer.text


def test_a_model_without_tools_says_so(serve: Any, server: Any, tool_model: Path) -> None:
    asked = {"messages": [USER], "tools": TOOLS, "max_tokens": 5}
    error = server.post("/v1/chat/completions", asked).json()["error"]
    assert error["param"] == "tools" and "takes no tools" in error["message"] and "--chat-template FILE" in error["message"]
    assert server.post("/v1/chat/completions", asked | {"tool_choice": "none"}).status_code == 200
    plain = serve("--tool-call-parser", "none", "--reasoning-parser", "none", model=tool_model)
    message = plain.post("/v1/chat/completions", {**asked, "max_tokens": 200, "choice": [THOUGHT], **FORCED}).json()["choices"][0][
        "message"
    ]
    assert message == {"role": "assistant", "content": THOUGHT, "refusal": None}
    error = plain.post("/v1/chat/completions", asked | {"tool_choice": "required"}).json()["error"]
    assert error["param"] == "tool_choice" and "--tool-call-parser NAME" in error["message"]
    mistral = serve("--tool-call-parser", "mistral", model=tool_model)
    text = '[TOOL_CALLS][{"name": "look", "arguments": {"sunny": true}}]'
    answer = mistral.post("/v1/chat/completions", {**asked, "max_tokens": 200, "choice": [text], **FORCED}).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "look" and len(call["id"]) == 9


# Markers that are tokens of their own


def with_tokens(model: Path, directory: Path, template: str, tokens: dict[str, bool]) -> Path:
    """The model with some of its last tokens as added ones; the value says whether they are special."""
    made = directory / "tiny-marked"
    shutil.copytree(model, made)
    (made / "chat_template.jinja").write_text(template)
    tokenizer = json.loads((made / "tokenizer.json").read_text())
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    last = sorted((id, token) for token, id in vocabulary.items())[-len(tokens) :]
    gone = {token for _, token in last}
    tokenizer["model"]["merges"] = [merge for merge in merges if "".join(merge) not in gone and not gone.intersection(merge)]
    for (id, old), (text, special) in zip(last, tokens.items(), strict=True):
        vocabulary[text] = vocabulary.pop(old)
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": id, "content": text, "special": special, **flags})
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    return made


@pytest.mark.parametrize(
    ("format", "tokens"),
    [
        ("mistral", {"[TOOL_CALLS]": True, "[ARGS]": True, "[THINK]": True, "[/THINK]": True}),
        ("hermes", {"<tool_call>": False, "</tool_call>": False, "<think>": False, "</think>": False}),
    ],
)
def test_markers_that_are_tokens(tool_model: Path, tmp_path: Path, serve: Any, format: str, tokens: dict[str, bool]) -> None:
    """Their text is shown to the parsers, though it may be that of special tokens, and grammars name the tokens."""
    mistral = format == "mistral"
    begin, end = ("[THINK]", "[/THINK]") if mistral else ("<think>", "</think>")
    template = (tool_model / "chat_template.jinja").read_text().replace("<think>", begin).replace("</think>", end)
    template = template.replace("<tool_call>", "[TOOL_CALLS]").replace("</tool_call>", "[ARGS]") if mistral else template
    server = serve(model=with_tokens(tool_model, tmp_path, template, tokens))
    ids = {text: server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"] for text in tokens}
    assert all(len(each) == 1 for each in ids.values()), ids
    asked = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1, "seed": 1, "return_token_ids": True}
    for fields in ({"reasoning_effort": "none"}, {"reasoning_effort": "low", "max_thinking_tokens": 5}):
        (choice,) = chat(server, **asked, **fields)["choices"]
        ((name, _),) = calls_of(choice)
        assert name in ("look", "wait") and choice["finish_reason"] == "tool_calls"
        assert ids["[TOOL_CALLS]" if mistral else "<tool_call>"][0] in choice["token_ids"]
        assert ("reasoning" in choice["message"]) == ("max_thinking_tokens" in fields)
        assert (ids[end][0] in choice["token_ids"]) == ("max_thinking_tokens" in fields)
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    bias = {"logit_bias": {str(ids["[TOOL_CALLS]" if mistral else "<tool_call>"][0]): 100}}
    (choice,) = chat(server, tools=strict, parallel_tool_calls=False, temperature=1, seed=1, reasoning_effort="none", **bias)["choices"]
    assert len(calls_of(choice)) == 1


# The conversation that goes on


HISTORY = (
    "<|start|>user\nSun?<|end|>\n<|start|>assistant\n<think>Hm.</think>Well.{call}<|end|>\n<|start|>tool\nid_1:yes<|end|>\n"
    "<|start|>assistant\n"
)


def test_calls_and_results_go_to_the_template(tools: Any) -> None:
    """By all three routes as the same prompt."""
    call = '<tool_call>{"name": "look", "arguments": {"sunny": true}}</tool_call>'
    prompt = "tools: look wait" + HISTORY.format(call=call)
    function = {"name": "look", "arguments": '{"sunny": true}'}
    messages = [
        USER,
        {
            "role": "assistant",
            "content": "Well.",
            "reasoning": "Hm.",
            "tool_calls": [{"id": "id_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "id_1", "content": "yes"},
    ]
    ids = tools.post("/tokenize", {"messages": messages, "tools": TOOLS}).json()["tokens"]
    assert tools.post("/detokenize", {"tokens": ids, "skip_special_tokens": False}).json()["text"].endswith(prompt)
    assert chat(tools, messages=messages, max_tokens=1)["usage"]["prompt_tokens"] == len(ids)
    items = [
        {"role": "user", "content": "Sun?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well.", "annotations": []}]},
        {"type": "function_call", "call_id": "id_1", "name": "look", "arguments": '{"sunny": true}'},
        {"type": "function_call_output", "call_id": "id_1", "output": "yes"},
    ]
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    answer = tools.post("/v1/responses", {"input": items, "tools": flat, "max_output_tokens": 1, "return_hidden_states": True}).json()
    assert answer["usage"]["input_tokens"] == len(ids), answer
    blocks = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "Well."},
                {"type": "tool_use", "id": "id_1", "name": "look", "input": {"sunny": True}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "id_1", "content": [{"type": "text", "text": "yes"}]}]},
    ]
    asked = {"messages": blocks, "tools": ANTHROPIC}
    assert tools.post("/v1/messages/count_tokens", asked).json() == {"input_tokens": len(ids)}
    usage = tools.post("/v1/messages", asked | {"max_tokens": 1}).json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(ids)


# The other APIs


ANTHROPIC = [{"name": "look", "input_schema": FLAG}, {"name": "wait", "input_schema": {"type": "object"}}]
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]


def named_events(server: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = server.post(path, body | {"stream": True})
    assert answer.status_code == 200, answer.text
    blocks = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in events]
    return events


def test_messages_have_blocks(tools: Any) -> None:
    body = {"messages": [USER], "tools": ANTHROPIC, "max_tokens": 200, "temperature": 0, "choice": [THOUGHT], **FORCED}
    answer = tools.post("/v1/messages", body).json()
    (thinking, text, call) = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "It may rain.", "signature": ""}
    assert text == {"type": "text", "text": "Let us see.", "citations": None}
    assert call == {"type": "tool_use", "id": call["id"], "name": "look", "input": {"sunny": True}} and call["id"].startswith("toolu_")
    assert answer["stop_reason"] == "tool_use"


def test_streamed_messages_have_the_same_blocks(tools: Any) -> None:
    body = {
        "messages": [USER],
        "tools": ANTHROPIC,
        "max_tokens": 200,
        "temperature": 0,
        "choice": [THOUGHT],
        **FORCED,
        "top_logprobs_num": 1,
    }
    whole = tools.post("/v1/messages", body).json()
    events = named_events(tools, "/v1/messages", body)
    assert [event["type"] for event in events][:3] == ["message_start", "content_block_start", "ping"]
    blocks: list[dict[str, Any]] = []
    entries: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            entries += event.get("logprobs", {}).get("content", [])
            delta = event["delta"]
            name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}[delta["type"]]
            field = "json" if name == "partial_json" else name
            blocks[-1][field] += delta[name]
    for block in blocks:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block["input"], block["id"] = json.loads(arguments), whole["content"][-1]["id"]
    assert blocks == whole["content"] and entries == whole["logprobs"]["content"] and len(entries) == whole["usage"]["output_tokens"]
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2]
    assert events[-2]["delta"]["stop_reason"] == "tool_use" and events[-1]["type"] == "message_stop"


def test_choices_of_tools_in_messages(tools: Any) -> None:
    for choice in ({"type": "any"}, {"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "look"}):
        body = {"messages": [USER], "tools": ANTHROPIC, "tool_choice": choice, "max_tokens": 200, "seed": 1, **DISABLED}
        content = tools.post("/v1/messages", body).json()["content"]
        assert {block["type"] for block in content} == {"tool_use"}
        assert choice["type"] == "any" or [block["name"] for block in content] == ["look"]
    for choice, words in (
        ({"type": "tool", "name": "fly"}, "tool_choice.name: got 'fly'"),
        ({"type": "tool"}, "tool_choice.name: got None"),
        ({"type": "any", "name": "look"}, "left out otherwise"),
    ):
        error = tools.post("/v1/messages", {"messages": [USER], "tools": ANTHROPIC, "tool_choice": choice, "max_tokens": 5}).json()["error"]
        assert words in error["message"]


def test_thinking_in_messages(tools: Any) -> None:
    body = {"messages": [USER], "max_tokens": 100, "temperature": 0}
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 6}}
    content = tools.post("/v1/messages", body | thinking).json()["content"]
    assert content[0]["type"] == "thinking"
    adaptive = {"thinking": {"type": "adaptive"}, "max_thinking_tokens": 6, "choice": ["b"]}
    content = tools.post("/v1/messages", body | adaptive).json()["content"]
    assert [block["type"] for block in content] == ["thinking", "text"] and content[1]["text"] == "b"
    content = tools.post("/v1/messages", body | {"thinking": {"type": "disabled"}, "choice": ["a</think>b"]}).json()["content"]
    assert content[0]["text"] == "a</think>b"


def test_a_call_that_is_cut_has_its_text(tools: Any) -> None:
    count = len(tools.post("/tokenize", {"prompt": CALL.partition("true")[0], "add_special_tokens": False}).json()["tokens"])
    body = {"messages": [USER], "tools": ANTHROPIC, "max_tokens": count, "temperature": 0, "choice": [CALL], **FORCED}
    answer = tools.post("/v1/messages", body).json()
    assert answer["stop_reason"] == "max_tokens" and answer["content"][0]["input"]["INVALID_JSON"].startswith('{"sunny":')


def test_responses_have_items(tools: Any) -> None:
    body = {"input": "Sun?", "tools": FLAT, "max_output_tokens": 200, "temperature": 0, "choice": [THOUGHT], **FORCED}
    answer = tools.post("/v1/responses", body).json()
    reasoning, message, call = answer["output"]
    assert reasoning == {
        "id": reasoning["id"],
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "It may rain."}],
    }
    assert message["content"][0]["text"] == "Let us see." and message["status"] == "completed"
    assert call == {
        "id": call["id"],
        "type": "function_call",
        "status": "completed",
        "call_id": call["call_id"],
        "name": "look",
        "arguments": '{"sunny": true}',
    }
    assert answer["status"] == "completed" and answer["tools"][0]["name"] == "look"
    ids = [item["id"] for item in answer["output"]]
    assert [id[:3] for id in ids] == ["rs_", "msg", "fc_"] and len(set(ids)) == 3
    given = {"type": "function_call_output", "call_id": call["call_id"], "output": "no"}
    again = {"input": [{"role": "user", "content": "Sun?"}, *answer["output"], given], "tools": FLAT}
    assert tools.post("/v1/responses", again | {"max_output_tokens": 1}).status_code == 200


def test_streamed_responses_have_the_same_items(tools: Any) -> None:
    body = {"input": "Sun?", "tools": FLAT, "max_output_tokens": 200, "temperature": 0, "choice": [THOUGHT], **FORCED, "top_logprobs": 1}
    whole = tools.post("/v1/responses", body).json()
    events = named_events(tools, "/v1/responses", body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    order = [kind for place, kind in enumerate(kinds) if not kind.endswith(".delta") or kinds[place - 1] != kind]
    text = ["output_item.added", "content_part.added", "{0}.delta", "{0}.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    items = [kind.format(name) for name in ("reasoning_text", "output_text") for kind in text] + call
    assert order == ["created", "in_progress", *items, "completed"]
    last = events[-1]["response"]
    shown = [[(item["type"], item.get("arguments") or item["content"][0]["text"]) for item in each["output"]] for each in (whole, last)]
    assert shown[0] == shown[1] and len(shown[0]) == 3
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["id"] for item in done] == [item["id"] for item in last["output"]]
    entries = [entry for event in events if event["type"].endswith(".delta") for entry in event.get("logprobs", ())]
    assert entries == whole["output"][-1]["logprobs"] and len(entries) == whole["usage"]["output_tokens"]
    assert all(
        event["output_index"] < 3 and event["item_id"] == done[event["output_index"]]["id"] for event in events if "item_id" in event
    )


def test_choices_of_tools_in_responses(tools: Any) -> None:
    for choice in ("required", {"type": "function", "name": "look"}):
        body = {"input": "Sun?", "tools": FLAT, "tool_choice": choice, "max_output_tokens": 200, "seed": 1, "reasoning": {"effort": "none"}}
        answer = tools.post("/v1/responses", body).json()
        assert {item["type"] for item in answer["output"]} == {"function_call"} and answer["tool_choice"] == choice
    body = {"input": "Sun?", "tools": FLAT, "tool_choice": {"type": "function", "name": "fly"}}
    assert tools.post("/v1/responses", body).json()["error"]["param"] == "tool_choice.name"
    for item, param in (
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input.0.call_id"),
        ({"type": "function_call_output", "call_id": "x"}, "input.0.output"),
        ({"type": "message", "content": "x"}, "input.0.role"),
    ):
        assert tools.post("/v1/responses", {"input": [item]}).json()["error"]["param"] == param


# Python


def test_chat_in_python_tells_the_model_of_tools(tool_model: Path, tools: Any) -> None:
    with Engine(str(tool_model), dtype="float32", threads=1, kv_tokens=2048, log_level="warning") as engine:
        output = engine.chat([USER], SamplingParams(max_new_tokens=200, choice=[CALL], temperature=0.0), tools=TOOLS)
        ids = tools.post("/tokenize", {"messages": [USER], "tools": TOOLS}).json()["tokens"]
        assert isinstance(output, Output) and output.text == CALL and output.prompt_tokens == len(ids)
        thinking = {"chat_template_kwargs": {"enable_thinking": True}}
        after = engine.chat(
            [USER], SamplingParams(max_new_tokens=100, choice=["Yes."], require_reasoning=True, max_thinking_tokens=4, seed=1), **thinking
        )
        assert isinstance(after, Output) and after.text.endswith("</think>Yes.")
