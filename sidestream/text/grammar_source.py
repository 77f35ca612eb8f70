"""From the fields of a request to a grammar in llguidance's form. What only the compiler sees, it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sidestream.errors import InvalidRequest
from sidestream.messages import Budget, Grammar, Thinking
from sidestream.options import shown
from sidestream.params import SamplingParams
from sidestream.text import structural_tag
from sidestream.text.json_schema import enforceable
from sidestream.text.lark import OPTIONS, check_schema, lark_regex, literal, schema

HAS_START = re.compile(r"^[ \t]*\??start\b[^:\n]*:(?![:=])", re.MULTILINE)  # the rule that only Lark's grammars begin with
INLINE_SCHEMA = re.compile(r"%json\s*(?=\{)")


def grammar_of(sampling: SamplingParams, thinking: Thinking | None, special: Mapping[str, int]) -> Grammar | None:
    """What a request's text may be; None if anything. `thinking`: how the model reasons, if it does; `special`: ids of special tokens.

    Nothing is read or written in another form here: that may take tens of milliseconds. Raises InvalidRequest.
    """
    field, budget = sampling.grammar, None
    if sampling.max_thinking_tokens is not None:
        if thinking is None:
            raise InvalidRequest("max_thinking_tokens", f"got {sampling.max_thinking_tokens}, but this model does not reason in tags")
        budget = Budget(sampling.max_thinking_tokens, thinking)
    if field is None:
        return None if budget is None else Grammar("max_thinking_tokens", None, budget=budget)
    if sampling.require_reasoning and thinking is None:
        raise InvalidRequest("require_reasoning", "got true, but this model does not reason in tags")
    if budget is not None and not sampling.require_reasoning:
        raise InvalidRequest("max_thinking_tokens", f"got {budget.tokens} beside {field}, must be left out without require_reasoning")
    return Grammar(field, getattr(sampling, field), thinking if sampling.require_reasoning else None, budget)


def source_of(grammar: Grammar, special: Mapping[str, int]) -> str:
    """In the compiler's form. Raises InvalidRequest."""
    source = _SOURCES[grammar.field](grammar.source, special)
    return source if grammar.reasoning is None else _after_reasoning(source, grammar.reasoning, special)


def json_grammar(field: str, schema: Any) -> str:
    """Of a JSON Schema. Raises InvalidRequest."""
    from llguidance import LLMatcher

    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequest(field, f"got {json.dumps(schema)[:80]}, must be a JSON Schema, which is an object")
    check_schema(field, schema)
    text = json.dumps(enforceable(field, schema))  # not as it is: the binding knows no integers of more than 64 bits
    return LLMatcher.grammar_from_json_schema(text, overrides=OPTIONS)  # type: ignore[arg-type]


def read_json(field: str, text: str) -> Any:
    """Raises InvalidRequest."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(field, f"got a text that is no JSON: {reason}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"it has {name} in it")


def _json_schema(text: str, _: Mapping[str, int]) -> str:
    return json_grammar("json_schema", read_json("json_schema", text))


def _regex(pattern: str, _: Mapping[str, int]) -> str:
    return wrapped(f"start: {lark_regex(pattern)}")


def _choice(texts: Sequence[str], special: Mapping[str, int]) -> str:
    """As one regular expression: of some thousand alternatives of a grammar the parser would follow each."""
    for token in special:  # which the compiler would write in place of the characters
        if (found := next((text for text in texts if token in text), None)) is not None:
            raise InvalidRequest("choice", f"got {shown(found)}, which has the special token {token!r} in it, must be without")
    return _regex("|".join(re.sub(r"[\\.+*?()|\[\]{}^$#&\-~/]", r"\\\g<0>", text) for text in texts), special)


def _ebnf(text: str, _: Mapping[str, int]) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if HAS_START.search(text):
        return wrapped(_with_enforceable_schemas(text))
    try:
        return wrapped(gbnf_to_lark(text))
    except Exception as error:  # bare ones among them
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        hint = "GBNF has a rule root ::= ..., Lark a rule start: ..."
        raise InvalidRequest("ebnf", f"the grammar cannot be read: {reason}", hint=hint) from None


def _with_enforceable_schemas(lark: str) -> str:
    """The schemas within a grammar are as strict as one that is asked for by itself."""
    made, place = [], 0
    for found in INLINE_SCHEMA.finditer(lark):
        if found.start() < place:  # within the last one
            continue
        try:
            value, end = json.JSONDecoder(parse_constant=_no_constant).raw_decode(lark, found.end())
        except (ValueError, RecursionError):
            raise InvalidRequest("ebnf", f"got %json before what is no JSON: {lark[found.end() :][:80]!r}") from None
        if value.get("x-guidance") == OPTIONS:  # it has been through here
            del value["x-guidance"]
        check_schema("ebnf", value)
        made += [lark[place : found.start()], schema(value, "ebnf")]
        place = end
    return "".join([*made, lark[place:]])


def _structural_tag(text: str, special: Mapping[str, int]) -> str:
    return wrapped(structural_tag.lark_of(read_json("structural_tag", text), special))


def wrapped(lark: str) -> str:
    """A Lark grammar in the form that grammars of several parts have, too."""
    return json.dumps({"grammars": [{"name": "lark", "lark_grammar": lark}]})


def _after_reasoning(source: str, thinking: Thinking, special: Mapping[str, int]) -> str:
    """The grammar, behind the reasoning, which the model may leave out where the prompt has not begun it."""
    parts = json.loads(source)["grammars"]
    parts[0]["name"] = "answer"
    end = literal(thinking.end, special)
    if thinking.end in special:
        rest = f"rest: /(?s:.*)/ {end}\n"
    else:
        rest = f"rest[suffix={end}]: /(?s:.*)/\n"
    begin = "rest" if thinking.inside else f"(/\\s*/ {literal(thinking.begin, special)} rest)?"
    main = f"start: {begin} /\\n{{0,2}}/ @answer\n{rest}"
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, *parts]})


_SOURCES: dict[str, Callable[[Any, Mapping[str, int]], str]] = {
    "json_schema": _json_schema,
    "regex": _regex,
    "ebnf": _ebnf,
    "choice": _choice,
    "structural_tag": _structural_tag,
}
