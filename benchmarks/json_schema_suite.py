#!/usr/bin/env python3
"""The required files of the JSON Schema Test Suite, draft 2020-12, against the grammars that schemas become.

For each schema every valid instance is accepted token by token and every invalid one refused, or the schema is refused by name.

usage: python benchmarks/json_schema_suite.py [--all] [--update-docs]

An instance may be written in several ways: names in any order, 1.0 as 1. A valid one is accepted if one of them is, an invalid one refused
if all are. `format` is taken as an assertion, where draft 2020-12 has it as an annotation unless it is asked for: the files of
`optional/format` are therefore run instead of the sentences of `format.json` that an invalid text is valid.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sidestream import SamplingParams
from sidestream.errors import InvalidRequest
from sidestream.models.gguf import open_gguf
from sidestream.models.hub import cache_directory, pull
from sidestream.models.loader import TokenizerSource
from sidestream.text.grammar import Compiled, Grammars
from sidestream.text.grammar_source import grammar_of
from sidestream.text.tokenizer import Tokenizer

# The source distribution of the validator has the suite in it.
PACKAGE, VERSION = "jsonschema", "4.26.0"
SHA256 = "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"
FOLDER = f"{PACKAGE}-{VERSION}/json/tests/draft2020-12"
ANNOTATION = "is only an annotation by default"
MAX_ORDERS = 24  # of the names of an object

PAGE = Path(__file__).resolve().parent.parent / "docs" / "structured.md"


class Case(NamedTuple):
    file: str
    description: str
    schema: Any
    tests: list[dict[str, Any]]


class Result(NamedTuple):
    case: Case
    refusal: str | None  # why the schema is refused
    wrong: list[str]  # what is wrong with how instances are taken


def archive() -> Path:
    """Fetched once per machine, through pip."""
    kept = cache_directory() / f"{PACKAGE}-{VERSION}.tar.gz"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as directory:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            subprocess.run([*command, "--no-binary", PACKAGE, "--dest", directory, f"{PACKAGE}=={VERSION}"], check=True)
            os.replace(Path(directory) / kept.name, kept)
    digest = hashlib.sha256(kept.read_bytes()).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{kept} has the checksum {digest}, must have {SHA256}")
    return kept


def cases(folder: str = "") -> Iterator[Case]:
    """Of the files directly in a folder of the suite; the required ones by default."""
    parent = f"{FOLDER}/{folder}".rstrip("/")
    with tarfile.open(archive()) as tar:
        for member in sorted(tar.getmembers(), key=lambda each: each.name):
            if member.name.endswith(".json") and str(Path(member.name).parent) == parent:
                file = tar.extractfile(member)
                assert file is not None
                for group in json.load(file):
                    yield Case(Path(member.name).stem, group["description"], group["schema"], group["tests"])


class Schemas:
    """Compiles schemas for the default model's tokenizer, and follows texts through them."""

    def __init__(self) -> None:
        metadata = {key: value for key, value in open_gguf(pull("smollm2")).metadata.items() if key.startswith("tokenizer.")}
        source = TokenizerSource(None, metadata, {})
        self.tokenizer = Tokenizer.from_source(source, eos_token_ids=(2,), bos_token_id=1, add_bos=False)
        self.grammars = Grammars(self.tokenizer, self.tokenizer.vocab_size)

    def compiled(self, schema: Any) -> Compiled:
        """Raises InvalidRequest."""
        grammar = grammar_of(SamplingParams(json_schema=json.dumps(schema)), None, self.tokenizer.special_tokens)
        assert grammar is not None
        return self.grammars.compile(grammar).result()

    def accepts(self, compiled: Compiled, text: str) -> bool:
        """Token by token, and then the end."""
        constraint = compiled.constraint()
        mask = np.zeros(-(-self.tokenizer.vocab_size // 32), np.uint32)
        complete = False
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            constraint.fill_mask(mask)
            if complete or not _admits(mask, token):
                return False
            complete = constraint.advance(token)
        if complete:
            return True
        constraint.fill_mask(mask)
        return any(_admits(mask, token) for token in self.tokenizer.eos_token_ids)

    def result(self, case: Case) -> Result:
        try:
            compiled = self.compiled(case.schema)
        except InvalidRequest as error:
            return Result(case, error.message, [])
        wrong = []
        for test in case.tests:
            valid = test["valid"] and ANNOTATION not in test["description"]
            accepted = any(self.accepts(compiled, text) for text in writings(test["data"]))
            if accepted != valid:
                wrong.append(f"{'refuses' if valid else 'accepts'} {json.dumps(test['data'])[:80]}: {test['description']}")
        return Result(case, None, wrong)


def _admits(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token // 32] >> np.uint32(token % 32) & np.uint32(1))


def writings(value: Any) -> Iterator[str]:
    """Ways to write an instance: as it is given, then names in other orders and whole numbers without a fraction."""
    yield json.dumps(value, ensure_ascii=False)
    for each in itertools.islice(_orders(_whole(value)), MAX_ORDERS):
        yield json.dumps(each, ensure_ascii=False)


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for names in itertools.permutations(value):
            for values in itertools.product(*(list(itertools.islice(_orders(value[name]), MAX_ORDERS)) for name in names)):
                yield dict(zip(names, values, strict=True))
    elif isinstance(value, list):
        for values in itertools.product(*(list(itertools.islice(_orders(each), MAX_ORDERS)) for each in value)):
            yield list(values)
    else:
        yield value


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return {name: _whole(each) for name, each in value.items()} if isinstance(value, dict) else value


def score(results: list[Result]) -> str:
    enforced = [result for result in results if result.refusal is None]
    refused = [result for result in results if result.refusal is not None]
    wrong = [line for result in enforced for line in result.wrong]
    instances = sum(len(result.case.tests) for result in enforced)
    return (
        f"{len({result.case.file for result in results})} files, {len(results)} schemas: {len(enforced)} enforced, "
        f"{len(refused)} refused by name; of the {instances} instances of those enforced {len(lenient(wrong))} invalid ones are accepted, "
        f"{len(wrong) - len(lenient(wrong))} valid ones refused"
    )


def lenient(wrong: Sequence[str]) -> list[str]:
    """Where an invalid instance is accepted."""
    return [line for line in wrong if line.startswith("accepts")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="list every schema that is refused, and why")
    parser.add_argument("--update-docs", action="store_true", help="write the score into docs/structured.md")
    options = parser.parse_args()
    schemas = Schemas()
    required, formats = [[schemas.result(case) for case in cases(folder)] for folder in ("", "optional/format")]
    lines = [f"required: {score(required)}", f"optional/format: {score(formats)}"]
    for result in [*required, *formats]:
        name = f"{result.case.file}: {result.case.description}"
        if result.refusal is not None and options.all:
            print(f"refused  {name}: {result.refusal}")
        for wrong in result.wrong:
            print(f"wrong    {name}: {wrong}")
    print(*lines, sep="\n")
    if options.update_docs:
        begin, end = "<!-- score -->\n", "<!-- /score -->"
        before, _, rest = PAGE.read_text().partition(begin)
        PAGE.write_text(before + begin + "".join(f"* {line}\n" for line in lines) + end + rest.partition(end)[2])


if __name__ == "__main__":
    main()
