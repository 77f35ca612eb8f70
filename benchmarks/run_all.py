"""Run every benchmark in a process of its own, one after the other. What is not said here is passed on to each: `--quick`, ..."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from common import PAGE

HERE = Path(__file__).resolve().parent
PICTURE = PAGE.parent / "images" / "copies.png"
BENCHMARKS: dict[str, list[str]] = {
    "host.py": [],
    "overlap.py": [],
    "structured.py": [],
    "offline.py": ["--outputs", "--transformers"],
    "extraction.py": [],
    "copies.py": [],
}


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--json", type=Path, metavar="DIRECTORY", help="write all numbers there, one file for each benchmark")
    options, others = made.parse_known_args()
    benchmarks = {**BENCHMARKS, "copies.py": ["--picture", str(PICTURE)]} if "--update-docs" in others else BENCHMARKS
    failed = []
    for script, own in benchmarks.items():
        started = time.perf_counter()
        print(f"\n## {script}\n", flush=True)
        if options.json is not None:
            options.json.mkdir(parents=True, exist_ok=True)
            own = [*own, "--json", str((options.json / script).with_suffix(".json"))]
        if subprocess.run([sys.executable, str(HERE / script), *own, *others]).returncode:
            failed.append(script)
        print(f"\n({time.perf_counter() - started:.0f} s)", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
