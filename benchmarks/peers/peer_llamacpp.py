"""llama.cpp: its server, asked for all requests at once. Loopback HTTP costs it about a millisecond per request."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from install import FORMATS, LLAMACPP_VERSION, gguf_file
from protocol import main

SLOTS, SLOT_TOKENS = 32, 2560
START_SECONDS = 120


class LlamaCpp:
    version = LLAMACPP_VERSION

    def __init__(self, work: Path, format: str, threads: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command: list[str] = [str(work / "llamacpp" / "build" / "bin" / "llama-server"), "-m", str(gguf_file(work, format))]
        command += ["-t", str(threads), "-tb", str(threads), "-c", str(SLOTS * SLOT_TOKENS), "-np", str(SLOTS), "-no-kvu"]
        command += ["-fa", "on", "-cb", "--port", str(port)]
        self.server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self.pool = ThreadPoolExecutor(SLOTS)
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self.server.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"llama-server did not start within {START_SECONDS} s; its exit status is {self.server.poll()}")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:  # not listening yet, or 503 while the model is loaded
            return False

    def _complete(self, prompt: list[int], new: int) -> list[int]:
        asked = {"prompt": prompt, "n_predict": new, "temperature": 0.0, "ignore_eos": True, "cache_prompt": True, "return_tokens": True}
        request = urllib.request.Request(f"{self.url}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            told: dict[str, Any] = json.load(answer)
        return list(told["tokens"])

    def generate(self, prompts: list[list[int]], new: int) -> Sequence[Sequence[int]]:
        return list(self.pool.map(self._complete, prompts, [new] * len(prompts)))

    def close(self) -> None:
        self.pool.shutdown()
        self.server.terminate()
        self.server.wait()


if __name__ == "__main__":
    main("llamacpp", FORMATS, LlamaCpp)
