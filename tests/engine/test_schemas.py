"""Schemas met in the wild, sampled at temperature 1 on the default model: every finished answer parses and is valid."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sidestream import Engine, Output

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CHOICES, MAX_NEW_TOKENS = 2, 64


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import structured_schemas

        yield structured_schemas
        sys.modules.pop("structured_schemas")


def test_fifty_schemas(benchmark: Any, default_model: Path) -> None:
    with Engine(str(default_model), threads=1, log_level="warning") as engine:
        results = list(benchmark.answers(engine, benchmark.SCHEMAS, choices=CHOICES, max_new_tokens=MAX_NEW_TOKENS))
        engine.check()
    print(f"\n{benchmark.score(results)}")
    assert [(result.name, result.wrong) for result in results if result.wrong] == []
    assert len(results) == 50 and all(result.finished + result.unfinished == CHOICES for result in results)
    assert sum(result.finished for result in results) >= 50, "most have room to finish"


def answer(text: str, reason: str = "stop") -> Output:
    counts = {"prompt_tokens": 1, "completion_tokens": 1, "cached_tokens": 0}
    return Output(text=text, token_ids=[1], finish_reason=reason, matched_stop=None, rid="a", index=0, **counts)


def test_what_is_wrong_is_found(benchmark: Any) -> None:
    schema = {"type": "object", "properties": {"d": {"type": "string", "format": "date"}, "m": {"multipleOf": 0.01}}, "required": ["d"]}
    outputs = [
        answer('{"d": "2024-02-29", "m": 0.29}'),
        answer('{"d": "2023-02-29"}'),
        answer("{}"),
        answer("{"),
        answer("{", "length"),
        answer("{", "abort"),
    ]
    result = benchmark.judged("name", schema, outputs)
    assert (result.finished, result.unfinished, len(result.wrong)) == (4, 2, 4)
    assert all(word in wrong for word, wrong in zip(("not a 'date'", "required", "no JSON", "abort"), result.wrong, strict=True))
    assert benchmark.score([result]) == "1 schemas, 6 answers of 6 tokens: 4 finished, 4 of them wrong; 2 ended with their length"
