"""openai, the Python client, against every route that it knows."""

from __future__ import annotations

import asyncio
import json

import httpx2
import openai
from checks import KEY, MODEL, PROMPT, UNICODE, URL, equal, eventually, refused, run
from openai import AsyncOpenAI, OpenAI

ASK = [{"role": "user", "content": PROMPT}]
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 24}
LONG = list(range(1000, 1100)) * 100  # 10,000 tokens: more than the default model's context


def check_models(client: OpenAI) -> None:
    models = client.models.list().data
    assert MODEL in [model.id for model in models]
    assert all(model.object == "model" and model.owned_by for model in models)
    equal(client.models.retrieve(MODEL).id, MODEL)
    error = refused(lambda: client.models.retrieve("no/such-model"), openai.NotFoundError)
    equal((error.code, error.type), ("model_not_found", "invalid_request_error"))


def check_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(messages=[{"role": "system", "content": "Be brief."}, *ASK], **GREEDY)
    assert answer.id and answer.created > 1_700_000_000
    equal((answer.object, answer.model), ("chat.completion", MODEL))
    [choice] = answer.choices
    assert choice.message.content and choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.prompt_tokens > 10 and 0 < usage.completion_tokens <= 24
    equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
    again = client.chat.completions.create(messages=[{"role": "system", "content": "Be brief."}, *ASK], **GREEDY)
    equal(again.choices[0].message.content, choice.message.content)
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def check_max_completion_tokens(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_completion_tokens=3)
    equal((answer.usage.completion_tokens, answer.choices[0].finish_reason), (3, "length"))


def check_parts_of_content(client: OpenAI) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    texts = [client.chat.completions.create(messages=messages, **GREEDY).choices[0].message.content for messages in (ASK, parts)]
    equal(texts[0], texts[1])


def check_chat_stream(client: OpenAI) -> None:
    whole = client.chat.completions.create(messages=ASK, **GREEDY)
    chunks = list(client.chat.completions.create(messages=ASK, stream=True, stream_options={"include_usage": True}, **GREEDY))
    equal({(chunk.id, chunk.model, chunk.object) for chunk in chunks}, {(chunks[0].id, MODEL, "chat.completion.chunk")})
    equal(chunks[0].choices[0].delta.role, "assistant")
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    equal("".join(choice.delta.content or "" for choice in deltas), whole.choices[0].message.content)
    equal([choice.finish_reason for choice in deltas if choice.finish_reason], [whole.choices[0].finish_reason])
    equal([len(chunk.choices) for chunk in chunks if chunk.usage], [0])
    usage = chunks[-1].usage
    equal((usage.prompt_tokens, usage.completion_tokens), (whole.usage.prompt_tokens, whole.usage.completion_tokens))
    assert all(chunk.usage is None for chunk in client.chat.completions.create(messages=ASK, stream=True, **GREEDY))


def check_continuous_usage(client: OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.chat.completions.create(messages=ASK, stream=True, stream_options=options, **GREEDY))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    equal(counts, sorted(counts))
    assert counts[-1] == counts[-2] > 3


def check_completions(client: OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPT, **GREEDY)
    [choice] = whole.choices
    assert choice.text and choice.finish_reason in ("stop", "length")
    equal(whole.object, "text_completion")
    chunks = list(client.completions.create(prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY))
    equal("".join(chunk.choices[0].text for chunk in chunks if chunk.choices), choice.text)
    equal(chunks[-1].usage.completion_tokens, whole.usage.completion_tokens)
    several = client.completions.create(prompt=[PROMPT, "The sea is"], **GREEDY)
    equal([(one.index, bool(one.text)) for one in several.choices], [(0, True), (1, True)])
    equal(several.choices[0].text, choice.text)
    ids = client.completions.create(prompt=[[1000, 1001, 1002], [1003, 1004]], **GREEDY)
    equal((len(ids.choices), ids.usage.prompt_tokens), (2, 5))


