"""anthropic, the Python client, against /v1/messages."""

from __future__ import annotations

import json

import anthropic
import httpx2
from anthropic import Anthropic
from checks import KEY, MODEL, PROMPT, UNICODE, URL, equal, eventually, refused, run

ASK = [{"role": "user", "content": PROMPT}]
BODY = {"model": MODEL, "temperature": 0, "max_tokens": 24}
GREEDY = {"model": MODEL, "max_tokens": 24, "extra_body": {"temperature": 0}}  # no parameter of this client


def prompt_tokens(usage: anthropic.types.Usage) -> int:
    """Those of the prefix cache are counted apart here."""
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)


def check_messages(client: Anthropic) -> None:
    answer = client.messages.create(messages=ASK, system="Be brief.", **GREEDY)
    equal((answer.type, answer.role, answer.model), ("message", "assistant", MODEL))
    [block] = answer.content
    assert block.type == "text" and block.text
    assert answer.id and answer.stop_reason in ("end_turn", "max_tokens") and answer.stop_sequence is None
    assert prompt_tokens(answer.usage) > 10 and 0 < answer.usage.output_tokens <= 24
    blocks = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    other = client.messages.create(messages=blocks, system=[{"type": "text", "text": "Be brief."}], **GREEDY)
    equal((other.content[0].text, other.usage.output_tokens), (block.text, answer.usage.output_tokens))


def check_limit_and_stop(client: Anthropic) -> None:
    short = client.messages.create(messages=ASK, **GREEDY | {"max_tokens": 2})
    equal((short.stop_reason, short.usage.output_tokens), ("max_tokens", 2))
    text = client.messages.create(messages=ASK, **GREEDY).content[0].text
    stop = text[len(text) // 2 :][:3]
    answer = client.messages.create(messages=ASK, stop_sequences=[stop], **GREEDY)
    equal((answer.stop_reason, answer.stop_sequence, answer.content[0].text), ("stop_sequence", stop, text[: text.index(stop)]))


def check_events_and_their_order(client: Anthropic) -> None:
    whole = client.messages.create(messages=ASK, **GREEDY)
    events = list(client.messages.create(messages=ASK, stream=True, **GREEDY))
    kinds = [event.type for event in events if event.type != "ping"]
    deltas = kinds.count("content_block_delta")
    start, end = ["message_start", "content_block_start"], ["content_block_stop", "message_delta", "message_stop"]
    equal(kinds, [*start, *["content_block_delta"] * deltas, *end])
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    equal(text, whole.content[0].text)
    equal(prompt_tokens(events[0].message.usage), prompt_tokens(whole.usage))
    equal((events[0].message.content, events[0].message.stop_reason), ([], None))
    [ended] = [event for event in events if event.type == "message_delta"]
    equal((ended.delta.stop_reason, ended.usage.output_tokens), (whole.stop_reason, whole.usage.output_tokens))


def check_names_of_events(client: Anthropic) -> None:
    """The client goes by `event:`, others by `type`: they agree."""
    body = {"messages": ASK, "stream": True, **BODY}
    text = httpx2.post(f"{URL}/v1/messages", json=body, headers={"x-api-key": KEY}).text
    for event in (block.split("\n") for block in text.strip().split("\n\n") if not block.startswith(":")):
        name, data = (next(line for line in event if line.startswith(field))[len(field) :].strip() for field in ("event:", "data:"))
        equal(json.loads(data)["type"], name)


def check_the_clients_own_stream(client: Anthropic) -> None:
    whole = client.messages.create(messages=ASK, **GREEDY)
    with client.messages.stream(messages=ASK, **GREEDY) as stream:
        equal("".join(stream.text_stream), whole.content[0].text)
        final = stream.get_final_message()
    equal((final.content[0].text, final.usage.output_tokens), (whole.content[0].text, whole.usage.output_tokens))


def check_unicode(client: Anthropic) -> None:
    asked = [{"role": "user", "content": f"Repeat after me: {UNICODE}"}]
    whole = client.messages.create(messages=asked, **GREEDY).content[0].text
    with client.messages.stream(messages=asked, **GREEDY) as stream:
        equal("".join(stream.text_stream), whole)


def check_count_tokens(client: Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASK, system="Be brief.").input_tokens
    equal(counted, prompt_tokens(client.messages.create(messages=ASK, system="Be brief.", **GREEDY).usage))


def check_turns(client: Anthropic) -> None:
    turns = [*ASK, {"role": "assistant", "content": "one"}, {"role": "user", "content": "Go on."}]
    assert client.messages.create(messages=turns, **GREEDY).content[0].text


def check_errors(client: Anthropic) -> None:
    def of(kind: type[anthropic.APIStatusError], **fields: object) -> anthropic.APIStatusError:
        asked = {"model": fields.pop("model", MODEL), "messages": fields.pop("messages", ASK), "max_tokens": 24, "extra_body": fields}
        error = refused(lambda: client.messages.create(**asked), kind)
        assert isinstance(error.body["error"]["message"], str)
        return error

    bad = of(anthropic.BadRequestError, temperature="hot")
    equal(bad.body["error"]["type"], "invalid_request_error")
    assert "temperature" in bad.body["error"]["message"]
    assert "top_p" in of(anthropic.BadRequestError, top_p=5).body["error"]["message"]
    assert "messages" in of(anthropic.BadRequestError, messages=[]).body["error"]["message"]
    assert "guided" in of(anthropic.BadRequestError, guided=1).body["error"]["message"]
    equal(of(anthropic.NotFoundError, model="no-such").body["error"].get("code", "model_not_found"), "model_not_found")
    assert "maximum context length" in of(anthropic.BadRequestError, messages=[{"role": "user", "content": "word " * 9000}]).message
    wrong = Anthropic(base_url=URL, api_key="wrong", max_retries=0)
    error = refused(lambda: wrong.messages.create(messages=ASK, **GREEDY), anthropic.AuthenticationError)
    equal(error.body["error"]["type"], "authentication_error")


def check_what_is_not_done_is_refused_by_name(client: Anthropic) -> None:
    tool = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    for fields, name in (
        ({"tools": [tool]}, "tools"),
        ({"messages": [{"role": "user", "content": [image]}]}, "image"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ):
        try:
            client.messages.create(messages=ASK, model=MODEL, max_tokens=24, extra_body=fields)
        except anthropic.BadRequestError as error:
            assert name in error.body["error"]["message"], error.body
        else:
            assert name == "tools", f"{name} was taken and not done"


def check_authorization_header(client: Anthropic) -> None:
    bearer = Anthropic(base_url=URL, auth_token=KEY, api_key=None, max_retries=0)
    assert bearer.messages.create(messages=ASK, **GREEDY).content[0].text


def check_request_ids(client: Anthropic) -> None:
    raw = client.messages.with_raw_response.create(messages=ASK, extra_headers={"X-Request-Id": "mine-7"}, **GREEDY)
    equal(raw.headers["x-request-id"], "mine-7")
    assert client.messages.create(messages=ASK, **GREEDY)._request_id, "anthropic reads the header request-id"


def check_a_stream_that_is_left(client: Anthropic) -> None:
    with client.messages.create(messages=ASK, stream=True, **GREEDY | {"max_tokens": 4000}) as stream:
        for _, _ in zip(range(5), stream, strict=False):
            pass

    def is_at_rest() -> bool:
        health = httpx2.get(f"{URL}/health").json()
        return health["running"] == health["waiting"] == 0

    eventually("no request is running", is_at_rest)


if __name__ == "__main__":
    run(globals(), Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=60))
