"""What the grammars admit, character by character, and that the parsers read it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sidestream.errors import InvalidRequest
from sidestream.text.tools.events import Arguments, CallBegun
from sidestream.text.tools.format import FORMATS, format_of
from sidestream.text.tools.tool import Tool

llguidance = pytest.importorskip("llguidance")

F = Tool(
    "f",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    },
    strict=True,
)
G = Tool("g")
MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<think>", "</think>")
VARIANTS = {
    **FORMATS,
    "named": format_of("[TOOL_CALLS][ARGS]"),
    "identified": format_of("[TOOL_CALLS][CALL_ID][ARGS]"),
}
CALLS = {  # f(a=1, b="x"), then g()
    "hermes": (
        '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "x"}}\n</tool_call>',
        '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    ),
    "llama3_json": ('{"name": "f", "parameters": {"a": 1,\n  "b": "x"}}', '; {"name": "g", "parameters": {}}'),
    "pythonic": ('[f(a=1, b="x")', ", g()]"),
    "mistral": ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1, "b": "x"}}', ', {"name": "g", "arguments": {}}]'),
    "named": ('[TOOL_CALLS]f[ARGS]{"a": 1, "b": "x"}', "[TOOL_CALLS]g[ARGS]{}"),
    "identified": ('[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{"a": 1, "b": "x"}', "[TOOL_CALLS]g[CALL_ID]000000000[ARGS]{}"),
}
LAST = {"pythonic": "]", "mistral": "]"}  # what ends a single call


class Vocabulary:
    """One token for each byte, and for each marker, if so, one more."""

    def __init__(self, special: bool) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self.backend = Tokenizer(models.BPE({character: place for place, character in enumerate(alphabet)}, []))
        self.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self.backend.decoder = decoders.ByteLevel()
        self.backend.add_special_tokens(["<eos>"])
        if special:
            self.backend.add_tokens([AddedToken(marker, special="[" in marker, normalized=False) for marker in MARKERS])
        self._marked = special
        self._tokenizer = llguidance.LLTokenizer(self.backend.to_str(), eos_token=self.backend.token_to_id("<eos>"))

    @property
    def special(self) -> dict[str, int]:
        return {marker: self.backend.token_to_id(marker) for marker in MARKERS} if self._marked else {}

    def admits(self, grammar: str, text: str) -> bool:
        """Whether the whole text is admitted, and may end there."""
        matcher = llguidance.LLMatcher(self._tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar))
        assert not matcher.is_error(), matcher.get_error()
        ids = self.backend.encode(text, add_special_tokens=False).ids
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "characters"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return Vocabulary(request.param)


def grammar(name: str, vocabulary: Vocabulary, *tools: Tool, parallel: bool = True, free: bool = False) -> str:
    made: str = VARIANTS[name].grammar(tools or (F, G), parallel=parallel, free=free, special=vocabulary.special)
    assert not llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_lark(made))
    return made


@pytest.mark.parametrize("name", VARIANTS)
def test_calls_and_nothing_else(name, vocabulary):
    both, single = grammar(name, vocabulary), grammar(name, vocabulary, parallel=False)
    first, second = CALLS[name]
    one = first + LAST.get(name, "")
    assert vocabulary.admits(both, first + second) and vocabulary.admits(both, one)
    assert vocabulary.admits(single, one) and not vocabulary.admits(single, first + second)
    for wrong in (
        "",
        f"text {one}",
        f"{one} text",
        one.replace("1", '"1"'),
        one.replace('"x"', '"z"'),
        one.replace("f", "h", 1),
        one + one,
    ):
        assert not vocabulary.admits(both, wrong) or (wrong == one + one and name in ("named", "identified")), wrong


@pytest.mark.parametrize("name", VARIANTS)
def test_the_parser_reads_what_the_grammar_admits(name):
    parser = VARIANTS[name].parser(["f", "g"])
    events = parser.feed("".join(CALLS[name])) + parser.finish()
    assert [event.name for event in events if isinstance(event, CallBegun)] == ["f", "g"]
    arguments = ["".join(event.text for event in events if isinstance(event, Arguments) and event.index == index) for index in (0, 1)]
    assert list(map(json.loads, arguments)) == [{"a": 1, "b": "x"}, {}]
    assert all(isinstance(event, CallBegun | Arguments) for event in events)


@pytest.mark.parametrize("name", VARIANTS)
def test_calls_among_free_text(name, vocabulary):
    """Only what begins as a call is held to the schema, and of a tool that is not strict only to be an object."""
    free = grammar(name, vocabulary, F, replace(G, name="g"), free=True)
    first, second = CALLS[name]
    one = first + LAST.get(name, "")
    assert vocabulary.admits(free, "") and vocabulary.admits(free, "Some text: a < b\nand more.")
    assert vocabulary.admits(free, one) and vocabulary.admits(free, first + second)
    assert not vocabulary.admits(free, one.replace("1", '"1"')) and not vocabulary.admits(free, one.replace('"x"', '"z"'))
    other = second.replace("{}}", '{"q": 7}}').replace("{}", '{"q": 7}').replace("g()", "g(q=7)")
    assert vocabulary.admits(free, first + other)
    if name in ("hermes", "mistral", "named", "identified"):
        assert vocabulary.admits(free, f"Well, {one}")
        assert vocabulary.admits(free, f"{one} and more") == (name != "mistral")


def test_space_in_arguments_is_bounded(vocabulary):
    made = grammar("hermes", vocabulary)
    call = CALLS["hermes"][0]
    assert vocabulary.admits(made, call.replace('"a": 1', '\n    "a": 1\n'))
    assert not vocabulary.admits(made, call.replace('"a": 1', '"a":  1')) and not vocabulary.admits(
        made, call.replace('"a": 1', '\n\n"a": 1')
    )


def test_order_of_arguments_in_python(vocabulary):
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in "abcd"}, "required": ["b", "d"]}
    made = grammar("pythonic", vocabulary, Tool("f", parameters=schema), parallel=False)
    for inside in ("b=1, d=2", "a=1, b=1, d=1", "b=1, c=1, d=1", "a=0, b=1, c=2, d=3"):
        assert vocabulary.admits(made, f"[f({inside})]"), inside
    for inside in ("", "a=1", "b=1", "d=1, b=1", "a=1, d=1", ", b=1, d=1", "b=1, d=1, ", "b=1, b=1, d=1"):
        assert not vocabulary.admits(made, f"[f({inside})]"), inside
    none = grammar("pythonic", vocabulary, Tool("f", parameters={"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}))
    for inside in ("", "a=1", "b=1", "a=1, b=1"):
        assert vocabulary.admits(none, f"[f({inside})]"), inside


def test_definitions_go_with_the_schema(vocabulary):
    tree = {
        "type": "object",
        "properties": {"t": {"$ref": "#/$defs/t"}},
        "required": ["t"],
        "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}},
    }
    for name, text in (("pythonic", "[f(t=[[], [[]]])]"), ("llama3_json", '{"name": "f", "parameters": {"t": [[], [[]]]}}')):
        assert vocabulary.admits(grammar(name, vocabulary, Tool("f", parameters=tree)), text)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "object", "anyOf": []}, "parameters.anyOf: got [], which cannot be enforced for arguments"),
        ({"properties": {"a-b": {}}}, "parameters.properties: got the name 'a-b', must be a name of Python's"),
        ({"properties": {"if": {}}}, "parameters.properties: got the name 'if', must be a name of Python's"),
        ({"properties": {}, "required": ["a"]}, "parameters.required: got 'a', must be one of the properties"),
        ({"properties": {"a": {"$ref": "#"}}}, "parameters: got the $ref '#', must be one into $defs"),
    ],
)
def test_what_python_has_no_place_for(schema, message):
    with pytest.raises(InvalidRequest) as error:
        VARIANTS["pythonic"].grammar([Tool("f", parameters=schema)], parallel=True, free=False, special={})
    assert error.value.message == message


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "array"}, "parameters.type: got 'array', must be 'object': arguments have names"),
        ({"properties": []}, "parameters.properties: got [], must be an object of schemas"),
        ({"required": "a"}, "parameters.required: got 'a', must be a list of names"),
        ({"properties": {"a": {"type": "strin"}}}, "parameters.properties.a: got {'type': 'strin'}, must be a JSON Schema"),
        ({"properties": {"a": {"items": {"anyOf": [{}, 3]}}}}, "parameters.properties.a.items.anyOf.1: got 3, must be a JSON Schema"),
        ({"properties": {"a": None}}, "parameters.properties.a: got None, must be a JSON Schema"),
        ({"x-guidance": {}}, "parameters: got the keyword x-guidance, which is no keyword of JSON Schema, must be left out"),
    ],
)
def test_a_tool_that_cannot_be(schema, message):
    with pytest.raises(InvalidRequest) as error:
        Tool("f", parameters=schema)
    assert error.value.message == message
