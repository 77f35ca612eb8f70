from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from sidestream.bench.load import TOKEN_IDS, WORDS, Load, Request, random_requests, requests_of
from sidestream.errors import ConfigError
from sidestream.models.gguf import open_gguf
from sidestream.text.gguf_tokenizer import build


def bodies(load: Load, **stream_options: bool) -> list[dict]:
    return [json.loads(request.body(load, "m", stream_options or None)) for request in requests_of(load)]


def test_a_word_is_a_token(default_model):
    tokenizer, _ = build(open_gguf(default_model).metadata)
    assert len(set(WORDS)) == len(WORDS)
    assert [text for word in WORDS for text in (word, f" {word}") if len(tokenizer.encode(text).ids) != 1] == []


def test_bodies_of_words():
    load = Load(num_prompts=3, input_len=10, output_len=5, shared_prefix=4, seed=1)
    made = bodies(load, include_usage=True)
    assert len(made) == 3
    texts = [body.pop("prompt").split() for body in made]
    assert made[0] == {"model": "m", "max_tokens": 5, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    assert [len(text) for text in texts] == [10, 10, 10]
    assert texts[0][:4] == texts[1][:4] == texts[2][:4]
    assert texts[0][4:] != texts[1][4:]
    assert texts == [body["prompt"].split() for body in bodies(load)]
    assert texts != [body["prompt"].split() for body in bodies(Load(num_prompts=3, input_len=10, shared_prefix=4, seed=2))]


def test_bodies_of_token_ids_and_of_chat():
    [body] = bodies(Load(num_prompts=1, input_len=10, token_ids=True, ignore_eos=True))
    assert len(body["prompt"]) == 10
    assert all(isinstance(token, int) and 100 <= token < TOKEN_IDS for token in body["prompt"])
    assert body["ignore_eos"] is True
    [body] = bodies(Load(num_prompts=1, input_len=10, endpoint="chat"))
    assert [message["role"] for message in body["messages"]] == ["user"]
    assert len(body["messages"][0]["content"].split()) == 10
    assert "prompt" not in body
    assert "ignore_eos" not in body


def test_extra_fields_add_and_take_away():
    [body] = bodies(Load(num_prompts=1, extra='{"max_tokens": null, "max_completion_tokens": 3, "temperature": 0.5, "logprobs": true}'))
    assert "max_tokens" not in body
    assert (body["max_completion_tokens"], body["temperature"], body["logprobs"]) == (3, 0.5, True)


def test_prompts_of_a_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"one\u2028line"\n\n{"prompt": [1, 2], "max_tokens": 7}\n')
    assert requests_of(Load(prompts=str(file), output_len=3)) == [Request({"prompt": "one\u2028line"}, 3), Request({"prompt": [1, 2]}, 7)]
    cycled = requests_of(Load(prompts=str(file), num_prompts=3))
    assert cycled[2] == cycled[0]
    file.write_text('{"prompt": "a"}\n{"messages": [{"role": "system", "content": "b"}]}')
    asked = [request.fields["messages"] for request in requests_of(Load(prompts=str(file), endpoint="chat"))]
    assert asked == [[{"role": "user", "content": "a"}], [{"role": "system", "content": "b"}]]


@pytest.mark.parametrize(
    ("line", "endpoint", "message"),
    [
        ("", "chat", "--prompts: got FILE, must have a line for at least one prompt"),
        ("\n{", "chat", "--prompts: line 2 of FILE: got '{', must be JSON (Input data was truncated)"),
        ("3", "chat", "--prompts: line 1 of FILE: got '3', must be a text, or an object with either prompt or messages"),
        ("{}", "chat", "--prompts: line 1 of FILE: got '{}', must be a text, or an object with either prompt or messages"),
        (
            '{"prompt": "a", "top_p": 1}',
            "chat",
            "must have no top_p, only prompt, messages, max_tokens; --extra adds fields to all",
        ),
        ('{"prompt": "a", "max_tokens": 0}', "chat", "must have as max_tokens an integer of at least 1"),
        ('{"messages": []}', "completions", "must have a prompt: messages need --endpoint chat"),
        ('{"prompt": [1]}', "chat", "must have a text or messages: token ids need --endpoint completions"),
    ],
)
def test_lines_that_are_no_prompts(tmp_path: Path, line: str, endpoint: str, message: str):
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    with pytest.raises(ConfigError) as refused:
        requests_of(Load(prompts=str(file), endpoint=endpoint))
    assert message.replace("FILE", str(file)) in refused.value.message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "localhost:30000"}, "--url: got 'localhost:30000', must be a URL such as http://127.0.0.1:30000"),
        ({"url": "http://"}, "--url: got 'http://', must be a URL such as http://127.0.0.1:30000"),
        ({"concurrency": 0}, "--concurrency: got 0, must be an integer between 1 and 100000, or None"),
        ({"concurrency": 2, "request_rate": 1.5}, "--request-rate: got 1.5 and --concurrency 2, must be only one of them"),
        ({"shared_prefix": 129}, "--shared-prefix: got 129, must be at most --input-len, 128"),
        ({"token_ids": True, "endpoint": "chat"}, "--token-ids: got --endpoint chat too, must be alone"),
        ({"token_ids": True, "prompts": "f"}, "--token-ids: got --prompts f too, must be alone"),
        ({"extra": "{"}, "--extra: got '{', must be a JSON object (Input data was truncated)"),
        ({"extra": "[]"}, "--extra: got '[]', must be a JSON object"),
        ({"extra": '{"n": 2}'}, "--extra: got n, must be other fields: what is measured rests on this one"),
        ({"prompts": "/nowhere"}, "--prompts: got /nowhere, which cannot be read"),
    ],
)
def test_loads_that_cannot_be(options, message):
    with pytest.raises(ConfigError) as refused:
        requests_of(Load(**options))
    assert refused.value.message.startswith(message)


@pytest.mark.parametrize("url", ["http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/"])
def test_the_url_may_end_with_or_without_its_version(url):
    assert Load(url=url).base == "http://host:1/v1"


def test_times_of_a_rate_are_those_of_the_seed():
    def first(seed: int, rate: float, count: int) -> list[float]:
        return list(itertools.islice(Load(request_rate=rate, seed=seed).gaps(), count))

    assert first(1, 4.0, 5) == first(1, 4.0, 5) != first(2, 4.0, 5)
    assert sum(first(0, 4.0, 4000)) == pytest.approx(1000, rel=0.1)
    assert [gap * 2 for gap in first(1, 4.0, 5)] == pytest.approx(first(1, 2.0, 5))


def test_a_probe_shares_nothing_with_what_is_counted():
    load = Load(input_len=8, shared_prefix=8)
    [probe] = random_requests(load, "probe 0", 1, 2)
    assert probe.fields != requests_of(load)[0].fields
