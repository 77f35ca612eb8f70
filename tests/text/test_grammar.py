"""Grammars of every kind: what they admit, and that hostile ones are refused, each in bounded time."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from sidestream import SamplingParams
from sidestream.errors import InvalidRequest
from sidestream.messages import Grammar, Thinking
from sidestream.text import grammar
from sidestream.text.grammar import GrammarCache, Grammars, explained
from sidestream.text.grammar_source import grammar_of
from sidestream.text.lark import OPTIONS
from sidestream.text.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(30)  # for the grammars of one test; the compiler takes two seconds for the worst
EOS = 2


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size, threads=2)


def asked(tokenizer: Tokenizer, **fields: Any) -> Grammar:
    made = grammar_of(SamplingParams(**fields), Thinking("<think>", "</think>", False), tokenizer.special_tokens)
    assert made is not None
    return made


def follows(grammars: Grammars, tokenizer: Tokenizer, text: str | list[int], **fields: Any) -> str:
    """How a text is taken, token by token: "complete", "may end", "goes on" or "refused"."""
    constraint = grammars.compile(asked(tokenizer, **fields)).result().constraint()
    mask, complete = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32), False
    for token in tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else text:
        constraint.fill_mask(mask)
        if complete or not mask[token // 32] >> np.uint32(token % 32) & np.uint32(1):
            return "refused"
        complete = constraint.advance(token)
    if complete:
        return "complete"
    constraint.fill_mask(mask)
    return "may end" if mask[EOS // 32] >> np.uint32(EOS % 32) & np.uint32(1) else "goes on"


TAG = {"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}
TAGS = {"type": "structural_tag", "structures": [TAG], "triggers": ["<f"]}


@pytest.mark.parametrize(
    ("fields", "taken"),
    [
        ({"regex": "[a-z]+ [a-z]+"}, {"abc def": "may end", "abc": "goes on", "abc 1": "refused"}),
        ({"regex": "(a|b){2}"}, {"ab": "complete", "a": "goes on", "aba": "refused"}),
        ({"regex": r"\p{L}+\n"}, {"žluťoučký\n": "complete", "1\n": "refused"}),
        ({"choice": ["yes", "no", "a.b*(c)|d", "new\nline", "slash/"]}, {"a.b*(c)|d": "complete", "slash/": "complete", "axb": "refused"}),
        ({"choice": ["yes", "yes please"]}, {"yes": "may end", "yes please": "complete", "": "goes on"}),
        ({"json_schema": {}}, {'{"a": [1, null, "x"]}': "complete", "[1,": "goes on", "12": "may end", "'a'": "refused"}),
        ({"json_schema": "true"}, {"[]": "complete"}),
        ({"json_schema": {"type": "object"}}, {"{}": "complete", "[]": "refused"}),
        ({"ebnf": 'root ::= "a" [0-9]+ ("b" | "c")?'}, {"a12": "may end", "a1b": "complete", "b": "refused"}),
        ({"ebnf": "start: WORD (/,/ WORD)*\nWORD: /[a-z]+/"}, {"a,b": "may end", "a,": "goes on", ",": "refused"}),
        ({"ebnf": "start[max_tokens=9]: /[a-z]+/"}, {"abc": "may end"}),
        ({"ebnf": 'root ::= root "a" | "a"'}, {"aaa": "may end", "b": "refused"}),
        ({"ebnf": '%import common.INT\n?start: INT "!"'}, {"12!": "complete"}),
        ({"structural_tag": TAGS}, {"text <f>12</f> more": "may end", "<f>x": "refused", "text <": "may end", "<f>12</f>": "may end"}),
        ({"structural_tag": {"format": {"type": "const_string", "value": "abc"}}}, {"abc": "complete", "abd": "refused"}),
    ],
)
def test_what_is_admitted(grammars: Grammars, tokenizer: Tokenizer, fields: dict[str, Any], taken: dict[str, str]) -> None:
    assert {text: follows(grammars, tokenizer, text, **fields) for text in taken} == taken


def test_whitespace_in_json_has_an_end(grammars: Grammars, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    for text in ('{"a":1}', '{"a": 1}', '{\n  "a": 1\n}', '{ "a" : 1 }'):
        assert follows(grammars, tokenizer, text, json_schema=schema) == "complete", text
    for text in ('{  "a":1}', '{"a":\n\n1}', '{"a":1}\n', ' {"a":1} '):
        assert follows(grammars, tokenizer, text, json_schema=schema) == "refused", text


def test_special_tokens_are_no_text(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """A text that looks like the end token is another text."""
    end = tokenizer.token_text(EOS)
    assert follows(grammars, tokenizer, [EOS], regex=".*") == "complete"
    assert follows(grammars, tokenizer, [EOS], regex=f"a|{re.escape(end)}") == "refused"
    with pytest.raises(InvalidRequest, match=r"choice: got .*special token '<\|im_end\|>'"):
        follows(grammars, tokenizer, [EOS], choice=["yes", f"no{end}"])
    assert follows(grammars, tokenizer, [EOS], json_schema={"type": "string"}) == "refused"


def test_property_order(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """That of the schema; those of allOf one after the other, other names last."""
    schema = {"allOf": [{"properties": {"b": {}}}, {"properties": {"a": {}}}], "required": ["a", "b"]}
    assert follows(grammars, tokenizer, '{"b":1,"a":2,"c":3}', json_schema=schema) == "complete"
    assert follows(grammars, tokenizer, '{"a":1,"b":2}', json_schema=schema) == "refused"


DEEP = 100_000
HOSTILE: list[tuple[str, Any, str]] = [
    ("regex", "a{1000000}", "too complex"),
    ("regex", "(a{1000}){1000}", "too complex"),
    ("regex", "(?:a?){5000}a{5000}", "too complex"),
    ("regex", "(" * DEEP, "cannot be used"),
    ("regex", "(" * DEEP + "a" + ")" * DEEP, "nest limit|cannot be used"),
    ("regex", r"(a)\1", "backreferences"),
    ("regex", "(?=a)b", "look-around"),
    ("regex", r"[^\s\S]", "admits no text"),
    ("regex", "a\ud800", "surrogate"),
    ("choice", ["a", "\udfff"], "surrogate"),
    ("choice", [str(place) for place in range(10_001)], "at most 10000"),
    ("ebnf", 'root ::= "a" root', "too complex"),
    ("ebnf", 'start: "a" start', "too complex"),
    ("ebnf", "root ::= root", "admits no text"),
    ("ebnf", "start: start", "admits no text"),
    ("ebnf", 'start: "a"{1000000}', "too complex"),
    ("ebnf", 'root ::= "\ud800"', "surrogate|cannot be used"),
    ("ebnf", "start: " + "(" * DEEP + '"a"' + ")" * DEEP, "too deeply"),
    ("ebnf", "root ::= " + "(" * DEEP + '"a"' + ")" * DEEP, "too deeply"),
    ("ebnf", "root ::= nope", "'nope' not found"),
    ("ebnf", "start: nope", "nope"),
    ("ebnf", 'root ::= "a', "cannot be read"),
    ("ebnf", "hello", "(?s)cannot be read.*GBNF has a rule root"),
    ("ebnf", "\0", "cannot be read"),
    ("ebnf", "start: /(a/", "unclosed group"),
    ("ebnf", "start: @nope", "unknown grammar"),
    ("ebnf", 'start: %json {"not": {}}', '"not" cannot be enforced'),
    ("ebnf", 'start: %json {"not": {}, "x-guidance": {"lenient": true}}', "x-guidance"),
    ("ebnf", "start: %json {nope", "no JSON"),
    ("ebnf", "start: %json " + '{"a":' * 5000, "no JSON"),
    ("ebnf", "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(60)) + 'r60 ::= "a"\nroot ::= r0', "too big"),
    ("json_schema", "[" * DEEP, "nested too deeply"),
    ("json_schema", '{"properties":{"a":' * 5000 + "{}" + "}}" * 5000, "nested too deeply"),
    ("json_schema", '{"a":1}x', "no JSON"),
    ("json_schema", '{"const":NaN}', "NaN"),
    ("json_schema", '{"const":1e999}', "the number inf"),
    ("json_schema", "[]", "must be a JSON Schema"),
    ("json_schema", "false", "must be a JSON Schema"),
    ("json_schema", '"text"', "must be a JSON Schema"),
    ("json_schema", '{"enum":["' + "x" * 300_000 + '"]}', "at most 262144"),
    ("json_schema", {"type": "string", "pattern": "(a*)*" * 5000}, "too complex"),
    ("json_schema", {"type": "string", "pattern": "^a{1000000}$"}, "too complex"),
    ("json_schema", {"properties": {f"p{i}": {} for i in range(3000)}, "type": "object"}, "too complex"),
    (
        "json_schema",
        {"allOf": [{"anyOf": [{"properties": {f"{k}{i}": {"const": 1}}} for k in "ab"]} for i in range(12)]},
        "schema too large",
    ),
    ("json_schema", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "requires itself"),
    ("structural_tag", "[" * DEEP, "nested too deeply"),
]


@pytest.mark.parametrize(("field", "value", "message"), HOSTILE, ids=[f"{field}-{place}" for place, (field, *_) in enumerate(HOSTILE)])
def test_hostile_grammars_are_refused(grammars: Grammars, tokenizer: Tokenizer, field: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as raised:
        grammars.compile(asked(tokenizer, **{field: value})).result()
    assert raised.value.param == field
    assert len(raised.value.message) < 1000


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"regex": "((a*)*)*b"}, "aaaab"),
        ({"regex": "(a|aa)+b"}, "aaaab"),
        ({"regex": ".*a.{200}"}, "a" + "b" * 200),
        ({"regex": "|".join("a" * i for i in range(1, 600))}, "aaa"),
        ({"regex": "[xy]" * 40_000}, "xyx"),
        ({"choice": [f"word number {i}" for i in range(10_000)]}, "word number 9999"),
        ({"json_schema": {"enum": list(range(30_000))}}, "29999"),
        (
            {"json_schema": {"anyOf": [{"properties": {f"k{i}": {"type": "string"}}, "required": [f"k{i}"]} for i in range(2000)]}},
            '{"k7":"a"}',
        ),
        ({"json_schema": {"properties": {f"p{i}": {"type": "integer"} for i in range(450)}, "type": "object"}}, '{"p7":1,"p449":2}'),
        ({"json_schema": {"type": "string", "maxLength": 100_000}}, '"a"'),
        ({"json_schema": {"type": "array", "maxItems": 1_000_000}}, "[1]"),
        ({"ebnf": "start: e\ne: e e | /x/ | "}, "xxxx"),
        ({"ebnf": "start: /.*/ /.*/ /.*/ /.*/"}, "abc"),
        ({"ebnf": " ".join(["root ::=", *[f"r{i}" for i in range(2000)]]) + "".join(f'\nr{i} ::= "b" | "c"' for i in range(2000))}, "bcbc"),
    ],
    ids=range(14),
)
def test_large_grammars_are_taken(grammars: Grammars, tokenizer: Tokenizer, fields: dict[str, Any], text: str) -> None:
    assert follows(grammars, tokenizer, text, **fields) in ("complete", "may end", "goes on")


def test_a_grammar_may_fail_in_the_middle(grammars: Grammars, tokenizer: Tokenizer) -> None:
    compiled = grammars.compile(asked(tokenizer, ebnf="start: /[A-Z]{40}/ " + '"A"? ' * 3000)).result()
    constraint, mask = compiled.constraint(), np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
    with pytest.raises(InvalidRequest, match="ebnf: the grammar is too complex"):
        for token in tokenizer.encode("QX" * 20 + "AA", add_special_tokens=False):
            constraint.fill_mask(mask)
            constraint.advance(token)
    others = {row: grammars.compile(asked(tokenizer, regex="a+")).result().constraint() for row in (0, 2)}
    masks = np.zeros((3, len(mask)), np.uint32)
    assert list(grammars.fill_masks({**others, 1: constraint}, masks)) == [1]
    assert np.array_equal(masks[0], masks[2]) and masks[0].any()


MALFORMED: list[Any] = [
    [],
    5,
    {},
    {"type": "other", "format": {}},
    {"format": {}, "structures": []},
    {"format": 5},
    {"format": {"type": "nope"}},
    {"format": {"type": "const_string"}},
    {"format": {"type": "regex", "pattern": "("}},
    {"format": {"type": "json_schema", "json_schema": False}},
    {"format": {"type": "json_schema", "json_schema": {"not": {}}}},
    {"format": {"type": "json_schema", "json_schema": {"x-guidance": {}}}},
    {"format": {"type": "sequence", "elements": []}},
    {"format": {"type": "or", "elements": [5]}},
    {"format": {"type": "tag", "begin": "a", "content": {"type": "any_text"}, "end": 5}},
    {"format": {"type": "tag", "begin": "a", "content": {"type": "any_text"}, "end": []}},
    {"format": {"type": "triggered_tags", "triggers": [""], "tags": [{}]}},
    {"format": {"type": "triggered_tags", "triggers": ["a"], "tags": [{"begin": "b", "content": {"type": "any_text"}, "end": "c"}]}},
    {"format": {"type": "const_string", "value": "\ud800"}},
    {"structures": [TAG]},
    {"structures": [TAG], "triggers": []},
    {"structures": [], "triggers": ["<f"]},
    {"structures": [{"begin": "<f>"}], "triggers": ["<f"]},
    {"structures": [TAG | {"schema": {"uniqueItems": True}}], "triggers": ["<f"]},
    {"structures": [TAG | {"begin": 5}], "triggers": ["<f"]},
    {"structures": [TAG | {"end": None}], "triggers": ["<f"]},
    {"structures": 5, "triggers": 6},
]


@pytest.mark.parametrize("tag", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_structural_tags(grammars: Grammars, tokenizer: Tokenizer, tag: Any) -> None:
    with pytest.raises(InvalidRequest) as raised:
        grammars.compile(asked(tokenizer, structural_tag=json.dumps(tag))).result()
    assert raised.value.param == "structural_tag"


def test_deep_structural_tags(grammars: Grammars, tokenizer: Tokenizer) -> None:
    format: Any = {"type": "any_text"}
    for _ in range(15):
        format = {"type": "sequence", "elements": [format]}
    assert follows(grammars, tokenizer, "x", structural_tag={"format": format}) == "may end"
    with pytest.raises(InvalidRequest, match="nested more than 16 deep"):
        follows(
            grammars, tokenizer, "x", structural_tag={"format": {"type": "or", "elements": [{"type": "sequence", "elements": [format]}]}}
        )


def test_deep_values_in_python() -> None:
    value: dict[str, Any] = {}
    for _ in range(100_000):
        value = {"a": value}
    for field in ("json_schema", "structural_tag"):
        with pytest.raises(InvalidRequest, match="nested too deeply"):
            SamplingParams(**{field: value})
    with pytest.raises(InvalidRequest, match="json_schema"):
        SamplingParams(json_schema={"a": object()})


def test_schemas_within_a_grammar_are_as_strict(grammars: Grammars, tokenizer: Tokenizer) -> None:
    lark = 'start: "<" object ">" | other\nobject: %json {"type": "object", "properties": {"d": {"format": "date"}}}\nother: "%json {}"'
    taken = {'<{"d":"2024-02-29"}>': "complete", '<{"d":"2023-02-29"}>': "refused", '<{  "d":"2024-02-29"}>': "refused"}
    made = lark.replace('other: "%json {}"', 'other: "x"')
    assert {text: follows(grammars, tokenizer, text, ebnf=made) for text in taken} == taken
    written = f"start: %json {json.dumps({'type': 'integer', 'x-guidance': OPTIONS})}"  # as grammars of tools are
    assert follows(grammars, tokenizer, "5", ebnf=written) == "may end"


def test_equal_grammars_are_compiled_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    first = grammars.compile(asked(tokenizer, regex="a+"))
    assert grammars.compile(asked(tokenizer, regex="a+")) is first
    assert grammars.compile(asked(tokenizer, ebnf="start: /a+/")) is not first
    monkeypatch.setattr(grammar, "MAX_COMPILED", 2)
    for pattern in ("b", "c"):
        grammars.compile(asked(tokenizer, regex=pattern)).result()
    assert grammars.compile(asked(tokenizer, regex="a+")) is not first
    constraints = [first.result().constraint() for _ in range(2)]
    mask = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
    for constraint in constraints:  # each for itself
        for token in tokenizer.encode("aaa", add_special_tokens=False):
            constraint.fill_mask(mask)
            assert not constraint.advance(token)


def test_what_failed_is_tried_again(tokenizer: Tokenizer) -> None:
    tried: list[Grammar] = []

    def make(each: Grammar) -> str:
        tried.append(each)
        if len(tried) == 1:
            raise InvalidRequest("regex", "too slow today")
        return "made"

    cache = GrammarCache(make)
    with pytest.raises(InvalidRequest, match="too slow today"):
        cache.check(asked(tokenizer, regex="a+"))
    cache.check(asked(tokenizer, regex="a+"))
    cache.check(asked(tokenizer, regex="a+"))
    assert len(tried) == 2


def test_a_slow_grammar_is_waited_for_only_so_long(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(grammar, "MAX_SECONDS", 0.05)
    grammars: GrammarCache[Any] = GrammarCache(lambda _: go_on.wait(10))
    with pytest.raises(InvalidRequest, match=r"regex: the grammar was not compiled within 0\.05 s"):
        grammars.check(asked(tokenizer, regex="a+"))
    go_on.set()


def test_the_grammar_of_a_request_comes_with_what_went_wrong(grammars: Grammars, tokenizer: Tokenizer) -> None:
    made: Future[Any] = grammars.constraint(asked(tokenizer, regex="("))
    with pytest.raises(InvalidRequest, match="unclosed group"):
        made.result()


def test_a_grammar_behind_the_reasoning(grammars: Grammars, tokenizer: Tokenizer) -> None:
    fields = {"json_schema": {"type": "integer"}, "require_reasoning": True}
    taken = {
        "<think>why not</think>\n\n12": "may end",
        "12": "may end",
        "<think>12": "goes on",
        "<think>a</think>x": "refused",
        "why": "refused",
    }
    assert {text: follows(grammars, tokenizer, text, **fields) for text in taken} == taken


@pytest.mark.parametrize(
    ("fields", "thinking", "param"),
    [
        ({"regex": "a", "require_reasoning": True}, None, "require_reasoning"),
        ({"max_thinking_tokens": 5}, None, "max_thinking_tokens"),
        ({"regex": "a", "max_thinking_tokens": 5}, Thinking("<t>", "</t>", False), "max_thinking_tokens"),
    ],
)
def test_reasoning_that_cannot_be_asked_for(fields: dict[str, Any], thinking: Thinking | None, param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        grammar_of(SamplingParams(**fields), thinking, {})
    assert raised.value.param == param


def test_explanations() -> None:
    assert explained("regex parse error:\n    (a\n    ^\nerror: unclosed group\n") == "regex parse error: error: unclosed group"
    assert explained('Unimplemented keys: ["if", "then"]\n<state>') == '"if", "then" cannot be enforced'
    assert explained("") == "it went beyond a limit"
    assert explained("x" * 9999) == "x" * 400 + "..."
