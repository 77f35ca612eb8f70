"""The kernels and the decoder under the address and undefined-behaviour sanitizers, in a program without Python."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import sidestream.kernels.cpu

SOURCE = Path(sidestream.kernels.cpu.__file__).parent


def run(command: list[str], **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.timeout(900)  # a minute of compilation on an idle machine
def test_the_sanitizers_find_nothing(tmp_path: Path) -> None:
    if not (SOURCE / "CMakeLists.txt").exists():
        pytest.skip("installed without the sources")
    cmake = shutil.which("cmake")
    if cmake is None or shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("needs cmake and a C++ compiler")
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    compiled = subprocess.run([os.environ.get("CXX", "c++"), "-fsanitize=address,undefined", str(probe), "-o", str(tmp_path / "probe")])
    if compiled.returncode:
        pytest.skip("this compiler has no sanitizers")
    build = str(tmp_path / "build")
    run([cmake, "-S", str(SOURCE), "-B", build, "-DSIDESTREAM_KERNEL_TESTS=ON"])
    run([cmake, "--build", build, "--parallel"])
    # Looking for leaks needs ptrace, which containers may forbid.
    printed = run([f"{build}/kernels_test"], ASAN_OPTIONS="detect_leaks=0", OMP_NUM_THREADS="2")
    assert printed.endswith("portable done\n0 failures\n")
