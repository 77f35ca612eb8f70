"""What much data to one client costs the streams of the others: the time between two tokens, with and without it.

Some streams run; beside them one client asks for a prompt of many tokens, with the rows of all its layers and, for comparison, without.
Both are interleaved. Numbers are medians over the repetitions of each run's median, 99th percentile and maximum over all streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from clients import Connection
from faults import Server

STREAMS, TOKENS, PROMPT, LAYERS = 31, 128, 1900, 31
VARIANTS: dict[str, dict[str, Any] | None] = {
    "nobody": None,
    "no rows": {},
    "base64": {"hidden_states_format": "base64"},
    "safetensors": {"hidden_states_format": "safetensors"},
    "json": {"hidden_states_format": "json"},
    "base64, streamed": {"hidden_states_format": "base64", "stream": True},
}


class Run(NamedTuple):
    gaps: list[float]  # seconds between two parts of a stream, after the large request was sent
    seconds: float  # of the large request
    size: int  # bytes of its answer


async def stream(url: str, place: int, times: list[float], begun: asyncio.Event) -> None:
    body = {
        "text": f"Once upon a time there was client {place}, who",
        "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True},
        "stream": True,
        "incremental": True,
    }
    async with await Connection.open(url) as connection:
        await connection.ask("POST", "/generate", body)
        async for _ in connection.events(await connection.head()):
            times.append(time.perf_counter())
            if len(times) == 8:
                begun.set()


async def large(url: str, shift: int, asked: dict[str, Any] | None) -> tuple[float, int]:
    if asked is None:
        return 0.0, 0
    rows = {"return_hidden_states": True, "hidden_states_layers": list(range(LAYERS))} if asked else {}
    body = {
        "input_ids": [10 + (place * 7 + shift) % 997 for place in range(PROMPT)],  # never a cached prefix
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        **rows,
        **asked,
    }
    began, size = time.perf_counter(), 0
    async with await Connection.open(url) as connection:
        await connection.ask("POST", "/generate", body)
        head = await connection.head()
        async for piece in connection.pieces(head):
            size += len(piece)
        assert head.status == 200, head
    return time.perf_counter() - began, size


async def run(url: str, shift: int, asked: dict[str, Any] | None) -> Run:
    times: list[list[float]] = [[] for _ in range(STREAMS)]
    begun = [asyncio.Event() for _ in range(STREAMS)]
    streams = [asyncio.create_task(stream(url, place, times[place], begun[place])) for place in range(STREAMS)]
    await asyncio.gather(*(each.wait() for each in begun))
    sent = time.perf_counter()
    seconds, size = await large(url, shift, asked)
    await asyncio.gather(*streams)
    gaps = [after - before for each in times for before, after in pairwise(each) if after > sent]
    return Run(gaps, seconds, size)


def p99(gaps: Sequence[float]) -> float:
    return statistics.quantiles(gaps, n=100)[98]


async def measure(url: str, names: Sequence[str], repetitions: int) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {name: [] for name in names}
    await run(url, 0, None)  # warm
    for repetition in range(repetitions):
        for place, name in enumerate(list(runs)[:: -1 if repetition % 2 else 1]):
            runs[name].append(await run(url, 1 + 10 * repetition + place, VARIANTS[name]))
    return runs


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"of {', '.join(VARIANTS)} (default: all)")
    parser.add_argument("--repetitions", type=int, default=3, metavar="N")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--url", help="of a server that runs already")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON, too")
    options = parser.parse_args(words)
    server = None if options.url else Server(options.model, "--max-running-requests", str(STREAMS + 1))
    try:
        runs = asyncio.run(measure(server.url if server else options.url, options.variants or [*VARIANTS], options.repetitions))
    finally:
        if server is not None:
            server.stop()
    print(f"{STREAMS} streams of {TOKENS} tokens, beside a prompt of {PROMPT} tokens; milliseconds between tokens")
    for name, each in runs.items():
        median, last, longest = (1000 * statistics.median(f(one.gaps) for one in each) for f in (statistics.median, p99, max))
        answer = f"{each[0].size / 2**20:.0f} MiB in {statistics.median(one.seconds for one in each):.1f} s" if each[0].size else ""
        print(f"{name:<18} median {median:6.1f}  p99 {last:7.1f}  max {longest:7.1f}  {answer}")
    if options.json:
        print(json.dumps({name: [[p99(one.gaps), one.seconds] for one in each] for name, each in runs.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
