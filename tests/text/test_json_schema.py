"""Schemas that the compiler alone would take too loosely, or refuse without need."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from sidestream.errors import InvalidRequest
from sidestream.text.json_end import has_end
from sidestream.text.json_schema import MAX_DEPTH, enforceable
from sidestream.text.tokenizer import Tokenizer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCHEMAS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "schemas.json").read_text())
STEPS = 150  # of a walk
A, B = {"const": "a"}, {"const": "b"}


@pytest.fixture(scope="module")
def schemas(default_model: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import json_schema_suite

        yield json_schema_suite.Schemas()
        sys.modules.pop("json_schema_suite")


def accepted(schemas: Any, schema: Any, *texts: str) -> list[bool]:
    compiled = schemas.compiled(schema)
    return [schemas.accepts(compiled, text) for text in texts]


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        # A name may be written with escapes.
        ({"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}, '{"a":1,"b":"c"}', r'{"\u0061":"s"}'),
        ({"patternProperties": {"^a": {"type": "integer"}}}, '{"a":1,"b":"s"}', r'{"\u0061":"s"}'),
        ({"properties": {"é": {"type": "integer"}}, "additionalProperties": {"type": "string"}}, '{"é":1}', r'{"\u00e9":"s"}'),
        ({"type": "string"}, r'"\"\\\b\f\n\r\t é😀"', r'"\u0061"'),
        # Formats.
        ({"format": "date"}, '"2024-02-29"', '"2023-02-29"'),
        ({"format": "date"}, '"2000-02-29"', '"1900-02-29"'),
        ({"format": "date"}, '"1999-12-31"', '"0000-01-01"'),
        ({"format": "date-time"}, '"2024-02-29T23:59:60Z"', '"2024-02-29T12:00:60Z"'),
        ({"format": "time"}, '"12:30:00.5+02:00"', '"24:00:00Z"'),
        ({"format": "date", "pattern": "^2"}, '"2024-02-29"', '"1999-01-01"'),
        ({"format": "ipv6"}, '"::ffff:192.168.0.1"', '"::ffff:192.168.0.256"'),
        ({"format": "json-pointer"}, '"/a~1b/0"', '"a"'),
        ({"type": "integer", "format": "int32"}, "2147483647", "2147483648"),
        ({"type": "integer", "format": "int64", "minimum": 1}, "9223372036854775807", "9223372036854775808"),
        ({"format": "byte"}, '"aGk="', '"aGk"'),
        # What has no effect is left out.
        ({"type": "array", "uniqueItems": False}, "[1,1]", "1"),
        ({"type": "string", "then": {"const": 5}, "maxContains": 1, "not": False}, '"a"', "5"),
        ({"type": "object", "unevaluatedProperties": True, "propertyNames": {}}, '{"a":1}', "1"),
        ({"type": "string", "minLength": 2.0, "maxLength": 1e12}, '"ab"', '"a"'),
        ({"type": "object", "dependentRequired": {"a": []}, "dependentSchemas": {"a": True}}, '{"a":1}', "1"),
        # Alternatives that exclude each other.
        ({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": A, "b": B}}, '"b"', '"c"'),
        (
            {"oneOf": [{"type": "object", "properties": {"k": each}, "required": ["k"]} for each in (A, B, {"enum": ["c", 1.0]})]},
            '{"k":1}',
            '{"k":2}',
        ),
        (
            {"oneOf": [{"type": "object", "properties": {n: True}, "required": [n], "additionalProperties": False} for n in "ab"]},
            '{"b":2}',
            '{"c":2}',
        ),
        ({"oneOf": [{"type": ["integer", "null"]}, {"enum": ["a", True]}]}, "true", "false"),
        # Numbers.
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "0.5", "0"),
        ({"type": "integer", "exclusiveMinimum": 0, "maximum": 0x7FFFFFFFFFFFFFFF}, "1", "0"),
        ({"minProperties": 2, "required": ["a"]}, '{"a":1,"b":1}', '{"a":1}'),
    ],
)
def test_what_is_enforced(schemas: Any, schema: Any, valid: str, invalid: str) -> None:
    assert accepted(schemas, schema, valid, invalid) == [True, False]
    checked = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    formats = schema.get("format") in ("int32", "int64", "byte", "time", "date-time")  # no format of JSON Schema, or other leap seconds
    assert formats or checked.is_valid(json.loads(valid))
    assert formats or not checked.is_valid(json.loads(invalid)) or "\\u" in invalid


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum 0 beside maximum 0.5"),
        ({"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, "exclusiveMaximum -1 beside minimum -1.5"),
        (
            {"allOf": [{"exclusiveMinimum": 3.0}, {"$ref": "#/$defs/a"}], "maximum": 9, "$defs": {"a": {"maximum": 3.5}}},
            "exclusiveMinimum 3",
        ),
        ({"minimum": 1e30}, r"1e\+30"),
        ({"minimum": -(2**63) - 2048}, "number -9223372036854777856"),
        ({"maximum": 2**64}, "maximum 18446744073709551616"),
        ({"type": "integer", "minimum": 2**53 + 1}, "minimum 9007199254740993"),
        ({"const": 10**400}, "the number"),
        ({"const": "a\x01"}, "const .*control characters"),
        ({"enum": ["a", {"b": ["\x7f"]}]}, "enum .*control characters"),
        ({"const": "\ud800"}, "surrogate"),
        ({"properties": {"\udfff": True}}, "surrogate"),
        ({"minProperties": 2}, "minProperties 2"),
        ({"minProperties": 1, "allOf": [{"minProperties": 4, "required": ["a", "b"]}]}, "minProperties 4"),
        ({"minLength": 2**40}, "minLength"),
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}, "oneOf"),
        ({"oneOf": [{"type": "object", "properties": {"k": A}}, {"type": "object", "properties": {"k": B}}]}, "oneOf"),
        ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "oneOf"),
        ({"$ref": "http://example.com/schema"}, r"\$ref .*http://example.com/schema.*nothing is fetched"),
        ({"$ref": "file:///etc/passwd"}, r"\$ref .*nothing is fetched"),
        ({"$ref": "#/$defs/nowhere"}, r"\$ref '#/\$defs/nowhere' leads nowhere"),
        ({"format": "idn-email"}, "format idn-email"),
        ({"type": "string", "format": "no such format"}, "format no such format"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
        ({"type": "text"}, "type"),
        ({"properties": []}, "properties"),
        ({"items": 5}, "schema must be"),
        ({"type": "object", "required": ["a"], "properties": {"a": False}}, "required property 'a'"),
        ({"minItems": 3, "maxItems": 2, "type": "array"}, "minItems"),
        ({"pattern": "(?=a)"}, "regex parse error: error: look-around"),
    ],
)
def test_what_is_refused(schemas: Any, schema: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as raised:
        schemas.compiled(schema)
    assert raised.value.param == "json_schema"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/a"}]}], "minItems": 1, "$defs": {"a": {"$ref": "#"}}},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"type": "object", "required": ["a"], "properties": {}, "additionalProperties": {"$ref": "#"}},
    ],
)
def test_a_schema_that_only_endless_texts_obey(schema: Any) -> None:
    assert not has_end(schema)
    with pytest.raises(InvalidRequest, match=r"\$ref to a schema that requires itself"):
        enforceable("json_schema", schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}},
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"$ref": "#/$defs/r0", "$defs": {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(500)} | {"r500": {"type": "null"}}},
        {"$ref": "http://example.com/elsewhere"},
        {"$ref": "#/nowhere"},
        {"required": 5, "properties": 7, "allOf": 3, "type": "object", "minItems": "x"},  # the compiler refuses it
    ],
)
def test_a_schema_that_may_end(schema: Any) -> None:
    assert has_end(schema)


def test_schemas_that_would_take_long_to_look_at() -> None:
    """In the worst case a few tenths of a second."""
    with pytest.raises(InvalidRequest, match="minimum in more places than can be compared"):
        enforceable("json_schema", {"anyOf": [{"minimum": 0, "anyOf": [{"$ref": "#"}]} for _ in range(3000)] + [{"type": "null"}]})
    places = list(range(6000))
    random.Random(1).shuffle(places)
    chain = {f"r{place}": {"$ref": f"#/$defs/r{after}"} for place, after in pairwise(places)}
    enforceable("json_schema", {"$ref": f"#/$defs/r{places[0]}", "$defs": dict(sorted(chain.items())) | {f"r{places[-1]}": True}})
    same = {"type": "object", "required": list("abcdefgh"), "properties": {name: {"$ref": "#"} for name in "abcdefgh"}}
    made = enforceable("json_schema", {"anyOf": [{"type": "null"}, {"oneOf": [same] * 130}]})
    assert "oneOf" in made["anyOf"][1], "not shown to exclude one another"


def test_depth() -> None:
    schema: dict[str, Any] = {}
    for _ in range(MAX_DEPTH // 2 - 1):
        schema = {"properties": {"a": schema}}
    enforceable("json_schema", schema)
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        enforceable("json_schema", {"properties": {"a": {"properties": {"a": schema}}}})


def test_a_schema_is_not_changed() -> None:
    schema = {
        "$defs": {"a": {"format": "date", "uniqueItems": False}},
        "oneOf": [{"$ref": "#/$defs/a", "type": "string"}, {"type": "null"}],
    }
    before = json.dumps(schema)
    made = enforceable("json_schema", schema)
    assert json.dumps(schema) == before
    assert list(made["$defs"]["a"]) == ["allOf"] and "anyOf" in made and "oneOf" not in made


def test_values_are_not_taken_for_schemas() -> None:
    schema = {"const": {"uniqueItems": False, "format": "date"}, "default": {"minProperties": 9}, "examples": [{"oneOf": [1]}]}
    assert enforceable("json_schema", schema) == schema


# Walks: whatever the masks admit must be valid.


def walk(schemas: Any, schema: Any, seed: int) -> bytes | None:
    """A text made of tokens that the grammar admits, chosen at random; None where it has no end after some steps."""
    tokenizer: Tokenizer = schemas.tokenizer
    constraint, choose = schemas.compiled(schema).constraint(), random.Random(seed)
    mask, text = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32), b""
    for _ in range(STEPS):
        constraint.fill_mask(mask)
        admitted = set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
        if admitted & set(tokenizer.eos_token_ids) and (len(admitted) == 1 or choose.random() < 0.5):
            return text
        admitted -= set(tokenizer.eos_token_ids)
        short = sorted(admitted & _short(tokenizer)) if choose.random() < 0.6 else []
        ends = [token for token in short if tokenizer.token_bytes(token) in (b'"', b"}", b"]")]
        token = choose.choice(ends if ends and choose.random() < 0.4 else short or sorted(admitted))
        text += tokenizer.token_bytes(token)
        if constraint.advance(token):
            return text
    return None


def _short(tokenizer: Tokenizer) -> set[int]:
    """Tokens of one byte, most of which mean something in JSON."""
    if not hasattr(tokenizer, "_tests_short"):
        tokenizer._tests_short = {i for i in range(3, tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}  # type: ignore[attr-defined]
    return tokenizer._tests_short  # type: ignore[attr-defined,no-any-return]


def check_walk(schema: Any, text: bytes) -> None:
    decoder = json.JSONDecoder(parse_float=Decimal)
    validator = validator_for(schema, default=Draft202012Validator)
    made = validator(decoder.decode(json.dumps(schema)), format_checker=validator.FORMAT_CHECKER)
    errors = [error.message for error in made.iter_errors(decoder.decode(text.decode()))]
    assert errors == [], (text, schema)


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_met_in_the_wild_admit_nothing_invalid(schemas: Any, name: str) -> None:
    texts = [text for seed in range(2) if (text := walk(schemas, SCHEMAS[name], seed)) is not None]
    for text in texts:
        check_walk(SCHEMAS[name], text)


def test_the_formats_are_checked_here() -> None:
    known = Draft202012Validator.FORMAT_CHECKER.checkers
    assert {"date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "json-pointer"} <= set(known)


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_schemas_made_at_random_admit_nothing_invalid(schemas: Any, start: int) -> None:
    finished = 0
    for seed in range(start, start + 50):
        schema = RandomSchema(seed).schema(0)
        try:
            text = walk(schemas, schema, seed)
        except InvalidRequest:
            continue
        if text is not None:
            finished += 1
            check_walk(schema, text)
    assert finished >= 25


class RandomSchema:
    """Schemas of every kind, nested, with keywords that get in each other's way."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def maybe(self, share: float) -> bool:
        return self.random.random() < share

    def schema(self, depth: int) -> dict[str, Any]:
        scalar = [self.string, self.number, lambda _: {"type": ["boolean", "null"]}]
        nested = [self.object, self.object, self.array, self.enum, self.combined, lambda _: {}]
        return self.random.choice(scalar if depth > 2 else [*scalar, *nested])(depth)

    def string(self, _: int) -> dict[str, Any]:
        made: dict[str, Any] = {"type": "string"}
        if self.maybe(0.4):
            made["minLength"] = self.random.randint(0, 3)
        if self.maybe(0.4):
            made["maxLength"] = self.random.randint(3, 6)
        if self.maybe(0.3):
            made["pattern"] = self.random.choice(
                ["^a", "b$", "[0-9]", "^[a-c]*$", r"\d\d", r"^\w+$", "^.$", "é", r"\n", "^[^a]+$", "^$", r"\s"]
            )
        if self.maybe(0.2):
            made["format"] = self.random.choice(
                ["date", "date-time", "time", "email", "uuid", "ipv4", "ipv6", "uri", "hostname", "duration"]
            )
        return made

    def number(self, _: int) -> dict[str, Any]:
        made: dict[str, Any] = {"type": self.random.choice(["integer", "number"])}
        bounds = [0, 1, -1, 2, 5, 10, -7, 0.5, -0.25, 0.1, 100, 1.5, 3.25, 99.9, 1e-3]
        for names in (["minimum", "exclusiveMinimum"], ["maximum", "exclusiveMaximum"]):
            if self.maybe(0.5):
                made[self.random.choice(names)] = self.random.choice(bounds)
        if self.maybe(0.25):
            made["multipleOf"] = self.random.choice([1, 2, 3, 0.5, 0.25, 0.1, 0.01, 10, 2.5])
        return made

    def object(self, depth: int) -> dict[str, Any]:
        names = self.random.sample(["a", "b", "ab", "é", "x y", '"q'], self.random.randint(0, 4))
        made: dict[str, Any] = {"type": "object", "properties": {name: self.schema(depth + 1) for name in names}}
        if self.maybe(0.6):
            made["required"] = self.random.sample([*names, "z"], self.random.randint(0, len(names)))
        if self.maybe(0.6):
            made["additionalProperties"] = self.random.choice([False, True, self.schema(depth + 1)])
        if self.maybe(0.2):
            made["patternProperties"] = {self.random.choice(["^a", "b", "^[0-9]+$", "."]): self.schema(depth + 1)}
        if self.maybe(0.2):
            made["minProperties"] = self.random.randint(0, 3)
        if self.maybe(0.2):
            made["maxProperties"] = self.random.randint(1, 4)
        return made

    def array(self, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {"type": "array"}
        if self.maybe(0.7):
            made["items"] = self.schema(depth + 1)
        if self.maybe(0.3):
            made["prefixItems"] = [self.schema(depth + 1) for _ in range(self.random.randint(1, 3))]
        if self.maybe(0.3):
            made["minItems"] = self.random.randint(0, 3)
        if self.maybe(0.3):
            made["maxItems"] = self.random.randint(0, 4)
        return made

    def enum(self, _: int) -> dict[str, Any]:
        values = [1, 0, "a", "b", None, True, 1.5, [1], {"a": 1}, 'é\n"', "", -3]
        return {"enum": self.random.sample(values, self.random.randint(1, 4))}

    def combined(self, depth: int) -> dict[str, Any]:
        base = self.schema(depth + 1) if self.maybe(0.3) else {}
        keyword = self.random.choice(["anyOf", "allOf", "oneOf"])
        return {**base, keyword: [self.schema(depth + 1) for _ in range(self.random.randint(1, 3))]}