def check_default_max_tokens_of_completions(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, extra_body={"ignore_eos": True})
    equal((answer.usage.completion_tokens, answer.choices[0].finish_reason), (16, "length"))


def check_n_and_seed(client: OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        answer = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=12, temperature=1.5, seed=seed, n=3)
        equal([choice.index for choice in answer.choices], [0, 1, 2])
        return [choice.message.content for choice in answer.choices]

    assert texts(1) == texts(1) != texts(2)
    assert len(set(texts(1))) > 1

    def of_completions(seed: int) -> str:
        return client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=1.5, seed=seed).choices[0].text

    assert of_completions(1) == of_completions(1) != of_completions(2)


def check_streams_of_several_choices(client: OpenAI) -> None:
    asked = {"model": MODEL, "messages": ASK, "max_tokens": 12, "temperature": 1.5, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**asked)
    texts, ends = ["", ""], [0, 0]
    for chunk in client.chat.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] += choice.finish_reason is not None
    equal(texts, [choice.message.content for choice in whole.choices])
    equal(ends, [1, 1])


def check_stop(client: OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    stop = whole[len(whole) // 2 :][:3]
    answer = client.completions.create(prompt=PROMPT, stop=[stop], **GREEDY).choices[0]
    equal((answer.text, answer.finish_reason), (whole[: whole.index(stop)], "stop"))
    streamed = [chunk.choices[0].text for chunk in client.completions.create(prompt=PROMPT, stop=stop, stream=True, **GREEDY)]
    equal("".join(streamed), answer.text)


def check_chat_logprobs(client: OpenAI) -> None:
    whole = client.chat.completions.create(messages=ASK, logprobs=True, top_logprobs=3, **GREEDY)
    entries = whole.choices[0].logprobs.content
    equal(len(entries), whole.usage.completion_tokens)
    for entry in entries:
        equal(len(entry.top_logprobs), 3)
        best = [top.logprob for top in entry.top_logprobs]
        assert best == sorted(best, reverse=True) and entry.logprob == best[0] <= 0
    said = b"".join(bytes(entry.bytes) for entry in entries).decode()
    assert said.startswith(whole.choices[0].message.content), said
    streamed = []
    for chunk in client.chat.completions.create(messages=ASK, logprobs=True, top_logprobs=3, stream=True, **GREEDY):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    equal(streamed, entries)
    chosen = client.chat.completions.create(messages=ASK, logprobs=True, **GREEDY).choices[0].logprobs.content
    equal([(entry.logprob, entry.top_logprobs) for entry in chosen], [(entry.logprob, []) for entry in entries])


def check_completion_logprobs(client: OpenAI) -> None:
    answer = client.completions.create(prompt=PROMPT, logprobs=2, **GREEDY)
    of, text = answer.choices[0].logprobs, answer.choices[0].text
    count = answer.usage.completion_tokens
    equal([len(of.tokens), len(of.token_logprobs), len(of.top_logprobs), len(of.text_offset)], [count] * 4)
    assert "".join(of.tokens).startswith(text)
    assert all(2 <= len(top) <= 3 and token in top for top, token in zip(of.top_logprobs, of.tokens, strict=True))
    equal(of.text_offset, [sum(map(len, of.tokens[:i])) for i in range(count)])


def check_echo(client: OpenAI) -> None:
    text = "The quick brown fox jumps"
    answer = client.completions.create(prompt=text, echo=True, logprobs=0, **GREEDY | {"max_tokens": 2})
    of = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith(text)
    equal(len(of.tokens), answer.usage.prompt_tokens + 2)
    equal([of.token_logprobs[0], None in of.token_logprobs[1:]], [None, False])
    assert "".join(of.tokens).startswith(text)


def check_unicode(client: OpenAI) -> None:
    whole = client.completions.create(prompt=UNICODE, echo=True, **GREEDY).choices[0].text
    assert whole.startswith(UNICODE), whole
    chunks = [chunk.choices[0].text for chunk in client.completions.create(prompt=UNICODE, echo=True, stream=True, **GREEDY)]
    equal("".join(chunks), whole)
    asked = [{"role": "user", "content": f"Repeat after me: {UNICODE}"}]
    whole = client.chat.completions.create(messages=asked, **GREEDY).choices[0].message.content
    streamed = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(messages=asked, stream=True, **GREEDY)]
    equal("".join(streamed), whole)
    assert not any("\ufffd" in text for text in streamed[:-1])


def check_embeddings(client: OpenAI) -> None:
    answer = client.embeddings.create(model=MODEL, input=["The sea is blue.", "A much longer sentence about the sea."])
    equal([one.index for one in answer.data], [0, 1])
    size = len(answer.data[0].embedding)
    assert size > 100 and answer.usage.prompt_tokens > 8
    plain = client.embeddings.create(model=MODEL, input="The sea is blue.", encoding_format="float").data[0].embedding
    coded = client.embeddings.create(model=MODEL, input="The sea is blue.", encoding_format="base64").data[0].embedding
    assert isinstance(coded, str) and len(coded) > size * 4
    assert max(abs(a - b) for a, b in zip(plain, answer.data[0].embedding, strict=True)) < 1e-5
    equal(len(client.embeddings.create(model=MODEL, input=[1000, 1001], dimensions=64).data[0].embedding), 64)


def check_request_ids(client: OpenAI) -> None:
    assert client.chat.completions.create(messages=ASK, **GREEDY)._request_id
    named = client.chat.completions.create(messages=ASK, extra_headers={"X-Request-Id": "mine-42"}, **GREEDY)
    equal(named._request_id, "mine-42")
    error = refused(lambda: client.chat.completions.create(messages=ASK, model=MODEL, top_p=5), openai.BadRequestError)
    assert error.request_id


def check_bad_fields(client: OpenAI) -> None:
    def of(**fields: object) -> tuple[str, str, str]:
        error = refused(lambda: client.chat.completions.create(**{"messages": ASK, **GREEDY, **fields}), openai.BadRequestError)
        assert error.param and error.param in error.message, error.message
        return error.param, error.code, error.type

    bad = ("invalid_value", "invalid_request_error")
    equal(of(top_p=5), ("top_p", *bad))
    equal(of(temperature="hot"), ("temperature", *bad))
    equal(of(max_tokens=-1), ("max_tokens", *bad))
    equal(of(n=0), ("n", *bad))
    equal(of(messages=[]), ("messages", *bad))
    equal(of(messages=[{"role": "user", "content": 5}])[0], "messages.0.content")
    equal(of(logit_bias={"99999999": 1})[0], "logit_bias")
    equal(of(extra_body={"guided_json": {}})[0], "guided_json")
    equal(of(top_logprobs=1000, logprobs=True)[0], "top_logprobs")


def check_other_errors(client: OpenAI) -> None:
    error = refused(lambda: client.chat.completions.create(messages=ASK, model="no-such"), openai.NotFoundError)
    equal((error.code, error.type), ("model_not_found", "invalid_request_error"))
    error = refused(lambda: client.completions.create(model=MODEL, prompt=LONG, max_tokens=5), openai.BadRequestError)
    equal(error.code, "context_length_exceeded")
    assert "maximum context length is" in error.message and "10000" in error.message.replace(",", ""), error.message
    wrong = client.with_options(api_key="wrong")
    error = refused(lambda: wrong.chat.completions.create(messages=ASK, **GREEDY), openai.AuthenticationError)
    equal((error.code, error.type), ("invalid_api_key", "authentication_error"))
    refused(lambda: wrong.models.list(), openai.AuthenticationError)


def check_malformed_bodies(client: OpenAI) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", "X-Request-Id": "bad-1"}
    for body in (b"", b"{", b"[]", b"null", b"{}", b'{"model": 3, "messages": []}', b"\xff", b'{"messages": [{"role": "user"}]}'):
        for route in ("chat/completions", "completions", "embeddings"):
            answer = httpx2.post(f"{URL}/v1/{route}", content=body, headers=headers)
            equal((body, answer.status_code), (body, 400))
            assert {"message", "type", "param", "code"} <= set(answer.json()["error"]), answer.text
            equal(answer.headers["x-request-id"], "bad-1")


def check_a_stream_that_is_left(client: OpenAI) -> None:
    """Its request ends on the server too."""
    asked = {"prompt": PROMPT, "model": MODEL, "max_tokens": 4000, "stream": True, "extra_body": {"ignore_eos": True}}
    with client.completions.create(**asked) as stream:
        for _, _ in zip(range(3), stream, strict=False):
            pass

    def is_at_rest() -> bool:
        health = httpx2.get(f"{URL}/health").json()
        return health["running"] == health["waiting"] == 0

    eventually("no request is running", is_at_rest)


def check_many_at_once(client: OpenAI) -> None:
    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as many:
            answers = await asyncio.gather(*(many.completions.create(prompt=PROMPT, **GREEDY) for _ in range(16)))
            return [answer.choices[0].text for answer in answers]

    equal(set(asyncio.run(ask_all())), {client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text})


def check_hidden_states(client: OpenAI) -> None:
    asked = {"return_hidden_states": "last", "hidden_states_format": "base64"}
    answer = client.chat.completions.create(messages=ASK, extra_body=asked, **GREEDY)
    states = answer.choices[0].model_extra["hidden_states"]
    equal((states["shape"][:2], len(states["positions"]), states["layers"]), ([1, 1], 1, [-1]))
    equal(states["positions"], [answer.usage.prompt_tokens + answer.usage.completion_tokens - 2])


def check_structured_output_is_obeyed_or_refused_by_name(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "number", "strict": True, "schema": schema}}
    try:
        answer = client.chat.completions.create(messages=ASK, response_format=form, **GREEDY | {"max_tokens": 100})
    except openai.BadRequestError as error:
        assert error.param.startswith("response_format"), error.param
    else:
        assert isinstance(json.loads(answer.choices[0].message.content)["n"], int)


