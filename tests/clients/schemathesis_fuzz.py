"""schemathesis: bodies made from /openapi.json, good and bad, and whether the answers keep to it.

The server should have a short context: a body may ask for as many tokens as it holds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import KEY, URL, run

ST = str(Path(sys.executable).parent / "st")
# What would end the run, or reach beyond the server.
LEFT_OUT = ("/update_weights_from_disk",)
# A good body may be refused: its model is not there, two of its fields exclude each other, it is longer than the context.
UNCHECKED = "positive_data_acceptance"
SECONDS = int(os.environ.get("SIDESTREAM_TEST_FUZZ_SECONDS", "25"))  # at most, for all
EXAMPLES = 5 if SECONDS <= 60 else 30  # of each route


def check_every_route() -> None:
    left_out = [word for path in LEFT_OUT for word in ("--exclude-path", path)]
    words = [ST, "run", f"{URL}/openapi.json", "--header", f"Authorization: Bearer {KEY}", *left_out]
    words += ["--phases", "examples,coverage,fuzzing", "--max-examples", str(EXAMPLES), "--generation-deterministic"]
    words += ["--exclude-checks", UNCHECKED, "--max-time", str(SECONDS), "--request-timeout", "60", "--continue-on-failure", "--no-color"]
    with tempfile.TemporaryDirectory() as nowhere:  # it keeps what it learns where it stands
        finished = subprocess.run(words, text=True, timeout=SECONDS + 90, cwd=nowhere)
    assert finished.returncode == 0, f"st ended with {finished.returncode}"


if __name__ == "__main__":
    run(globals())
