"""The required files of the JSON Schema Test Suite: every schema is enforced exactly, or refused by name."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# What a refusal names: a keyword, or false, which is a schema that admits nothing.
NAMED = r"""(?x)
    unevaluated(Items|Properties) | oneOf | "not" | contains | propertyNames | uniqueItems | "if" | dependent(Required|Schemas) | format
    | \$ref | \$schema | \$dynamic(Ref|Anchor) | patternProperties | multipleOf | minProperties | const | enum | false
"""
# Texts of a format that the grammar leaves out. Nothing else in the suite is refused that is valid.
STRICTER = {
    "email": 4,  # quoted names and addresses in brackets
    "time": 4,  # leap seconds in other time zones than UTC
    "date-time": 1,
}


@pytest.fixture(scope="module")
def suite() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import json_schema_suite

        yield json_schema_suite
        sys.modules.pop("json_schema_suite")


@pytest.fixture(scope="module")
def schemas(suite: Any, default_model: Path) -> Any:
    return suite.Schemas()


def test_the_required_files(suite: Any, schemas: Any) -> None:
    results = [schemas.result(case) for case in suite.cases()]
    print(f"\nrequired: {suite.score(results)}")
    assert [(result.case.file, result.case.description, result.wrong) for result in results if result.wrong] == []
    refused = [result for result in results if result.refusal is not None]
    for result in refused:
        assert re.search(NAMED, result.refusal), (result.case, result.refusal)
    assert len(results) == 368
    assert len(results) - len(refused) >= 184, "fewer are enforced than were"


def test_the_files_of_formats(suite: Any, schemas: Any) -> None:
    results = [schemas.result(case) for case in suite.cases("optional/format")]
    print(f"\noptional/format: {suite.score(results)}")
    assert suite.lenient([line for result in results for line in result.wrong]) == []
    assert {result.case.file: len(result.wrong) for result in results if result.wrong} == STRICTER
    refused = {result.case.file for result in results if result.refusal is not None}
    assert refused == {
        *("ecmascript-regex", "idn-email", "idn-hostname", "iri", "iri-reference", "regex", "uri-reference", "uri-template"),
    }


def test_ways_to_write_an_instance(suite: Any) -> None:
    assert list(suite.writings({"a": 1.0, "b": [2.5]})) == ['{"a": 1.0, "b": [2.5]}', '{"a": 1, "b": [2.5]}', '{"b": [2.5], "a": 1}']
