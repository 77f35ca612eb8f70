"""Requests that no server may answer with anything but a refusal, made from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

TEXT = "Once upon a time"
NESTED = 100_000  # levels


class Route(NamedTuple):
    path: str
    valid: dict[str, Any]
    wrong: dict[str, list[Any]]  # values that its fields cannot have


class Malformed(NamedTuple):
    kind: str
    path: str
    content_type: str
    body: bytes


def _routes() -> tuple[Route, ...]:
    texts: list[Any] = ["", 5, 1.5, True, {}, {"a": 1}, [[]], [["a"]], [None], [{}]]
    ids: list[Any] = [[], [-1], [10**9], [2**31], [2**63], [10**40], [1.5], [True], [None], "x", 7, {}, [[-1]]]
    counts: list[Any] = [-1, 1.5, "4", 10**30, -(10**30), [1], {}, True]
    numbers: list[Any] = [-1, -1e300, "0.5", [0.5], {}, True]
    shared: dict[str, list[Any]] = {
        "temperature": numbers,
        "top_p": [*numbers, 1.01, 10**30],
        "top_k": [1.5, "4", 10**30, [1], {}, True],
        "n": [0, *counts],
        "seed": [1.5, "4", [1], {}, True],
        "stop": [5, {}, [5], [None], [["a"]], ["a"] * 10_000],
        "stop_token_ids": [[-1], [10**9], [2**64], "x", 5, {}, ["a"], [1.5]],
        "repetition_penalty": [-1, 0, "1", [], {}],
        "ignore_eos": [1, "true", [], {}],
    }
    outputs: dict[str, list[Any]] = {
        "return_hidden_states": ["all", 1, [], {}],
        "hidden_states_layers": [[1000], [-1000], "last", 5, {}, [1.5], [10**30]],
        "hidden_states_dtype": ["int8", 5, [], {}],
        "top_logprobs_num": [-1, 101, 10**30, 1.5, "5", []],
        "token_ids_logprob": [[-1], [10**9], "x", [1.5], [None]],
    }
    most: list[Any] = [value for value in counts if value != 10**30]  # the context ends it: any number of tokens may be asked for
    native = {f"sampling_params.{name}": values for name, values in (shared | {"max_new_tokens": most}).items()}
    native |= {"text": texts, "input_ids": ids, "stream": [1, "yes", [], {}], "rid": [5, [], {}, ""], "sampling_params": [5, "x", [], [5]]}
    openai = {**shared, "max_tokens": most, "model": [5, [], {}, "no such model"], "stream": [1, "yes", [], {}]}
    prompt: list[Any] = ["", 5, {}, [], [-1], [10**9], [10**40], [1.5], [None], [[]], [["a"]]]
    message: list[Any] = [5, "x", {}, [], [5], [{}], [{"role": "user"}], [{"role": 5, "content": "a"}], [{"role": "user", "content": 5}]]
    return (
        Route("/generate", {"text": TEXT, "sampling_params": {"max_new_tokens": 4}}, native | outputs),
        Route("/v1/completions", {"prompt": TEXT, "max_tokens": 4}, {**openai, **outputs, "prompt": prompt}),
        Route(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4},
            {**openai, **outputs, "messages": message},
        ),
        Route(
            "/v1/messages",
            {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4},
            {"messages": message, "max_tokens": most, "system": [5, {}, [5]], "stop_sequences": [5, "x", [5]], "temperature": numbers},
        ),
        Route("/v1/responses", {"input": TEXT, "max_output_tokens": 4}, {"input": [5, {}, [5], [{}]], "max_output_tokens": most}),
        Route(
            "/v1/embeddings", {"input": TEXT, "dimensions": 4}, {"input": [*prompt, ["a", 5]], "dimensions": [0, *counts], "layer": [1000]}
        ),
        Route(
            "/v1/score",
            {"query": TEXT, "items": [TEXT], "label_token_ids": [3, 4]},
            {"query": [5, {}, [-1]], "items": [5, {}, [5.5], [{}]], "label_token_ids": [[], [-1], [10**9], ["a"], 5]},
        ),
    )


ROUTES = _routes()


def malformed(count: int, seed: int = 0, routes: tuple[Route, ...] = ROUTES) -> Iterator[Malformed]:
    """`count` requests, each kind on each route in turn."""
    chance = random.Random(seed)
    kinds = [*_KINDS.items()]
    for number in range(count):
        name, make = kinds[number % len(kinds)]
        route = routes[number // len(kinds) % len(routes)]
        made = make(chance, route)
        content_type, body = made if isinstance(made, tuple) else ("application/json", made)
        yield Malformed(name, route.path, content_type, body)


def _written(value: Any) -> bytes:
    return json.dumps(value).encode()


def _with(route: Route, name: str, value: Any) -> bytes:
    """The valid body with another value of one field."""
    body = json.loads(_written(route.valid))
    *outer, inner = name.split(".")
    place = body
    for each in outer:
        place = place[each]
    if inner == "input_ids":
        del body["text"]
    place[inner] = value
    return _written(body)


def _truncated(chance: random.Random, route: Route) -> bytes:
    return _written(route.valid)[: chance.randrange(len(_written(route.valid)))]


def _wrong_value(chance: random.Random, route: Route) -> bytes:
    name = chance.choice([*route.wrong])
    return _with(route, name, chance.choice(route.wrong[name]))


def _huge_number(chance: random.Random, route: Route) -> bytes:
    number = chance.choice([b"1e400", b"-1e999", b"1" + b"0" * 5000, b"-" + b"9" * 30])  # large ones are fine: the context ends it
    return _written(route.valid).replace(b" 4", b" " + number)


def _no_number(chance: random.Random, route: Route) -> bytes:
    word = chance.choice([b"NaN", b"Infinity", b"-Infinity", b"nan", b"0x10", b"01", b"+1", b".5", b"1.", b"1_000", b"--1"])
    return _written(route.valid).replace(b" 4", b" " + word)


def _nested(chance: random.Random, route: Route) -> bytes:
    opening, closing = chance.choice([(b"[", b"]"), (b'{"a":', b"}")])
    deep = opening * NESTED + (b"1" + closing * NESTED if chance.random() < 0.5 else b"")
    return deep if chance.random() < 0.5 else _written(route.valid)[:-1] + b', "stop": ' + deep + b"}"


def _surrogate(chance: random.Random, route: Route) -> bytes:
    half = chance.choice([b"\\ud800", b"\\udfff", b"\\ud800\\ud800", b"\\udc00\\ud800", b"\\ud83dx"])
    return _written(route.valid).replace(b"Once", half)


def _no_utf8(chance: random.Random, route: Route) -> bytes:
    bad = chance.choice([b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\x80"])
    return _written(route.valid).replace(b"Once", bad)


def _twice(chance: random.Random, route: Route) -> bytes:
    """One key with a good value and a bad one: whichever counts, the body is wrong."""
    first = next(iter(route.valid))
    pair = b'"%b": %b, ' % (first.encode(), _written(chance.choice([5, True, 1.5])))
    return _written(route.valid).replace(b"{", b"{" + pair, 1)


def _other_type(chance: random.Random, route: Route) -> tuple[str, bytes]:
    return chance.choice(
        [
            ("application/x-www-form-urlencoded", b"text=Once&max_tokens=4"),
            ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="text"\r\n\r\nOnce\r\n--x--\r\n'),
            ("text/plain", b"Once upon a time"),
            ("application/xml", b"<text>Once</text>"),
            ("application/yaml", b"text: Once\n"),
            ("application/octet-stream", chance.randbytes(64)),
            ("application/json; charset=utf-16", json.dumps(route.valid).encode("utf-16")),
        ]
    )


def _unknown(chance: random.Random, route: Route) -> bytes:
    name = chance.choice(["guided_json", "tempratur", "", "__proto__", "\x00", "a" * 5000, "é\u2028", "$ref", "`", "max_new_tokens "])
    return _with(route, name, chance.choice([1, None, "x", [], {}]))


def _no_object(chance: random.Random, route: Route) -> bytes:
    whole = chance.choice([b"", b" ", b"null", b"true", b"5", b'"x"', b"[]", b"{}", b"[{}]", b"\x00", b"\xef\xbb\xbf{}", b"// x\n{}"])
    return whole if chance.random() < 0.7 else b"[" + _written(route.valid) + b"]"


def _more_behind(chance: random.Random, route: Route) -> bytes:
    return _written(route.valid) + chance.choice([b"}", b" x", b"{}", b",", b"\x00", _written(route.valid)])


def _bad_text(chance: random.Random, route: Route) -> bytes:
    return _written(route.valid).replace(b"Once", chance.choice([b"\x01", b"\n", b"\\x", b"\\u12", b"\\", b"\\u00zz", b'"']))


def _lacking(chance: random.Random, route: Route) -> bytes:
    return _written({name: value for name, value in route.valid.items() if name not in ("text", "prompt", "messages", "input", "items")})


_KINDS: dict[str, Callable[[random.Random, Route], bytes | tuple[str, bytes]]] = {
    "truncated": _truncated,
    "wrong value": _wrong_value,
    "huge number": _huge_number,
    "no number": _no_number,
    "nested": _nested,
    "surrogate": _surrogate,
    "no utf-8": _no_utf8,
    "twice": _twice,
    "other type": _other_type,
    "unknown field": _unknown,
    "no object": _no_object,
    "more behind": _more_behind,
    "bad text": _bad_text,
    "lacking": _lacking,
}
