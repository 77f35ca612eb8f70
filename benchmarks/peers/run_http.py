"""32 requests at once over HTTP, streaming: our server against others' and against our own engine without a server, in turn.

python run_http.py [--peers NAME,NAME] [--rounds N] [--work DIR] [--format FORMAT]; run install.py first, and nothing beside it. The load is
`sidestream bench serve`: 32 prompts of 128 distinct random tokens, 128 new tokens each, greedy.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

from install import FORMATS, checkpoint, gguf_file
from peer_llamacpp import SLOT_TOKENS, SLOTS
from peer_vllm import environment as vllm_environment
from protocol import DEFAULT_WORK, python_of
from run import LEAST_ROUNDS, Driver, at_least_three, resume, stop, turn

from sidestream.bench.machine import processor
from sidestream.bench.spread import Spread, ratios

START_SECONDS = 300
LOAD = ["--num-prompts", "32", "--concurrency", "32", "--input-len", "128", "--output-len", "128", "--ignore-eos", "--token-ids", "--json"]
CASE, WORK = "batch", "32 at once"  # the same without a server
PEERS = ("vllm", "llamacpp")


class Server:
    """A server's process, from its start until it is ready, and until its end."""

    def __init__(self, name: str, command: list[str], work: Path, environment: Mapping[str, str] | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        (work / "logs").mkdir(parents=True, exist_ok=True)
        self.log = work / "logs" / f"http-{name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--port", port],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | dict(environment or {}),
                text=True,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"{name} did not start; {self.log} says why")
            time.sleep(0.1)
        stop(self.process)

    def _is_ready(self) -> bool:
        with suppress(OSError):
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        return False

    def rate(self, seed: int) -> float:
        """Output tokens per second of one load."""
        command = [sys.executable, "-m", "sidestream", "bench", "serve", "--url", self.url, "--seed", str(seed), *LOAD]
        with turn(self.process):
            told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        return float(told["output_tokens_per_second"])

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        resume(self.process)
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def ours(work: Path, format: str, threads: int) -> Server:
    command = [sys.executable, "-m", "sidestream", "serve", str(gguf_file(work, format)), "--threads", str(threads)]
    return Server("sidestream", command, work)


def llamacpp(work: Path, format: str, threads: int) -> Server:
    command = [str(work / "llamacpp" / "build" / "bin" / "llama-server"), "-m", str(gguf_file(work, format)), "-t", str(threads)]
    command += ["-tb", str(threads), "-c", str(SLOTS * SLOT_TOKENS), "-np", str(SLOTS), "-no-kvu", "-fa", "on", "-cb"]
    return Server(f"llamacpp-{format}", command, work)


def vllm(work: Path, threads: int) -> Server:
    command = [str(python_of(work, "vllm")), "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint(work))]
    command += ["--served-model-name", "smol", "--dtype", "bfloat16", "--max-model-len", "4096"]
    return Server("vllm", command, work, vllm_environment(work, threads))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers", type=lambda text: text.split(","), default=list(PEERS), metavar="NAME,NAME", help=f"of {','.join(PEERS)}"
    )
    parser.add_argument("--format", choices=FORMATS, default="q4_1", help="of our weights (default: q4_1, the default file)")
    parser.add_argument("--rounds", type=at_least_three, default=LEAST_ROUNDS, metavar="N")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, metavar="DIR")
    options = parser.parse_args()
    work = options.work.resolve()
    with ExitStack() as stack:
        served = {f"ours, {options.format}": stack.enter_context(ours(work, options.format, options.threads))}
        if "llamacpp" in options.peers:
            served["llama.cpp, q4_0"] = stack.enter_context(llamacpp(work, "q4_0", options.threads))
        if "vllm" in options.peers:
            served["vLLM, bf16"] = stack.enter_context(vllm(work, options.threads))
        engine = stack.enter_context(Driver("sidestream", options.format, work, options.threads))
        rates: dict[str, list[float]] = {name: [] for name in (*served, "our engine alone")}
        for seed in range(-1, options.rounds):  # the first round warms up
            for name, server in served.items():
                rates[name].append(server.rate(seed))
            rates["our engine alone"].append(engine.run(CASE, seed)[WORK]["tokens_per_second"])
    first = next(iter(served))
    measured = {name: each[1:] for name, each in rates.items()}
    print(f"{os.cpu_count()} cores of {processor()}, {options.threads} threads, {options.rounds} rounds: median (least..most).\n")
    print("| server | output tok/s | ours / it |\n| --- | --- | --- |")
    for name, each in measured.items():
        print(f"| {name} | {Spread.of(each)} | {'' if name == first else ratios(measured[first], each)} |")


if __name__ == "__main__":
    main()
