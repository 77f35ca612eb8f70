"""What the client of `sidestream bench serve` itself costs, against a server that only sends prepared chunks at a steady pace.

Processor time per chunk of the client with and without uvloop, and how late it sees what was sent; beside it, for the choice of the HTTP
library, loops that do no more than read: aiohttp, httpx2 and asyncio's own streams. The server is a process of its own, one chunk after
the other to each of the connections, so that every chunk is a packet to wake up for: what costs most. `pip install httpx2` for its row.

usage: python benchmarks/load_client.py [--streams 32] [--seconds 8] [--gaps 0.04,0.02,0.01,0.005] [--repetitions 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from sidestream.bench.load import Load
from sidestream.bench.serve import measure
from sidestream.bench.spread import Spread, short
from sidestream.bench.summary import Summary

CHUNK: dict[str, Any] = {
    "id": "cmpl-0123456789abcdef0123456789abcdef",
    "object": "text_completion",
    "created": 1764500000,
    "model": "prepared",
    "choices": [{"index": 0, "text": " hello", "logprobs": None, "finish_reason": None}],
    "usage": {"prompt_tokens": 128, "completion_tokens": 0, "total_tokens": 145},
}


async def serve(gap: float) -> None:
    """As many chunks as max_tokens says, `gap` seconds apart."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def send(data: bytes) -> None:
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))

        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                events = []
                for number in range(1, body["max_tokens"] + 1):
                    CHUNK["usage"]["completion_tokens"] = number
                    events.append(b"data: %s\n\n" % json.dumps(CHUNK).encode())
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
                due = loop.time()
                for event in events:
                    due += gap
                    await asyncio.sleep(due - loop.time())
                    send(event)
                send(b"data: [DONE]\n\n")
                send(b"")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    loop = asyncio.get_running_loop()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def bench(loop: str) -> Callable[[str, int, int], tuple[int, float, str]]:
    """The command's own client: chunks, processor seconds, and the gaps that it saw."""

    def run(url: str, streams: int, chunks: int) -> tuple[int, float, str]:
        if loop == "asyncio":
            sys.modules["uvloop"] = None  # type: ignore[assignment]
        else:
            sys.modules.pop("uvloop", None)
        made = measure(Load(url=url, model="prepared", num_prompts=streams, concurrency=streams, output_len=chunks))
        summary = Summary(made)
        assert not summary.failures, summary.failures
        gaps = summary.latencies["itl"]
        assert gaps is not None
        seen = f"{short(gaps.p50 * 1e3)} / {short(gaps.p99 * 1e3)}"
        return summary.output_tokens, made.client.processor_seconds, seen

    return run


def bare(read: Callable[[str, bytes, int], Coroutine[Any, Any, float]]) -> Callable[[str, int, int], tuple[int, float, str]]:
    """A loop that reads and does nothing with it."""

    def run(url: str, streams: int, chunks: int) -> tuple[int, float, str]:
        body = json.dumps({"prompt": "word " * 128, "max_tokens": chunks}).encode()
        return streams * chunks, asyncio.run(read(url, body, streams)), "-"

    return run


async def together(read: Callable[[], Awaitable[None]], streams: int) -> float:
    started = time.process_time()
    await asyncio.gather(*(read() for _ in range(streams)))
    return time.process_time() - started


async def by_aiohttp(url: str, body: bytes, streams: int) -> float:
    import aiohttp

    async with aiohttp.ClientSession() as session:

        async def read() -> None:
            async with session.post(url, data=body) as response:
                async for _ in response.content.iter_any():
                    pass

        return await together(read, streams)


async def by_httpx2(url: str, body: bytes, streams: int) -> float:
    import httpx2

    async with httpx2.AsyncClient(timeout=600, limits=httpx2.Limits(max_connections=None)) as client:

        async def read() -> None:
            async with client.stream("POST", url, content=body) as response:
                async for _ in response.aiter_raw():
                    pass

        return await together(read, streams)


async def by_streams(url: str, body: bytes, streams: int) -> float:
    async def read() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        await reader.readuntil(b"\r\n\r\n")
        while length := int(await reader.readline(), 16):
            await reader.readexactly(length + 2)
        writer.close()

    return await together(read, streams)


RUNS = {
    "bench serve, uvloop": bench("uvloop"),
    "bench serve, asyncio": bench("asyncio"),
    "only reading: aiohttp": bare(by_aiohttp),
    "only reading: httpx2": bare(by_httpx2),
    "only reading: asyncio streams": bare(by_streams),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--gaps", type=lambda text: [float(word) for word in text.split(",")], default=[0.04, 0.02, 0.01, 0.005])
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    if options.serve is not None:
        asyncio.run(serve(options.serve))
        return
    print("| client | chunks a second sent | us per chunk | share of a core | gaps seen, p50 / p99, ms (sent every) |")
    print("| --- | --- | --- | --- | --- |")
    for gap in options.gaps:
        with subprocess.Popen([sys.executable, __file__, "--serve", str(gap)], stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
            try:
                _rows(url, gap, options)
            finally:
                server.terminate()


def _rows(url: str, gap: float, options: argparse.Namespace) -> None:
    chunks = round(options.seconds / gap)
    results: dict[str, list[tuple[int, float, str]]] = {name: [] for name in RUNS}
    for _ in range(options.repetitions):
        for name, run in RUNS.items():
            results[name].append(run(url, options.streams, chunks))
    for name, made in results.items():
        each = Spread.of([seconds / count * 1e6 for count, seconds, _ in made])
        share = each.median * options.streams / gap / 1e6
        print(f"| {name} | {options.streams / gap:,.0f} | {each} | {share:.0%} | {made[0][2]} ({gap * 1e3:g}) |", flush=True)


if __name__ == "__main__":
    main()
