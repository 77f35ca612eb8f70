"""What must not be imported early. Times are measured by hand: a loaded machine would make a timed test lie."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import sidestream

HEAVY = ("torch", "numpy", "tokenizers", "transformers", "jinja2", "gguf", "safetensors", "huggingface_hub", "msgspec", "rich", "yaml",
         "zmq", "starlette", "uvicorn", "prompt_toolkit")  # fmt: skip
STARTS = {
    "import": "import sidestream",
    "help": "import sidestream.cli; sidestream.cli.main(['--help'])",
    "run --help": "import sidestream.cli; sidestream.cli.main(['run', '--help'])",
    "bench --help": "import sidestream.cli; sidestream.cli.main(['bench', '--help'])",
    "bench serve --help": "import sidestream.cli; sidestream.cli.main(['bench', 'serve', '--help'])",
    "pull --help": "import sidestream.cli; sidestream.cli.main(['pull', '--help'])",
    "serve --help": "import sidestream.cli; sidestream.cli.main(['serve', '--help'])",
    "doctor --help": "import sidestream.cli; sidestream.cli.main(['doctor', '--help'])",
    "chat --help": "import sidestream.cli; sidestream.cli.main(['chat', '--help'])",
    "params": "from sidestream import SamplingParams, Output; SamplingParams(stop='x', seed=1)",
    "errors": "from sidestream import InvalidRequest, EngineDead",
    "refusal": "import sidestream.cli; sidestream.cli.main(['run', 'Hi', '--n', '0'])",
}


@pytest.mark.parametrize("start", STARTS)
def test_nothing_heavy_is_imported(start):
    code = f"{STARTS[start]}\nimport sys; print(*[name for name in {HEAVY!r} if name in sys.modules], 'end')"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert finished.stdout.splitlines()[-1] == "end"


def test_public_names():
    assert {"Engine", "Output", "SamplingParams", "__version__"} < set(sidestream.__all__)
    assert sidestream.QueueFull is sidestream.errors.QueueFull
    assert set(sidestream.__all__) <= set(dir(sidestream))
    assert sidestream.SamplingParams(n=2).n == 2
    with pytest.raises(AttributeError, match="module 'sidestream' has no attribute 'engin'"):
        _ = sidestream.engin


def test_the_version_is_that_of_the_package():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert sidestream.__version__ == project["version"]
