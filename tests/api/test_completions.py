"""`/v1/completions`, compared with the engine of the same model in this process."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from sidestream import Engine, Output, SamplingParams
from sidestream.api.completions import CompletionRequest
from sidestream.api.logprobs import Entries, TextOffsets, TokenTexts, completion_logprobs, echoed

COMPLETIONS = "/v1/completions"
PROMPT = "Once upon a time, žluťoučký kůň 😀"
REQUEST = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def greedy(count: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True, **more)


def ask(server: Any, body: dict[str, Any]) -> Any:
    answer = server.post(COMPLETIONS, body)
    assert answer.status_code == 200, answer.text
    return json.loads(answer.text, parse_constant=pytest.fail)


def joined(events: list[Any], index: int) -> dict[str, Any]:
    """One choice of a stream, as it would be whole."""
    made: dict[str, Any] = {}
    for choice in (choice for event in events for choice in event["choices"] if choice["index"] == index):
        if not made:
            made = choice
            continue
        made["text"] += choice["text"]
        for name, entries in (choice["logprobs"] or {}).items():
            made["logprobs"][name] = made["logprobs"].get(name, []) + entries
        if "token_ids" in choice:
            made["token_ids"] += choice["token_ids"]
        made |= {name: choice[name] for name in ("finish_reason", "matched_stop", "stop_reason") if name in choice}
    return made


def test_an_answer_has_openais_shape(server: Any, engine: Engine) -> None:
    answer = ask(server, REQUEST | {"logprobs": 1, "max_tokens": 2})
    output = engine.generate(PROMPT, greedy(2), top_logprobs_num=1)
    assert isinstance(output, Output) and output.logprobs is not None
    first, second = (TokenTexts(engine.tokenizer)[token].text for token in output.token_ids)
    value, other = output.logprobs.output
    assert answer == {
        "id": answer["id"],
        "object": "text_completion",
        "created": answer["created"],
        "model": server.http.get("/v1/models").json()["data"][0]["id"],
        "choices": [
            {
                "index": 0,
                "text": output.text,
                "logprobs": {
                    "tokens": [first, second],
                    "token_logprobs": [value, other],
                    "top_logprobs": [{first: value}, {second: other}],
                    "text_offset": [0, 1],
                    "token_ids": output.token_ids,
                    "top_logprobs_by_id": [[[value, output.token_ids[0]]], [[other, output.token_ids[1]]]],
                },
                "finish_reason": "length",
                "matched_stop": None,
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": output.prompt_tokens,
            "completion_tokens": 2,
            "total_tokens": output.prompt_tokens + 2,
            "prompt_tokens_details": answer["usage"]["prompt_tokens_details"],
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "system_fingerprint": answer["system_fingerprint"],
    }
    assert answer["id"].startswith("cmpl-")


def test_tokens_logprobs_and_rows_are_those_of_the_engine(server: Any, engine: Engine) -> None:
    body = REQUEST | {"echo": True, "logprobs": 3, "token_ids_logprob": [7, 300], "return_token_ids": True}
    (choice,) = ask(server, body | {"return_hidden_states": True, "hidden_states_format": "base64"})["choices"]
    output = engine.generate(
        PROMPT, greedy(), top_logprobs_num=3, logprob_start_len=0, token_ids_logprob=[7, 300], return_hidden_states=True
    )
    assert isinstance(output, Output) and output.logprobs is not None and output.hidden_states is not None
    ids = [*engine.tokenizer.encode(PROMPT), *output.token_ids]
    assert choice["text"] == PROMPT + output.text
    assert choice["prompt_token_ids"] + choice["token_ids"] == choice["logprobs"]["token_ids"] == ids
    logprobs = choice["logprobs"]
    values = [*output.logprobs.input, *output.logprobs.output]
    tops = [*output.logprobs.input_top, *output.logprobs.output_top]
    assert logprobs["token_logprobs"] == values and values[0] is None
    assert logprobs["top_logprobs_by_id"] == [None if top is None else [list(pair) for pair in top] for top in tops]
    asked = [*output.logprobs.input_ids, *output.logprobs.output_ids]
    assert logprobs["token_ids_logprobs"] == [None if each is None else [list(pair) for pair in each] for each in asked]
    for token, value, named, top in zip(logprobs["tokens"], values, logprobs["top_logprobs"], tops, strict=True):
        if value is None:
            assert named is None
        else:  # the token's own number is the very same, and one more where it is not among the best
            assert named[token] == value and len(named) in (3, 4)
            assert max(named.values()) == top[0][0]
    assert base64.b64decode(choice["hidden_states"]["data"]) == output.hidden_states.raw.tobytes()


@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("logprobs", [None, 0, 5])
@pytest.mark.parametrize("more", [{}, {"n": 2, "temperature": 1, "seed": 3}, {"stop": "e", "return_token_ids": True}], ids=str)
@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_put_together_is_the_whole_answer(
    exact_server: Any, count: int, logprobs: int | None, more: dict[str, Any], echo: bool
) -> None:
    body = REQUEST | {"max_tokens": count, "logprobs": logprobs, "echo": echo} | more
    answer, events = ask(exact_server, body), exact_server.stream(COMPLETIONS, body)
    for choice in answer["choices"]:
        assert joined(events, choice["index"]) == choice


def test_prompts_come_as_text_or_ids_one_or_many(server: Any, engine: Engine) -> None:
    texts = ["Once upon", "a time", PROMPT]
    ids = [engine.tokenizer.encode(text) for text in texts]
    want = [engine.generate(text, greedy(5)) for text in texts]
    body = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    for prompt in (texts, ids, [texts[0], ids[1], texts[2]]):
        answer = ask(server, body | {"prompt": prompt})
        assert [choice["text"] for choice in answer["choices"]] == [output.text for output in want]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids)) and answer["usage"]["completion_tokens"] == 15
    (one,) = ask(server, body | {"prompt": ids[2]})["choices"]
    assert one["text"] == want[2].text
    # With n above 1 the choices of a prompt stand together, and a prompt is counted once.
    answer = ask(server, body | {"prompt": texts, "n": 2, "return_token_ids": True})
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [each for each in ids for _ in range(2)]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids)) and answer["usage"]["completion_tokens"] == 30
    events = server.stream(COMPLETIONS, body | {"prompt": texts, "n": 2, "return_token_ids": True})
    assert [joined(events, index) for index in range(6)] == answer["choices"]


@pytest.mark.parametrize("given", ["text", "ids"])
def test_offsets_cut_the_text_into_its_tokens(server: Any, engine: Engine, given: str) -> None:
    prompt = PROMPT if given == "text" else engine.tokenizer.encode(PROMPT)
    for echo in (False, True):
        body = REQUEST | {"prompt": prompt, "echo": echo, "logprobs": 0, "max_tokens": 40, "temperature": 1, "seed": 2}
        body["skip_special_tokens"] = False
        (choice,) = ask(server, body)["choices"]
        text, logprobs = choice["text"], choice["logprobs"]
        assert text.startswith(PROMPT) is echo
        offsets = [*logprobs["text_offset"], len(text)]
        assert offsets[0] == 0 and offsets == sorted(offsets)
        assert "".join(text[start:end] for start, end in pairwise(offsets)) == text
        for token, (start, end) in zip(logprobs["tokens"], pairwise(offsets), strict=True):
            # A token that is no text by itself (part of a character) shares a place with its neighbours.
            assert token.startswith("bytes:") or text[start:end].endswith(token)


def test_default_is_16_tokens(server: Any) -> None:
    answer = ask(server, {"prompt": PROMPT, "ignore_eos": True})
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (16, "length")


def test_a_seed_belongs_to_each_choice(server: Any) -> None:
    body = REQUEST | {"temperature": 1, "seed": 7}
    texts = [choice["text"] for choice in ask(server, body | {"n": 4, "best_of": 4})["choices"]]
    assert len(set(texts)) == 4
    assert ask(server, body)["choices"][0]["text"] == texts[0]
    assert ask(server, body | {"seed": 8})["choices"][0]["text"] != texts[0]


def test_null_is_the_same_as_nothing_for_every_field(server: Any) -> None:
    names = [field.name for field in msgspec.structs.fields(CompletionRequest)]
    assert len(names) > 50
    body = dict.fromkeys(names) | REQUEST
    plain = ask(server, REQUEST)["choices"]
    assert ask(server, body)["choices"] == plain
    assert joined(server.stream(COMPLETIONS, body), 0) == plain[0]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("prompt", None, "must be"),
        ("prompt", "", "empty"),
        ("prompt", [], "between 1 and"),
        ("prompt.0", [[]], "empty"),
        ("prompt.1", ["a", ""], "empty"),
        ("prompt.1", [1, "a"], "'a'"),
        ("prompt.1", ["a", 1], "got 1"),
        ("prompt.0", [1.5], "1.5"),
        ("prompt.0", [True], "True"),
        ("prompt", [5, 320], "320"),
        ("prompt.1", [[5], [-1]], "-1"),
        ("prompt", {"text": "a"}, "must be"),
        ("best_of", 3, "must be 1, the same as n"),
        ("best_of", 0, ">= 1"),
        ("suffix", "the end", "before a given end"),
        ("logprobs", 21, "<= 20"),
        ("logprobs", -1, ">= 0"),
        ("logprobs", True, "must be int"),
        ("echo", 1, "true, false"),
        ("min_tokens", 13, "12"),
        ("messages", [], "not a field"),
        ("chat_template", "a", "not a field"),
        ("response_format.type", {"type": "xml"}, "json_schema"),
        ("response_format.json_schema.schema", {"type": "json_schema"}, "must be a JSON Schema"),
        ("rid", "", "length >= 1"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server: Any, field: str, value: Any, words: str) -> None:
    answer = server.post(COMPLETIONS, REQUEST | {field.partition(".")[0]: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, field, "invalid_value"), error
    assert words in error["message"], error


def test_contradictions_are_refused(server: Any) -> None:
    for body, param in (
        ({"logprobs": 1, "top_logprobs_num": 2}, "logprobs"),
        ({"echo": True, "logprobs": 1, "logprob_start_len": 1}, "logprob_start_len"),
        ({"return_hidden_states": True, "hidden_states_format": "safetensors", "stream": True}, "hidden_states_format"),
        ({"max_tokens": 1, "max_new_tokens": 2}, "max_tokens"),
    ):
        answer = server.post(COMPLETIONS, REQUEST | body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    many = {"prompt": ["a"] * 600, "max_tokens": 1, "stream": True}  # more than run and wait
    answer = server.post(COMPLETIONS, many)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt") and "528" in answer.json()["error"]["message"]


class Words:
    """A tokenizer of a few tokens, two of which have the same text."""

    decoding = "bytes"
    special_token_ids = frozenset[int]()
    strips_first_space = False
    adds_bos = True
    bos_token = "<s>"
    table = (b"<s>", b"a", b"a", b"\xe2\x80", b"\x99", b"\xff ", b"\\ \xe2")

    def token_bytes(self, token: int) -> bytes:
        return self.table[token]


def test_bytes_that_are_no_text_are_written_as_openai_does() -> None:
    texts = TokenTexts(Words())
    assert [texts[token].text for token in range(7)] == [
        "<s>",
        "a",
        "a",
        r"bytes:\xe2\x80",
        r"bytes:\x99",
        r"bytes:\xff ",
        r"bytes:\x5c \xe2",
    ]
    assert texts[3].bytes == [0xE2, 0x80]


async def _of(entries: Entries, offsets: Sequence[int]) -> Any:
    made = await completion_logprobs(TokenTexts(Words()), entries, offsets)
    return msgspec.json.decode(msgspec.json.encode(made))


def test_tokens_with_the_same_text_lose_nothing() -> None:
    entries = Entries([2, 4], [-2.0, float("-inf")], [[(-1.0, 1), (-2.0, 2)], [(float("-inf"), 4), (float("-inf"), 3)]], [])
    made = asyncio.run(_of(entries, [0, 1]))
    assert made["top_logprobs"] == [{"a": -2.0}, {r"bytes:\x99": -9999.0, r"bytes:\xe2\x80": -9999.0}]
    assert made["top_logprobs_by_id"] == [[[-1.0, 1], [-2.0, 2]], [[-9999.0, 4], [-9999.0, 3]]]
    assert made["token_logprobs"] == [-2.0, -9999.0] and made["token_ids"] == [2, 4]


def test_long_lists_are_encoded_in_slices_that_join() -> None:
    count = 5000
    entries = Entries([1] * count, [-0.5] * count, [[(-0.5, 1), (-3.0, 4)]] * count, [])
    made = asyncio.run(_of(entries, range(count)))
    assert made["tokens"] == ["a"] * count and made["top_logprobs"] == [{"a": -0.5, r"bytes:\x99": -3.0}] * count


def test_a_bos_that_the_tokenizer_adds_is_not_in_the_echo() -> None:
    echo = asyncio.run(echoed(Words(), "a\u2019", [0, 1, 3, 4], skip_special_tokens=True))
    assert (echo.text, echo.offsets) == ("a\u2019", [0, 0, 1, 1])
    echo = asyncio.run(echoed(Words(), [0, 1, 3], [0, 1, 3], skip_special_tokens=True))
    assert (echo.text, echo.offsets) == ("<s>a\ufffd", [0, 3, 4])
    offsets = TextOffsets(Words(), [], start=10, skip_special_tokens=True)
    assert asyncio.run(offsets.feed([1, 3])) + asyncio.run(offsets.feed([4, 1])) == [10, 11, 11, 12]
