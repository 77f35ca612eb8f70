"""openai, the Python client: tools, against a server whose chat template takes them."""

from __future__ import annotations

import json

from checks import KEY, MODEL, URL, equal, run
from openai import OpenAI

ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The weather in a city.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 200}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def checked(arguments: str) -> str:
    """Arguments that keep the schema."""
    made = json.loads(arguments)
    assert set(made) == {"city", "days"} and made["city"] in ("Paris", "Oslo") and 1 <= made["days"] <= 9, arguments
    return arguments


def check_required(client: OpenAI) -> None:
    answer = client.chat.completions.create(messages=ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **GREEDY)
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    equal((choice.finish_reason, choice.message.content, call.type, call.function.name), ("tool_calls", None, "function", "get_weather"))
    checked(call.function.arguments)
    assert call.id.startswith("call_")


def check_a_round_trip(client: OpenAI) -> None:
    answer = client.chat.completions.create(messages=ASK, tools=TOOLS, tool_choice=NAMED, **GREEDY)
    message = answer.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny, 21 degrees."}
    after = client.chat.completions.create(messages=[*ASK, message, result], tools=TOOLS, tool_choice="none", **GREEDY)
    assert after.choices[0].message.content and not after.choices[0].message.tool_calls
    assert after.usage.prompt_tokens > 30


def check_stream(client: OpenAI) -> None:
    asked = {"messages": ASK, "tools": TOOLS, "tool_choice": NAMED, **GREEDY}
    whole = client.chat.completions.create(**asked).choices[0].message.tool_calls[0]
    arguments, first, reason = "", None, None
    for chunk in client.chat.completions.create(stream=True, **asked):
        for call in chunk.choices[0].delta.tool_calls or ():
            first = first or call
            arguments += call.function.arguments
        reason = chunk.choices[0].finish_reason or reason
    equal((first.index, first.type, first.function.name, reason), (0, "function", "get_weather", "tool_calls"))
    equal(checked(arguments), whole.function.arguments)


def check_the_streaming_helper(client: OpenAI) -> None:
    strict = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    with client.chat.completions.stream(messages=ASK, tools=strict, tool_choice=NAMED, **GREEDY) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds, kinds
    (call,) = final.choices[0].message.tool_calls
    equal(call.function.parsed_arguments, json.loads(checked(call.function.arguments)))


def check_auto(client: OpenAI) -> None:
    """The model may choose: what it writes is text or a call, and never neither."""
    message = client.chat.completions.create(messages=ASK, tools=TOOLS, **GREEDY).choices[0].message
    assert message.content or message.tool_calls
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    forced = client.chat.completions.create(messages=ASK, tools=TOOLS, extra_body={"choice": [text]}, **GREEDY).choices[0].message
    equal([call.function.arguments for call in forced.tool_calls], ['{"city": "Oslo"}'])


def check_responses(client: OpenAI) -> None:
    flat = [{"type": "function", **FUNCTION, "strict": True}]
    asked = {"model": MODEL, "input": ASK, "tools": flat, "temperature": 0, "max_output_tokens": 200}
    named = {"type": "function", "name": "get_weather"}
    whole = client.responses.create(tool_choice=named, **asked)
    (call,) = whole.output
    equal((call.type, call.name, call.status, whole.status), ("function_call", "get_weather", "completed", "completed"))
    checked(call.arguments)
    with client.responses.stream(tool_choice=named, **asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds and "response.function_call_arguments.done" in kinds, kinds
    equal(final.output[0].arguments, call.arguments)
    given = [*ASK, call, {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}]
    assert client.responses.create(tool_choice="none", **asked | {"input": given}).output_text


if __name__ == "__main__":
    run(globals(), OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0))
