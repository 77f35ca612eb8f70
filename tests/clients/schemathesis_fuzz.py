"""schemathesis: bodies made from /openapi.json, good and bad, and whether the answers keep to it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from checks import KEY, URL, run

ST = str(Path(sys.executable).parent / "st")
# What would end the run, or reach beyond the server.
LEFT_OUT = ("/update_weights_from_disk",)
EXAMPLES = 15  # of each route
SEED = 4


def check_every_route() -> None:
    left_out = [word for path in LEFT_OUT for word in ("--exclude-path", path)]
    words = [ST, "run", f"{URL}/openapi.json", "--header", f"Authorization: Bearer {KEY}", *left_out]
    words += ["--phases", "examples,coverage,fuzzing", "--max-examples", str(EXAMPLES), "--seed", str(SEED), "--generation-deterministic"]
    words += ["--request-timeout", "30", "--continue-on-failure", "--no-color"]
    with tempfile.TemporaryDirectory() as nowhere:  # it keeps what it learns where it stands
        finished = subprocess.run(words, text=True, timeout=280, cwd=nowhere)
    assert finished.returncode == 0, f"st ended with {finished.returncode}"


if __name__ == "__main__":
    run(globals())
