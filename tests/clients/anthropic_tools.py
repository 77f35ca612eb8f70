"""anthropic, the Python client: tools, against a server whose chat template takes them."""

from __future__ import annotations

from anthropic import Anthropic
from checks import KEY, MODEL, URL, equal, run

ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"], "additionalProperties": False}
TOOLS = [{"name": "get_weather", "description": "The weather in a city.", "input_schema": SCHEMA}]
GREEDY = {"model": MODEL, "max_tokens": 200, "tools": TOOLS, "extra_body": {"temperature": 0}}
ONE = {"type": "any", "disable_parallel_tool_use": True}


def check_any(client: Anthropic) -> None:
    answer = client.messages.create(messages=ASK, tool_choice=ONE, **GREEDY)
    (block,) = answer.content
    equal((answer.stop_reason, block.type, block.name), ("tool_use", "tool_use", "get_weather"))
    assert block.input in ({"city": "Paris"}, {"city": "Oslo"}) and block.id.startswith("toolu_")


def check_a_round_trip(client: Anthropic) -> None:
    answer = client.messages.create(messages=ASK, tool_choice={"type": "tool", "name": "get_weather"}, **GREEDY)
    result = {"type": "tool_result", "tool_use_id": answer.content[0].id, "content": "Sunny."}
    messages = [*ASK, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(messages=messages, tool_choice={"type": "none"}, **GREEDY)
    equal([block.type for block in after.content], ["text"])
    count = client.messages.count_tokens(model=MODEL, messages=messages, tools=TOOLS).input_tokens
    assert count > client.messages.count_tokens(model=MODEL, messages=ASK, tools=TOOLS).input_tokens


def check_stream(client: Anthropic) -> None:
    whole = client.messages.create(messages=ASK, tool_choice=ONE, **GREEDY)
    with client.messages.stream(messages=ASK, tool_choice=ONE, **GREEDY) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1 and "input_json" in kinds, kinds
    equal((final.stop_reason, final.content[0].input), ("tool_use", whole.content[0].input))
    equal(final.usage.output_tokens, whole.usage.output_tokens)


def check_auto(client: Anthropic) -> None:
    assert client.messages.create(messages=ASK, **GREEDY).content
    text = 'Yes.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    answer = client.messages.create(messages=ASK, **GREEDY | {"extra_body": {"temperature": 0, "choice": [text]}})
    equal([block.type for block in answer.content], ["text", "tool_use"])
    equal((answer.content[0].text, answer.content[1].input), ("Yes.", {"city": "Oslo"}))


if __name__ == "__main__":
    run(globals(), Anthropic(base_url=URL, api_key=KEY, max_retries=0))