def check_tools_are_obeyed_or_refused_by_name(client: OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
    try:
        answer = client.chat.completions.create(messages=ASK, tools=[tool], tool_choice="required", **GREEDY | {"max_tokens": 100})
    except openai.BadRequestError as error:
        assert error.param.split(".")[0] in ("tools", "tool_choice"), error.param
    else:
        equal(answer.choices[0].message.tool_calls[0].function.name, "add")


def check_responses(client: OpenAI) -> None:
    asked = {"model": MODEL, "input": PROMPT, "instructions": "Be brief.", "max_output_tokens": 24, "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.output_text and whole.status in ("completed", "incomplete") and whole.output[0].role == "assistant"
    equal(whole.usage.total_tokens, whole.usage.input_tokens + whole.usage.output_tokens)
    events = list(client.responses.create(stream=True, **asked))
    kinds = [event.type for event in events]
    equal((kinds[0], kinds[-1]), ("response.created", f"response.{whole.status}"))
    equal([event.sequence_number for event in events], list(range(len(events))))
    equal("".join(event.delta for event in events if event.type == "response.output_text.delta"), whole.output_text)
    equal(events[-1].response.output_text, whole.output_text)
    turns = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "one"}, {"role": "user", "content": "Go on."}]
    assert client.responses.create(**asked | {"input": turns}).output_text
    error = refused(lambda: client.responses.create(previous_response_id="resp_1", **asked), openai.BadRequestError)
    equal(error.param, "previous_response_id")


if __name__ == "__main__":
    run(globals(), OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=60))
