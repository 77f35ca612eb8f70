"""Calls read from an answer: the same however the text is cut, and nothing of it lost."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestream.text.tools.events import Arguments, CallBegun, Content
from sidestream.text.tools.format import FORMATS
from sidestream.text.tools.pythonic import read_arguments

NAMES = {"f", "get_weather", "g-2"}


def parsed(name: str, pieces: Iterable[str]) -> list[str | tuple[str, str]]:
    """Content as texts, calls as names with their arguments, in order."""
    parser = FORMATS[name].parser(NAMES)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    found: list[str | tuple[str, str]] = []
    calls = 0
    for event in events:
        match event:
            case Content(text):
                assert text
                if found and isinstance(found[-1], str):
                    found[-1] += text
                else:
                    found.append(text)
            case CallBegun(index, id, tool):
                assert index == calls and id
                calls += 1
                found.append((tool, ""))
            case Arguments(index, text):
                assert text and index == calls - 1
                found[-1] = (found[-1][0], found[-1][1] + text)
    return found


CASES = [
    # As models write them
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [("f", '{"a": 1}')]),
    (
        "hermes",
        'Let me see.\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n'
        '{"name": "get_weather", "arguments": {"city": "}</tool_call>\\""}}\n</tool_call>\n',
        ["Let me see.", ("f", "{}"), ("get_weather", '{"city": "}</tool_call>\\""}')],
    ),
    ("hermes", '<tool_call>{"arguments": {"a": [1, {}]}, "name": "f"}</tool_call> done', [("f", '{"a": [1, {}]}'), "done"]),
    ("hermes", '<tool_call>{"id": 3, "name": "g-2"}</tool_call>', [("g-2", "{}")]),
    ("hermes", "plain <text> with < and <tool\n", ["plain <text> with < and <tool\n"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_', [("f", '{"a": 1}')]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1.5e3}}', [("f", '{"a": 1.5e3}')]),
    (
        "llama3_json",
        ' <|python_tag|>{"name": "f", "parameters": {}}; {"name": "f", "arguments": {"b": null}}',
        [("f", "{}"), ("f", '{"b": null}')],
    ),
    ("llama3_json", 'Sure. <|python_tag|>{"type": "function", "name": "f", "parameters": {}}', ["Sure.", ("f", "{}")]),
    ("llama3_json", 'Sure: {"name": "f", "parameters": {}}', ['Sure: {"name": "f", "parameters": {}}']),
    ("llama3_json", '{"name": "f"}', ['{"name": "f"}']),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"arguments": {}, "name": "g-2", "id": "x"}]',
        [("f", '{"a": 1}'), ("g-2", "{}")],
    ),
    ("mistral", 'Yes.[TOOL_CALLS]{"name": "f", "arguments": {}}', ["Yes.", ("f", "{}")]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g-2{"b": "]"}', [("f", '{"a": 1}'), ("g-2", '{"b": "]"}')]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS] {"a": 1}', [("f", '{"a": 1}')]),
    ("pythonic", '[f(a=1, b="x"), g-2()]', [("f", '{"a": 1, "b": "x"}'), ("g-2", "{}")]),
    (
        "pythonic",
        " [f(a=[True, null, {\"k\": (1, -2.5)}], b='it\\'s )]')]\n",
        [("f", '{"a": [true, null, {"k": [1, -2.5]}], "b": "it\'s )]"}')],
    ),
    ("pythonic", "a list: [f(a=1)]", ["a list: [f(a=1)]"]),
    # What is no call is text as it was
    ("hermes", '<tool_call>{"name": "h", "arguments": {}}</tool_call> x', ['<tool_call>{"name": "h", "arguments": {}}</tool_call> x']),
    (
        "hermes",
        '  <tool_call>{"name": "f", "arguments": "text"}</tool_call>',
        ['  <tool_call>{"name": "f", "arguments": "text"}</tool_call>'],
    ),
    ("hermes", '<tool_call><tool_call>{"name": "f"}</tool_call>', ["<tool_call>", ("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "argum', ['<tool_call>{"name": "f", "argum']),
    ("hermes", "<tool_call>not JSON</tool_call>", ["<tool_call>not JSON</tool_call>"]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f', ['<tool_call>{"arguments": {"a": 1}, "name": "f']),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": }, "name": "f"}</tool_call>',
        ['<tool_call>{"arguments": {"a": }, "name": "f"}</tool_call>'],
    ),
    ("llama3_json", '{"answer": 42}', ['{"answer": 42}']),
    (
        "llama3_json",
        '{"name": "h", "parameters": {}}; {"name": "f", "parameters": {}}',
        ['{"name": "h", "parameters": {}}; {"name": "f", "parameters": {}}'],
    ),
    ("llama3_json", '{"name": "f", "parameters": {}}; and {', [("f", "{}"), "; and {"]),
    ("mistral", "[TOOL_CALLS] nothing {", ["[TOOL_CALLS] nothing {"]),
    ("mistral", "[TOOL_CALLS][1]", ["[TOOL_CALLS][1]"]),
    ("mistral", '[TOOL_CALLS]h[ARGS]{"a": 1}', ['[TOOL_CALLS]h[ARGS]{"a": 1}']),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "h", "arguments": {}}]',
        [("f", "{}"), ', {"name": "h", "arguments": {}}]'],
    ),
    ("pythonic", "[1, 2]", ["[1, 2]"]),
    ("pythonic", "[f(1)]", ["[f(1)]"]),
    ("pythonic", "[f(a=1, a=2)]", ["[f(a=1, a=2)]"]),
    ("pythonic", "[f(a=open('x'))]", ["[f(a=open('x'))]"]),
    ("pythonic", "[h(a=1)]", ["[h(a=1)]"]),
    ("pythonic", "[f(a=1), h(a=2)] x", [("f", '{"a": 1}'), ", h(a=2)] x"]),
    ("pythonic", "[f(a=1", ["[f(a=1"]),
    # Once arguments have gone out it is a call
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "unfini', [("f", '{"a": "unfini')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call> x', [("f", '{"a": tru}}'), "x"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}} }</tool_call>', [("f", "{}"), "}</tool_call>"]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 01}}; x', [("f", '{"a": 01}}; x')]),
]


@pytest.mark.parametrize(("format", "text", "expected"), CASES)
def test_the_same_however_it_is_cut(format, text, expected):
    assert parsed(format, [text]) == expected
    assert parsed(format, text) == expected
    for cut in range(len(text) + 1):
        assert parsed(format, [text[:cut], text[cut:]]) == expected
        assert parsed(format, [*text[:cut], text[cut:]]) == expected


WORDS = {
    "hermes": [
        "<tool_call>",
        "</tool_call>",
        "<tool_",
        "\n",
        " ",
        '{"name": "f", "arguments": ',
        '{"a": 1}',
        "}",
        '"',
        "{",
        "x",
        '"h"',
        "\\",
        ",",
    ],
    "llama3_json": ["<|python_tag|>", "<|py", ";", " ", '{"name": "f", "parameters": ', '{"a": 1}', "}", '"', "{", "x", "\\", ","],
    "mistral": [
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "[TOOL",
        "[",
        "]",
        " ",
        ",",
        "f",
        "h",
        '{"name": "f", "arguments": ',
        '{"a": 1}',
        "}",
        '"',
    ],
    "pythonic": ["[", "]", "f(", "g-2(", "h(", ")", "a=", "b=", "1", ", ", '"', "'", "\\", " ", "x", "\n", "{", "}", "#"],
}


@given(
    st.sampled_from(sorted(WORDS)).flatmap(lambda name: st.tuples(st.just(name), st.lists(st.sampled_from(WORDS[name]), max_size=14))),
    st.randoms(),
)
def test_any_text_is_the_same_however_it_is_cut_and_nothing_of_it_is_lost(drawn, random):
    name, words = drawn
    text = "".join(words)
    whole = parsed(name, [text])
    cuts = sorted(random.randrange(len(text) + 1) for _ in range(3))
    assert parsed(name, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole
    assert parsed(name, text) == whole
    assert everything_is_there(name, text, whole)


def everything_is_there(name: str, text: str, found: list[str | tuple[str, str]]) -> bool:
    """Without calls the text itself; with calls, in its order, all content and arguments, and beside them only what makes up calls."""
    if all(isinstance(each, str) for each in found):
        return "".join(found) == text  # type: ignore[arg-type]
    at, beside = 0, ""
    for each in found:
        for part in [each] if isinstance(each, str) or name == "pythonic" else [each[1]]:
            if not isinstance(part, str):  # made from Python's notation
                continue
            where = text.find(part, at)
            if where < 0:
                return part == "{}"
            beside, at = beside + text[at:where], where + len(part)
    beside += text[at:]
    return "x" not in beside


@given(st.text())
def test_text_without_markers_passes_as_it_is(text):
    for name in ("hermes", "mistral"):
        assert "".join(parsed(name, text)) == text  # type: ignore[arg-type]


def test_arguments_are_told_while_they_come():
    parser = FORMATS["hermes"].parser(NAMES)
    assert parser.feed("Well, <tool") == [Content("Well,")]
    assert parser.feed('_call>{"name": "f", "arg') == []
    begun, arguments = parser.feed('uments": {"a')
    assert (begun.index, begun.name, arguments) == (0, "f", Arguments(0, '{"a'))
    assert parser.feed('": "b') == [Arguments(0, '": "b')]
    assert parser.feed('"}}</tool_') == [Arguments(0, '"}')]
    assert parser.feed("call>") == parser.finish() == []


def test_ids():
    def ids(name: str) -> set[str]:
        parser = FORMATS[name].parser(NAMES)
        return {
            event.id
            for event in parser.feed('[TOOL_CALLS]f{}[TOOL_CALLS]f{}<tool_call>{"name": "f"}<tool_call>{"name": "f"}')
            if isinstance(event, CallBegun)
        }

    assert len(ids("hermes")) == len(ids("mistral")) == 2
    assert all(id.startswith("call_") for id in ids("hermes"))
    assert all(len(id) == 9 and id.isalnum() for id in ids("mistral"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ('a="\\/\\d\\n", b="é"', {"a": "/\\d\n", "b": "é"}),
        ('a="\\ud83d\\ude00"', {"a": "\U0001f600"}),
        ("a=1.5, b=-3, c=None, d=false, e=[], f={}, g='x' 'y'", {"a": 1.5, "b": -3, "c": None, "d": False, "e": [], "f": {}, "g": "xy"}),
        ("a=1 # comment", {"a": 1}),
        ("a=1e999", None),
        ("a=1+1", None),
        ("a=b'x'", None),
        ("a=1j", None),
        ("a=...", None),
        ("**{'a': 1}", None),
        ("*[1]", None),
        ("a={1: 2}", None),
        ("a={**b}", None),
        ("a=f'{b}'", None),
        ("a=" + "9" * 5000, None),
        ("a=" + "[" * 3000 + "]" * 3000, None),
        ("a=__import__('os')", None),
        ("a=x", None),
    ],
)
def test_python_arguments(text, expected):
    read = read_arguments(text)
    assert (None if read is None else json.loads(read)) == expected
