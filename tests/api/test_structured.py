"""Grammars over HTTP: every kind by its names on every route, hostile ones, and the cases on grammars of other engines' users by their
numbers."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sidestream import Engine, SamplingParams

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
ROUTES = (GENERATE, COMPLETIONS, CHAT)
SECONDS = 15.0  # for a refusal, on a busy machine too
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
DIGITS = {"type": "regex", "pattern": "[0-9]{2}"}
TAG = {"type": "structural_tag", "format": {"type": "tag", "begin": "<b>", "content": DIGITS, "end": "</b>"}}


class Answer(NamedTuple):
    text: str
    reason: str
    tokens: int


def body(path: str, prompt: str = "Once upon a time", tokens: int = 60, **fields: Any) -> dict[str, Any]:
    if path == GENERATE:
        return {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, **fields}}
    asked = {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
    return {**asked, "temperature": 0, "max_tokens": tokens, **fields}


def ask(server: Any, path: str, asked: dict[str, Any], *, stream: bool = False) -> Answer:
    if not stream:
        answer = server.post(path, asked)
        assert answer.status_code == 200, answer.text
        made = answer.json()
        if path == GENERATE:
            return Answer(made["text"], made["meta_info"]["finish_reason"]["type"], made["meta_info"]["completion_tokens"])
        choice = made["choices"][0]
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        return Answer(text, choice["finish_reason"], made["usage"]["completion_tokens"])
    if path == GENERATE:
        last = server.stream(path, asked)[-1]
        return Answer(last["text"], last["meta_info"]["finish_reason"]["type"], last["meta_info"]["completion_tokens"])
    *events, usage = server.stream(path, asked | {"stream_options": {"include_usage": True}})
    choices = [choice for event in events for choice in event["choices"]]
    pieces = [choice["text"] if path == COMPLETIONS else choice["delta"].get("content") or "" for choice in choices]
    assert "\ufffd" not in "".join(pieces)
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return Answer("".join(pieces), reasons[-1], usage["usage"]["completion_tokens"])


def is_valid(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["name", "n"] and len(value["name"]) <= 5 and 0 <= value["n"] <= 9


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


KINDS: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"json_schema": SCHEMA}, is_valid),
    ({"json_schema": json.dumps(SCHEMA)}, is_valid),
    ({"regex": "[a-c]{3}-[0-9]{2}"}, matches("[a-c]{3}-[0-9]{2}")),
    ({"ebnf": 'root ::= "x" [0-9] [0-9] "y"'}, matches("x[0-9]{2}y")),
    ({"ebnf": 'start: "x" /[0-9]{2}/ "y"'}, matches("x[0-9]{2}y")),
    ({"choice": ["red", "green", "blue"]}, matches("red|green|blue")),
    ({"structural_tag": TAG}, matches("<b>[0-9]{2}</b>")),
]
OPENAI: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}}, is_valid),
    ({"response_format": {"type": "structural_tag", "format": TAG["format"]}}, matches("<b>[0-9]{2}</b>")),
    ({"structured_outputs": {"json": SCHEMA}}, is_valid),
    ({"structured_outputs": {"regex": "[a-c]{3}"}}, matches("[a-c]{3}")),
    ({"structured_outputs": {"choice": ["red", "green"]}}, matches("red|green")),
    ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]'}}, matches("x[0-9]")),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, matches("<b>[0-9]{2}</b>")),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("path", "fields", "obeys"),
    [(path, *kind) for path in ROUTES for kind in KINDS] + [(path, *kind) for path in (COMPLETIONS, CHAT) for kind in OPENAI],
)
def test_every_kind_by_its_names(server: Any, path: str, fields: dict[str, Any], obeys: Callable[[str], bool], stream: bool) -> None:
    answer = ask(server, path, body(path, **fields), stream=stream)
    assert answer.reason == "stop" and obeys(answer.text), answer


@pytest.mark.parametrize("path", ROUTES)
def test_a_json_object(server: Any, path: str) -> None:
    fields = {"json_schema": {"type": "object"}} if path == GENERATE else {"response_format": {"type": "json_object"}}
    answer = ask(server, path, body(path, **fields, tokens=200, seed=1) | ({} if path == GENERATE else {"temperature": 1}))
    assert answer.text.startswith("{")
    assert answer.reason == "length" or isinstance(json.loads(answer.text), dict)


# Hostile input.

DEEP = 5_000
LARGE = "x" * 300_000
HOSTILE: list[dict[str, Any]] = [
    {"choice": []},
    {"regex": "(a{1000}){1000}"},
    {"regex": "(?:a?){5000}a{5000}"},
    {"regex": "(" * DEEP},
    {"regex": LARGE},
    {"regex": r"[^\s\S]"},
    {"regex": 5},
    {"choice": []} | {"regex": "("},
    {"choice": [str(place) for place in range(10_001)]},
    {"choice": [LARGE]},
    {"ebnf": 'root ::= "a" root'},
    {"ebnf": "start: start"},
    {"ebnf": "start: " + "(" * DEEP + '"a"' + ")" * DEEP},
    {"ebnf": "root ::= " + "(" * DEEP + '"a"' + ")" * DEEP},
    {"ebnf": 'start: %json {"not": {}}'},
    {"ebnf": 'root ::= "a'},
    {"json_schema": '{"properties":{"a":' * DEEP + "{}" + "}}" * DEEP},
    {"json_schema": '{"const":"\\ud800"}'},
    {"json_schema": {"enum": [LARGE]}},
    {"json_schema": {"type": "string", "pattern": "^a{1000000}$"}},
    {"json_schema": {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}}},
    {"json_schema": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
    {"json_schema": {"$ref": "http://127.0.0.1:1/schema"}},
    {"json_schema": {"uniqueItems": True}},
    {"json_schema": {"type": "object", "properties": {"a": False}, "required": ["a"]}},
    {"json_schema": "[]"},
    {"structural_tag": {"type": "structural_tag", "format": {"type": "nope"}}},
    {"structural_tag": "[" * DEEP},
    {"structural_tag": {"structures": [{"begin": "a", "schema": {"not": {}}, "end": "b"}], "triggers": ["a"]}},
    {"regex": "a", "ebnf": 'root ::= "a"'},
    {"json_schema": {}, "choice": ["a"]},
    {"stop_regex": "(a+"},
    {"stop_regex": "x*"},
    {"require_reasoning": True},
    {"regex": "a", "require_reasoning": True},
    {"max_thinking_tokens": 5},
]


class Neighbour(threading.Thread):
    """Streams beside what a test does, and must get the same as alone."""

    def __init__(self, server: Any) -> None:
        super().__init__()
        self.server, self.asked = server, {**body(GENERATE, "neighbour", 300, ignore_eos=True), "return_logprob": True}
        self.alone = self.answer()
        self.got: Any = None

    def answer(self) -> Any:
        last = self.server.stream(GENERATE, self.asked)[-1]
        return last["text"], last["meta_info"]["output_token_logprobs"]

    def run(self) -> None:
        self.got = self.answer()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_hostile_input_is_refused_in_bounded_time(exact_server: Any, path: str, stream: bool) -> None:
    neighbour = Neighbour(exact_server)
    neighbour.start()
    for fields in HOSTILE:
        answer = exact_server.post(path, body(path, **fields) | {"stream": stream}, timeout=SECONDS)
        assert answer.status_code == 400, (fields, answer.text[:300])
        error = answer.json() if "error" not in answer.json() else answer.json()["error"]
        assert error["type"] == "invalid_request_error" and error["message"], answer.text[:300]
        named = str(error["param"]).removeprefix("sampling_params.").partition("[")[0].partition(".")[0]
        assert named in fields, (fields, error)
    neighbour.join(60)
    assert neighbour.got == neighbour.alone
    assert ask(exact_server, path, body(path, regex="[ab]{3}")).text in {a + b + c for a in "ab" for b in "ab" for c in "ab"}


def test_a_grammar_that_would_never_be_compiled_keeps_nobody_for_long(exact_server: Any) -> None:
    endless = {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 7919}]}  # 79 million states
    answer = exact_server.post(COMPLETIONS, body(COMPLETIONS, json_schema=endless), timeout=SECONDS)
    assert answer.status_code == 400 and "must take less" in answer.json()["error"]["message"]
    assert ask(exact_server, COMPLETIONS, body(COMPLETIONS, regex="[cd]{2}")).text in ("cc", "cd", "dc", "dd")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_grammar_that_fails_in_the_middle(exact_server: Any, path: str, stream: bool) -> None:
    """Nothing is wrong with its beginning: the answer, or the stream, ends with the error."""
    neighbour = Neighbour(exact_server)
    neighbour.start()
    asked = body(path, ebnf="start: /[A-Z]{20}/ " + '"A"? ' * 3000)
    if stream:
        with exact_server.http.stream("POST", path, json=asked | {"stream": True}) as answer:
            text = "".join(answer.iter_text())
    else:
        answer = exact_server.post(path, asked)
        assert answer.status_code == 400
        text = answer.text
    assert "the grammar is too complex" in text and "invalid_request_error" in text
    neighbour.join(60)
    assert neighbour.got == neighbour.alone


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_exponential_stop_regex_ends_its_request_alone(exact_server: Any, path: str, stream: bool) -> None:
    neighbour = Neighbour(exact_server)
    neighbour.start()
    asked = body(path, regex="a{200}!", stop_regex="(a|aa)+$c", tokens=250) | {"stream": stream}
    answer = exact_server.post(path, asked, timeout=SECONDS)
    assert answer.status_code == (200 if stream else 400)
    assert "stop_regex" in answer.text and "invalid_request_error" in answer.text
    neighbour.join(60)
    assert neighbour.got == neighbour.alone


# The cases of shared/cases/README.md.

PROSE = "Write a long story about a village by the sea. Do not write JSON, write prose."


@pytest.fixture(scope="module", params=["--overlap-schedule", "--disable-overlap-schedule"])
def real_server(request: pytest.FixtureRequest, default_model: Path, made_real_server: Callable[..., Any]) -> Iterator[Any]:
    """On the default model."""
    yield from made_real_server(str(default_model), request.param)


@pytest.fixture(scope="module")
def made_real_server(server: Any) -> Callable[..., Iterator[Any]]:
    def made(*words: str) -> Iterator[Any]:
        started = type(server)(*words, "--kv-tokens", "4096")
        yield started
        assert started.stop() == 0
        started.close()

    return made


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ROUTES)
def test_case_14_two_words(real_server: Any, path: str, stream: bool) -> None:
    answer = ask(real_server, path, body(path, "Say two words:", 40, regex="[a-z]+ [a-z]+"), stream=stream)
    assert re.fullmatch("[a-z]+ [a-z]+" if answer.reason == "stop" else "[a-z]* ?[a-z]*", answer.text), answer
    assert answer.tokens <= 40 and (answer.reason == "stop" or answer.tokens == 40)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ROUTES)
def test_case_14_a_schema_against_the_prompt(real_server: Any, path: str, stream: bool) -> None:
    answer = ask(real_server, path, body(path, PROSE, 40, json_schema=SCHEMA), stream=stream)
    assert answer.reason == "stop" and is_valid(answer.text), answer
    assert answer.tokens <= 40


def test_case_14_whitespace_has_an_end(real_server: Any) -> None:
    """Where nothing but whitespace is likely, it does not go on for ever."""
    space = {"logit_bias": {str(token): 100 for token in _whitespace(real_server)}}
    answer = ask(real_server, GENERATE, body(GENERATE, PROSE, 400, json_schema=SCHEMA, **space))
    assert is_valid(answer.text) and answer.reason == "stop", answer
    assert not re.search(r"\s{24}", answer.text) and "\n\n" not in answer.text


def _whitespace(server: Any) -> list[int]:
    made = []
    for text in (" ", "\n", "  ", "    ", "\n\n", "\t", "\n  ", "\n    "):
        tokens = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
        made += tokens if len(tokens) == 1 else []
    assert len(made) >= 4
    return made


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ROUTES)
def test_case_14_the_best_first_token_would_be_the_end(real_server: Any, path: str, stream: bool) -> None:
    end = real_server.http.get("/tokenizer_info").json()
    ids = real_server.post("/tokenize", {"prompt": end["eos_token"], "add_special_tokens": False}).json()["tokens"]
    for fields, obeys in (({"json_schema": SCHEMA}, is_valid), ({"regex": "[a-z]+ [a-z]+"}, matches("[a-z]+ [a-z]+"))):
        answer = ask(real_server, path, body(path, tokens=40, logit_bias={str(ids[0]): 100}, **fields), stream=stream)
        assert answer.reason == "stop" and obeys(answer.text), answer
    unconstrained = ask(real_server, path, body(path, tokens=40, logit_bias={str(ids[0]): 100}), stream=stream)
    assert unconstrained == Answer("", "stop", 1)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_case_14_in_python(default_model: Path, overlap: bool) -> None:
    greedy = {"temperature": 0.0, "max_new_tokens": 40}
    with Engine(str(default_model), overlap=overlap, threads=1, kv_tokens=2048, log_level="warning") as engine:
        end = next(iter(engine.tokenizer.eos_token_ids))
        outputs = engine.generate(
            ["Say two words:", PROSE, "Once", "Once"],
            [
                SamplingParams(regex="[a-z]+ [a-z]+", **greedy),
                SamplingParams(json_schema=SCHEMA, **greedy),
                SamplingParams(json_schema=SCHEMA, logit_bias={end: 100.0}, **greedy),
                SamplingParams(regex="[a-z]{100}", **greedy),
            ],
        )
        streamed = "".join(part.text for part in engine.stream(PROSE, SamplingParams(json_schema=SCHEMA, **greedy)))
    words, prose, ended, long = outputs
    assert re.fullmatch("[a-z]+ [a-z]+", words.text) and words.finish_reason in ("stop", "length")
    assert is_valid(prose.text) and is_valid(ended.text) and streamed == prose.text
    assert (prose.finish_reason, ended.finish_reason, long.finish_reason) == ("stop", "stop", "length")
    assert all(output.completion_tokens <= 40 for output in outputs) and long.completion_tokens == 40


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("text", ["😀🎉👩‍🚀", "Příliš žluťoučký kůň", "안녕하세요 세계"])
def test_case_10_characters_of_several_tokens(server: Any, path: str, text: str, stream: bool) -> None:
    """The tiny vocabulary has no token for any of them: each comes in pieces."""
    asked = body(path, tokens=120, choice=[text])
    assert ask(server, path, asked, stream=stream).text == text
    if stream and path == GENERATE:
        parts = [event["text"] for event in server.stream(path, asked)]
        assert all(text.startswith(part) and "\ufffd" not in part for part in parts)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_case_6_one_token_is_all_there_is(server: Any, path: str, stream: bool) -> None:
    """The others have no probability at all: strictly valid JSON says -9999."""
    fields: dict[str, Any] = {"regex": "[Q]", "top_k": 1}
    if path == GENERATE:
        asked = {**body(path, **fields), "return_logprob": True, "top_logprobs_num": 5, "logprobs_mode": "processed"}
    elif path == COMPLETIONS:
        asked = body(path, **fields, logprobs=5, logprobs_mode="processed")
    else:
        asked = body(path, **fields, logprobs=True, top_logprobs=5, logprobs_mode="processed")
    asked = json.loads(json.dumps(asked).replace('"temperature": 0', '"temperature": 0.01'))
    if stream:
        texts = [json.dumps(event) for event in server.stream(path, asked)]  # which refuses Infinity and NaN
    else:
        answer = server.post(path, asked)
        assert answer.status_code == 200
        json.loads(answer.text, parse_constant=pytest.fail)
        texts = [answer.text]
    assert any("-9999.0" in text for text in texts) and any('"Q"' in text for text in texts)
