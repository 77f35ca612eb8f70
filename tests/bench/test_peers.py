"""The comparison with other engines, with drivers of an engine that answers at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
NAMES = ("install", "protocol", "run")


@pytest.fixture
def modules(monkeypatch):
    """The scripts as modules, which find each other by their bare names."""
    monkeypatch.syspath_prepend(str(PEERS))
    monkeypatch.setattr(sys, "path", [*sys.path])  # protocol adds the root
    import install
    import protocol
    import run

    yield install, protocol, run
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture
def drivers(tmp_path):
    """Scripts whose engine answers at once, or fails."""
    for name, answer in {"sidestream": "[[5] * new] * len(prompts)", "llamacpp": "[[7] * new] * len(prompts)", "vllm": "[]"}.items():
        code = f"""
        import sys
        sys.path.insert(0, {str(PEERS)!r})
        from protocol import main

        class Fake:
            version = "1.2"
            def __init__(self, work, format, threads):
                print("noise on standard output")
            def generate(self, prompts, new):
                return {answer}
            def close(self):
                print("closed", file=sys.stderr)

        main({name!r}, ["q4_1", "q4_0"], Fake, lambda work, threads: {{"THREADS": str(threads)}})
        """
        (tmp_path / f"peer_{name}.py").write_text(textwrap.dedent(code))
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (tmp_path / name / "bin" / "python").chmod(0o755)
    return tmp_path


def drive(folder, *words, name="llamacpp", text=None):
    command = [sys.executable, str(folder / f"peer_{name}.py"), "--work", str(folder), *words]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PEER_")}
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60, env=environment)


def test_a_driver_prints_one_json_line(drivers):
    done = drive(drivers, "--case", "shared", "--json")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    works = value.pop("works")
    assert value == {"peer": "llamacpp", "version": "1.2", "format": "q4_1", "case": "shared"}
    assert list(works) == ["shared prefix, cold", "shared prefix, warm"]
    for numbers in works.values():
        assert numbers["tokens_per_second"] == pytest.approx(1024 / numbers["seconds"])
    assert "noise on standard output" in done.stderr
    assert "closed\n" in done.stderr


LLAMA_SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Server(ThreadingHTTPServer):
    request_queue_size = 64

class Handler(BaseHTTPRequestHandler):
    def answer(self, value):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())
    def do_GET(self):
        self.answer({{"status": "ok"}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["ignore_eos"] and asked["temperature"] == 0
        self.answer({{"tokens": [9] * asked["n_predict"]}})
    def log_message(self, *words):
        pass

Server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.mark.parametrize("works", [True, False])
def test_the_driver_of_llamacpp(drivers, works):
    server = drivers / "llamacpp" / "build" / "bin" / "llama-server"
    server.parent.mkdir(parents=True)
    server.write_text(LLAMA_SERVER.format(python=sys.executable) if works else "#!/bin/sh\nexit 3\n")
    server.chmod(0o755)
    done = drive(PEERS, "--work", str(drivers), "--case", "batch", "--json")
    if works:
        assert list(json.loads(done.stdout)["works"]) == ["32 at once"], done.stderr
    else:
        assert "RuntimeError: llama-server did not start within 120 s; its exit status is 3" in done.stderr


def test_a_driver_runs_what_it_is_told(drivers):
    done = drive(drivers, "--stdin", "--format", "q4_0", text="prefill 0\nprefill 1\nsingle 0\n")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0] == {"peer": "llamacpp", "version": "1.2", "format": "q4_0"}
    assert [line["case"] for line in lines[1:]] == ["prefill", "prefill", "single"]


def test_a_driver_in_words(drivers):
    assert drive(drivers, "--case", "prefill").stdout.startswith("llamacpp q4_1, prefill: ")


def test_a_peer_that_is_not_installed(drivers):
    (drivers / "llamacpp" / "bin" / "python").unlink()
    done = drive(drivers, "--json")
    assert done.returncode == 1
    assert done.stderr == f"llamacpp is not installed in {drivers}. Run install.py --peers llamacpp --work {drivers}\n"


def test_a_comparison_takes_turns(modules, drivers, monkeypatch):
    run = modules[2]
    monkeypatch.setattr(run, "HERE", drivers)
    result = run.compare(run.Row("single", "q4_1", "llamacpp", "q4_0", 1.4), 3, drivers, 1)
    assert result["versions"] == {"ours": "1.2", "theirs": "1.2"}
    rates = result["tokens_per_second"]["single stream"]
    assert [len(rates[side]) for side in ("ours", "theirs")] == [3, 3]
    with pytest.raises(RuntimeError, match=r"the driver ended with status 1; .*vllm-q4_1.log says why"):
        run.compare(run.Row("single", "q4_1", "vllm", "q4_1", 1.0), 3, drivers, 1)


def test_the_table_holds_ratios_of_neighbours(modules):
    run = modules[2]
    row = run.Row("single", "q4_1", "llamacpp", "q4_0", 1.4)
    rates = {"single stream": {"ours": [20.0, 30.0, 90.0], "theirs": [10.0, 20.0, 30.0]}}
    measured = row._asdict() | {"versions": {"ours": "1", "theirs": "2"}, "tokens_per_second": rates}
    lines = run.table([measured, row._asdict() | {"error": "no"}]).splitlines()
    assert lines[2] == "| single stream | q4_1 | 30 (20..90) | llamacpp 2, q4_0 | 20 (10..30) | 2 (1.5..3) | ≥ 1.4 |"
    assert lines[3] == "| single | q4_1 |  | llamacpp q4_0 |  | failed: no |  |"


def test_every_row_has_an_installer_and_a_format(modules):
    install, _, run = modules
    formats = {"llamacpp": install.FORMATS, "openvino": install.OPENVINO_FORMATS, "vllm": ("bf16",)}
    for row in run.ROWS:
        assert row.peer in install.INSTALLERS
        assert row.ours in (*install.FORMATS, "w4a8", "w8a8")
        assert row.theirs in formats[row.peer]
        assert row.case in run.CASES


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds", "2"], "argument --rounds: got '2', must be an integer of at least 3"),
        (["--peers", "llamacpp,x"], "argument --peers: got 'x', must be some of llamacpp,openvino,vllm"),
        (["--cases", "x"], "argument --cases: got 'x', must be some of single,batch,prefill,shared"),
    ],
)
def test_mistakes(words, message):
    done = subprocess.run([sys.executable, str(PEERS / "run.py"), *words], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr
