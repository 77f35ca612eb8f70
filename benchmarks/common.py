"""What the benchmarks share: prompts, interleaved repetition, tables, and the places where results go."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from sidestream import SamplingParams, __version__
from sidestream.bench.machine import processor
from sidestream.bench.spread import Spread, ratios, short
from sidestream.bench.work import FIRST_ID, LAST_ID, prompts

__all__ = ["FIRST_ID", "LAST_ID", "Spread", "greedy", "interleaved", "parser", "prompts", "ratios", "report", "short", "table"]

T = TypeVar("T")

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"


def greedy(max_new_tokens: int) -> SamplingParams:
    """Exactly `max_new_tokens` tokens, whatever they are."""
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)


def interleaved(runs: Mapping[str, Callable[[int], T]], repetitions: int) -> dict[str, list[T]]:
    """Call every run with 0, then every run with 1, and so on; every second round backwards, so that a drift favours nobody."""
    results: dict[str, list[T]] = {name: [] for name in runs}
    for repetition in range(repetitions):
        for name in list(runs)[:: -1 if repetition % 2 else 1]:
            results[name].append(runs[name](repetition))
    return results


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options all benchmarks have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="smaller workloads")
    made.add_argument("--repetitions", type=int, default=3, metavar="N", help="of each variant, interleaved (default: 3)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    made.add_argument("--update-docs", action="store_true", help="write the tables into docs/performance.md")
    return made


def report(options: argparse.Namespace, name: str, text: str, data: Mapping[str, Any]) -> None:
    """Print the tables, and put them and the numbers where the options say."""
    text = f"{conditions(options)}\n\n{text}"
    print(text, flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"benchmark": name, "conditions": conditions(options), **data}, indent=1) + "\n")
    if options.update_docs:
        update_page(name, text)


def conditions(options: argparse.Namespace) -> str:
    """What a number depends on besides the code."""
    size = "quick run" if options.quick else "full run"
    cores = f"{os.cpu_count()} cores of {processor()}"
    repeated = "measured once" if options.repetitions == 1 else f"{options.repetitions} repetitions: median (least..most)"
    return f"sidestream {__version__}, torch {torch.__version__}, {cores}, {size}, {repeated}."


def update_page(name: str, text: str) -> None:
    """Replace what stands between the markers of `name` in docs/performance.md."""
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, found, rest = PAGE.read_text().partition(start)
    _, closed, after = rest.partition(end)
    assert found and closed, f"{PAGE.name} has no place for {name}"
    PAGE.write_text(f"{before}{start}\n{text}\n\n{end}{after}")
