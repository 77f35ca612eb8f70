"""Ours against the best peer of each row of the targets: interleaved, ours and the peer in turn, and the ratios as a Markdown table.

python run.py [--peers NAME,NAME] [--cases CASE,CASE] [--rounds N] [--work DIR] [--json FILE]; run install.py first, and nothing beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from install import INSTALLERS, peers
from protocol import DEFAULT_WORK, python_of

from sidestream.bench.machine import processor
from sidestream.bench.spread import Spread, ratios, short
from sidestream.bench.work import CASES

HERE = Path(__file__).resolve().parent
LEAST_ROUNDS = 3
CLOSE_SECONDS = 60


class Row(NamedTuple):
    case: str
    ours: str  # format
    peer: str
    theirs: str  # format
    target: float  # throughput of ours over theirs, at least


ROWS = (
    Row("single", "bf16", "llamacpp", "bf16", 1.15),
    Row("single", "q8_0", "llamacpp", "q8_0", 1.4),
    Row("single", "q4_1", "llamacpp", "q4_1", 2.3),
    Row("single", "q4_1", "llamacpp", "q4_0", 1.4),
    Row("single", "w4a8", "llamacpp", "q4_0", 1.7),
    Row("prefill", "q4_1", "openvino", "int8", 1.1),
    Row("prefill", "bf16", "openvino", "int8", 1.1),
    Row("prefill", "w4a8", "openvino", "int8", 1.6),
    Row("batch", "q4_1", "openvino", "fp16", 1.25),
    Row("batch", "bf16", "openvino", "fp16", 1.25),
    Row("batch", "w4a8", "openvino", "fp16", 2.0),
    Row("shared", "q4_1", "vllm", "bf16", 1 / 0.65),
)


def stop(process: subprocess.Popen[str]) -> None:
    """Stop the process and its children until their turn comes: some wait for work by spinning, which would slow whoever has the turn."""
    _signal(process, signal.SIGSTOP)


def resume(process: subprocess.Popen[str]) -> None:
    _signal(process, signal.SIGCONT)


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended: whoever reads from it will see
        os.killpg(process.pid, number)


@contextmanager
def turn(process: subprocess.Popen[str]) -> Iterator[None]:
    """The turn of a stopped process, which must lead a group of its own (`start_new_session`)."""
    resume(process)
    try:
        yield
    finally:
        stop(process)


class Driver:
    """A driver's process. Its engine stays up, and runs a case when it is told."""

    def __init__(self, name: str, format: str, work: Path, threads: int) -> None:
        (work / "logs").mkdir(parents=True, exist_ok=True)
        self.log = work / "logs" / f"{name}-{format}.log"
        command = [str(python_of(work, name)), str(HERE / f"peer_{name}.py"), "--format", format]
        command += ["--work", str(work), "--threads", str(threads), "--stdin"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        try:
            self.version = self._answer()["version"]
        except BaseException:
            self.close()
            raise
        stop(self.process)

    def run(self, case: str, seed: int) -> dict[str, dict[str, float]]:
        """The numbers of each workload of the case, by its title."""
        assert self.process.stdin is not None
        with turn(self.process):
            self.process.stdin.write(f"{case} {seed}\n")
            self.process.stdin.flush()
            works: dict[str, dict[str, float]] = self._answer()["works"]
        return works

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the driver ended with status {self.process.wait()}; {self.log} says why")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """The engine ends with its driver's standard input."""
        assert self.process.stdin is not None and self.process.stdout is not None
        resume(self.process)
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def compare(row: Row, rounds: int, work: Path, threads: int) -> dict[str, Any]:
    """Rates of both in turn, by workload; every second round the peer is first, so that a drift favours nobody."""
    rates: dict[str, dict[str, list[float]]] = {}
    with Driver("sidestream", row.ours, work, threads) as ours, Driver(row.peer, row.theirs, work, threads) as theirs:
        for seed in range(rounds):
            for driver, side in [(ours, "ours"), (theirs, "theirs")][:: -1 if seed % 2 else 1]:
                for title, numbers in driver.run(row.case, seed).items():
                    rates.setdefault(title, {"ours": [], "theirs": []})[side].append(numbers["tokens_per_second"])
        return {**row._asdict(), "versions": {"ours": ours.version, "theirs": theirs.version}, "tokens_per_second": rates}


def table(results: list[dict[str, Any]]) -> str:
    head = ["work", "ours", "tok/s", "peer", "tok/s", "ours / peer", "target"]
    lines = [head, ["---"] * len(head)]
    for result in results:
        peer = f"{result['peer']} {result['theirs']}"
        if "error" in result:
            lines.append([result["case"], result["ours"], "", peer, "", f"failed: {result['error']}", ""])
            continue
        for title, rates in result["tokens_per_second"].items():
            ours, theirs = rates["ours"], rates["theirs"]
            peer = f"{result['peer']} {result['versions']['theirs']}, {result['theirs']}"
            cells = [str(Spread.of(ours)), peer, str(Spread.of(theirs)), str(ratios(ours, theirs)), f"≥ {short(result['target'])}"]
            lines.append([title, result["ours"], *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cases(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := [case for case in chosen if case not in CASES]:
        raise argparse.ArgumentTypeError(f"got {unknown[0]!r}, must be some of {','.join(CASES)}")
    return chosen


def at_least_three(text: str) -> int:
    if not text.isdecimal() or int(text) < LEAST_ROUNDS:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, must be an integer of at least {LEAST_ROUNDS}: fewer have no median worth the name"
        )
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=peers, default=list(INSTALLERS), metavar="NAME,NAME")
    parser.add_argument("--cases", type=cases, default=list(CASES), metavar="CASE,CASE")
    parser.add_argument("--rounds", type=at_least_three, default=LEAST_ROUNDS, metavar="N", help="default: 3, and at least that")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    options = parser.parse_args()
    results = []
    for row in ROWS:
        if row.peer not in options.peers or row.case not in options.cases:
            continue
        print(f"{row.case}: ours {row.ours}, {row.peer} {row.theirs}", file=sys.stderr, flush=True)
        try:
            results.append(compare(row, options.rounds, options.work.resolve(), options.threads))
        except (OSError, RuntimeError) as error:
            results.append(row._asdict() | {"error": " ".join(str(error).split())})
    machine = f"{os.cpu_count()} cores of {processor()}, {options.threads} threads, {options.rounds} rounds: median (least..most)."
    print(f"{machine}\n\n{table(results)}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine, "rows": results}, indent=1) + "\n")
    if any("error" in result for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
