"""What the drivers share: each starts one engine in an environment of its own, runs cases and prints one JSON line for each.

`python peer_x.py --case single --json` runs one case once. With `--stdin` the engine stays up and runs a case for each line `CASE SEED`,
so that engines can take turns. The workloads and their timing are those of `sidestream bench offline`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_WORK = ROOT / "build" / "peers"
sys.path.insert(0, str(ROOT))

from sidestream.bench.work import CASES, timed  # noqa: E402  (standard library only: it works in every environment)


class Peer(Protocol):
    version: str

    def generate(self, prompts: list[list[int]], new: int) -> Sequence[Sequence[int]]: ...
    def close(self) -> None: ...


def python_of(work: Path, name: str) -> Path:
    """The interpreter of a peer's environment; ours runs where these scripts do."""
    return Path(sys.executable) if name == "sidestream" else work / name / "bin" / "python"


def main(
    name: str,
    formats: Sequence[str],
    start: Callable[[Path, str, int], Peer],
    environment: Callable[[Path, int], Mapping[str, str]] = lambda work, threads: {},
) -> None:
    """Run a driver. start(work, format, threads) -> the engine; environment: variables it needs from the start of its process."""
    parser = argparse.ArgumentParser(description=f"Driver of {name}.")
    parser.add_argument("--case", choices=list(CASES), default="single")
    parser.add_argument("--format", choices=formats, default=formats[0], help=f"of the weights (default: {formats[0]})")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, metavar="DIR", help="where install.py put everything")
    parser.add_argument("--json", action="store_true", help="print JSON instead of words")
    parser.add_argument("--stdin", action="store_true", help="run a case for each line `CASE SEED` of standard input")
    options = parser.parse_args()
    work = options.work.resolve()
    _enter(work, name, environment(work, options.threads))

    # Engines print on standard output as they like; only the results go where it leads.
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    peer = start(work, options.format, options.threads)
    described = {"peer": name, "version": peer.version, "format": options.format}
    try:
        if options.stdin:
            _write(results, described)
            warm: set[str] = set()
            for line in sys.stdin:
                case, seed = line.split()
                _write(results, described | run(peer, case, seed, warm_up=case not in warm))
                warm.add(case)
        else:
            result = described | run(peer, options.case, "0", warm_up=True)
            if options.json:
                _write(results, result)
            else:
                for title, numbers in result["works"].items():
                    results.write(
                        f"{name} {options.format}, {title}: {numbers['tokens_per_second']:.4g} tok/s, {numbers['seconds']:.4g} s\n"
                    )
    finally:
        peer.close()


def run(peer: Peer, case: str, seed: str, *, warm_up: bool) -> dict[str, Any]:
    """All workloads of one case, once. Every prompt is new, so no cache has to be emptied."""

    def seconds(work: Any, of: str) -> float:
        return timed(work, of, peer.generate, lambda: None)

    if warm_up:
        for work in CASES[case].values():
            seconds(work.warm_up(), f"warm-up {seed}")
    measured = {title: (work, seconds(work, seed)) for title, work in CASES[case].items()}
    works = {title: {"seconds": spent, "tokens_per_second": work.tokens / spent} for title, (work, spent) in measured.items()}
    return {"case": case, "works": works}


def _write(results: TextIO, value: Mapping[str, Any]) -> None:
    results.write(json.dumps(value) + "\n")


def _enter(work: Path, name: str, environment: Mapping[str, str]) -> None:
    """Go on in the peer's environment, with its variables, if this process is not there."""
    python = python_of(work, name)
    if not python.exists():
        sys.exit(f"{name} is not installed in {work}. Run install.py --peers {name} --work {work}")
    mark = f"PEER_{name.upper()}"
    if os.environ.get(mark) != "1":
        os.execve(python, [str(python), *sys.argv], os.environ | environment | {mark: "1"})
