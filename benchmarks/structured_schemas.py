#!/usr/bin/env python3
"""Answers that obey schemas met in the wild: every finished one is JSON that PyPI's jsonschema finds valid, formats too.

usage: python benchmarks/structured_schemas.py [--choices 20] [--max-new-tokens 256] [--only NAME] [--update-docs]

The 50 schemas are those of tests/data/schemas.json. Each is asked for with a seed, at temperature 1, on the default model; an answer that
is not finished must have ended because of its length.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from sidestream import Engine, Output, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
SCHEMAS: dict[str, Any] = json.loads((ROOT / "tests" / "data" / "schemas.json").read_text())
DECIMAL = json.JSONDecoder(parse_float=Decimal)  # 0.29 is a multiple of 0.01, but in binary it is not
PAGE = ROOT / "docs" / "structured.md"
PROMPT = "An example of {name} in JSON:\n"


class Result(NamedTuple):
    name: str
    finished: int
    unfinished: int
    wrong: list[str]  # what is wrong with which answer
    tokens: int


def asked(name: str, schema: Mapping[str, Any], *, choices: int, max_new_tokens: int) -> tuple[str, SamplingParams]:
    """The prompt, and how to sample."""
    seed = sum(name.encode())
    sampling = SamplingParams(temperature=1.0, n=choices, seed=seed, max_new_tokens=max_new_tokens, json_schema=schema)
    return PROMPT.format(name=name.replace("_", " ")), sampling


def answers(engine: Engine, schemas: Mapping[str, Any], *, choices: int, max_new_tokens: int) -> Iterator[Result]:
    requests = [asked(name, schema, choices=choices, max_new_tokens=max_new_tokens) for name, schema in schemas.items()]
    outputs: Any = engine.generate([prompt for prompt, _ in requests], [sampling for _, sampling in requests])
    for place, (name, schema) in enumerate(schemas.items()):
        yield judged(name, schema, outputs[place * choices : (place + 1) * choices])


def judged(name: str, schema: Mapping[str, Any], outputs: list[Output]) -> Result:
    validator = validator_for(schema, default=Draft202012Validator)
    valid = validator(DECIMAL.decode(json.dumps(schema)), format_checker=validator.FORMAT_CHECKER)
    wrong = []
    for output in outputs:
        if output.finish_reason == "stop":
            wrong += _errors(valid, output.text)
        elif output.finish_reason != "length":
            wrong.append(f"ended with {output.finish_reason}: {output.text!r}")
    finished = sum(output.finish_reason == "stop" for output in outputs)
    return Result(name, finished, len(outputs) - finished, wrong, sum(output.completion_tokens for output in outputs))


def _errors(validator: Any, text: str) -> list[str]:
    try:
        value = DECIMAL.decode(text)
    except ValueError as error:
        return [f"no JSON ({error}): {text!r}"]
    return [f"{error.message}: {text!r}" for error in validator.iter_errors(value)]


def score(results: list[Result]) -> str:
    finished, unfinished = sum(each.finished for each in results), sum(each.unfinished for each in results)
    wrong = sum(len(each.wrong) for each in results)
    return (
        f"{len(results)} schemas, {finished + unfinished} answers of {sum(each.tokens for each in results)} tokens: {finished} finished, "
        f"{wrong} of them wrong; {unfinished} ended with their length"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choices", type=int, default=20, metavar="N", help="answers for each schema (default: 20)")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="of each answer (default: 256)")
    parser.add_argument("--only", choices=list(SCHEMAS), help="one of the schemas")
    parser.add_argument("--update-docs", action="store_true", help="write the score into docs/structured.md")
    options = parser.parse_args()
    schemas = {options.only: SCHEMAS[options.only]} if options.only else SCHEMAS
    results, started = [], time.monotonic()
    with Engine("smollm2", max_running_requests=64) as engine:
        for result in answers(engine, schemas, choices=options.choices, max_new_tokens=options.max_new_tokens):
            results.append(result)
            print(f"{result.name:20} {result.finished:3} finished, {result.unfinished:3} not", *result.wrong, sep="\n    ")
    line = score(results)
    print(f"{line} ({time.monotonic() - started:.0f} s)")
    if options.update_docs:
        begin, end = "<!-- schemas -->\n", "<!-- /schemas -->"
        before, _, rest = PAGE.read_text().partition(begin)
        PAGE.write_text(f"{before}{begin}* {line}\n{end}{rest.partition(end)[2]}")
    return 1 if any(result.wrong for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
