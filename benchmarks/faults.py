"""What clients and operators do to a server, and that it holds: nothing hangs, no page leaks, every request has one terminal answer.

Each scenario starts a server of its own and prints one line: what became of the requests, the seconds, the tokens of the KV cache that
did not come back. The exit status is 1 if anything was violated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from clients import Connection, Outcome, answer_of, ask, request, whole
from malformed import malformed

ROOT = Path(__file__).resolve().parent.parent
REST_SECONDS = 20.0  # until an idle server has taken its pages back
LIFE_SECONDS = 2.0  # a process outlives its partner by this at most
MEMORY_GROWTH = 48 * 2**20  # of the API process, over all disconnects
DEBUG = {"PYTHONDEVMODE": "1"}  # of a server: what is left over is told of
NOISE = re.compile(r"Traceback|ResourceWarning|never awaited|never retrieved|was destroyed|Exception in|Unclosed|Assertion failed")


@dataclass(frozen=True)
class Scale:
    """How much of everything. The full one is for the default model."""

    clients: int = 200
    bodies: int = 1000
    streams: int = 16  # beside what goes wrong
    tokens: int = 64  # of an answer
    endless: int = 4000  # tokens of a request that is to be open when something happens
    choices: int = 1  # of such a request
    slow: int = 2
    unread_choices: int = 32  # of a stream that nobody reads: what waits must pass the bound
    layers: int = 31  # whose rows it asks for
    disconnects: int = 500
    body_limit: int = 64 * 2**20
    idle: int = 200  # connections that say nothing
    large_tokens: int = 1900  # of a prompt whose rows of all layers are large
    large_bytes: int = 64 * 2**20  # these rows


QUICK = Scale(
    clients=30,
    bodies=140,
    streams=6,
    tokens=24,
    endless=450,
    choices=8,
    slow=2,
    unread_choices=16,
    layers=5,
    disconnects=60,
    body_limit=2**20,
    idle=20,
    large_tokens=400,
    large_bytes=2**18,
)


class Running(Protocol):
    """A server that was started."""

    url: str
    process: subprocess.Popen[Any]

    @property
    def engine_pid(self) -> int: ...

    @property
    def log(self) -> str: ...

    def stop(self, number: int = ...) -> int: ...


Start = Callable[..., Running]  # takes flags, `environ` besides the own, and `wait=False` for not until it is ready


@dataclass
class Tally:
    """What a scenario found."""

    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    notes: dict[str, object] = field(default_factory=dict)
    leaked: int | None = None  # tokens of the KV cache, where the server lived to tell

    def add(self, outcome: Outcome, *allowed: str, wanted: dict[int, list[int]] | None = None) -> None:
        """Count what became of a request that may end in these ways."""
        self.counts[outcome.name] += 1
        if outcome.kind not in allowed:
            self.violations.append(f"{outcome.name}: {outcome.why}")
        if wanted is not None and outcome.kind == "answered" and outcome.tokens != wanted:
            self.violations.append(f"the tokens are not those of the request alone: {outcome.tokens} for {wanted}")

    def expect(self, holds: object, otherwise: str) -> None:
        if not holds:
            self.violations.append(otherwise)

    def line(self, name: str, seconds: float) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items(), key=lambda each: -each[1]))
        notes = "".join(f" | {name} {value}" for name, value in self.notes.items())
        leaked = "" if self.leaked is None else f" | leaked {self.leaked}"
        return f"{name:<22} {seconds:6.1f} s | {counts}{notes}{leaked}{'' if not self.violations else ' | VIOLATED'}"


Scenario = Callable[[Start, Scale], Coroutine[Any, Any, Tally]]


# Requests


def generate(place: int, tokens: int, *, stream: bool = True, **fields: Any) -> dict[str, Any]:
    """A body for the native route; prompts of different places differ."""
    sampling = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True, **fields.pop("sampling_params", {})}
    return {"text": f"Once upon a time there was client {place}, who", "sampling_params": sampling, "stream": stream, **fields}


def mixed(place: int, tokens: int, choices: int = 1) -> tuple[str, dict[str, Any]]:
    """Route and body: streamed and not, native and OpenAI's, with outputs and without."""
    text, stream = f"Once upon a time there was client {place}, who", place % 2 == 0
    common = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "stream": stream, "n": choices}
    own: dict[str, Any] = {"stream": stream, "sampling_params": {"n": choices}}
    bodies = (
        ("/generate", generate(place, tokens, **own)),
        ("/v1/completions", {"prompt": text, **common, "logprobs": 2}),
        ("/generate", generate(place, tokens, **own, return_hidden_states=True, hidden_states_format="base64")),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **common}),
        ("/generate", generate(place, tokens, **own, return_hidden_states="last", top_logprobs_num=3)),
    )
    return bodies[place // 2 % len(bodies)]


async def alone(url: str, count: int, tokens: int) -> list[dict[int, list[int]]]:
    """The tokens of the first places' requests, asked one after the other."""
    return [(await ask(url, "/generate", generate(place, tokens, stream=False))).tokens for place in range(count)]


@asynccontextmanager
async def neighbours(url: str, tally: Tally, count: int, tokens: int) -> AsyncIterator[None]:
    """Streams that go on for as long as the block lasts, and must stay what they are alone."""
    wanted = await alone(url, count, tokens)
    over = False

    async def keep_asking(place: int) -> None:
        while not over:
            tally.add(await ask(url, "/generate", generate(place, tokens)), "answered", wanted=wanted[place])

    asking = [asyncio.create_task(keep_asking(place)) for place in range(count)]
    try:
        yield
    finally:
        over = True
        await asyncio.gather(*asking)


async def under_load(url: str, scale: Scale, *, tokens: int) -> list[asyncio.Task[Outcome]]:
    """Open requests, streamed and not, of which most have begun to be answered."""
    seen = [asyncio.Event() for _ in range(scale.streams)]
    bodies = [generate(place, tokens, sampling_params={"n": scale.choices}) for place in range(scale.streams)]
    streams = [asyncio.create_task(ask(url, "/generate", body, seen=each)) for body, each in zip(bodies, seen, strict=True)]
    await asyncio.wait([asyncio.create_task(each.wait()) for each in seen[: len(seen) // 2]])
    rest = [mixed(place, tokens, scale.choices) for place in range(scale.streams, 2 * scale.streams)]
    streams += [asyncio.create_task(ask(url, path, body)) for path, body in rest]

    async def all_open() -> bool:
        return bool((await stats(url))["requests"] >= len(streams) * scale.choices)

    await until(all_open, 30)
    return streams


# Looking at a server


async def get(url: str, path: str) -> tuple[int, bytes]:
    async with await Connection.open(url) as connection:
        await connection.ask("GET", path)
        head = await connection.head()
        return head.status, await connection.body(head)


async def stats(url: str) -> dict[str, Any]:
    status, body = await get(url, "/server_info")
    assert status == 200, body
    return dict(json.loads(body)["stats"])


async def until(holds: Callable[[], Awaitable[bool]], seconds: float) -> bool:
    """Whether it comes to hold within that time."""
    end = time.monotonic() + seconds
    while not await holds():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.05)
    return True


async def rest(server: Running, tally: Tally) -> None:
    """The server has no work, all its pages, still answers, and its log tells of nothing that went wrong. Then end it."""

    async def idle() -> bool:
        now = await stats(server.url)
        tally.leaked = now["kv_tokens_total"] - now["kv_tokens_free"] - now["kv_tokens_cached"]
        return not (now["running"] or now["waiting"] or tally.leaked)

    tally.expect(await until(idle, REST_SECONDS), f"not at rest: {await stats(server.url)}")
    tally.add(await ask(server.url, "/generate", generate(0, 2)), "answered")
    await ended(server, tally, 0)


async def ended(server: Running, tally: Tally, status: int, number: int = signal.SIGTERM) -> None:
    got = None
    if server.process.poll() is None:
        server.process.send_signal(number)
    try:
        got = await asyncio.to_thread(server.process.wait, 60)
    except subprocess.TimeoutExpired:
        tally.violations.append("the server does not end")
    log = server.log
    tally.expect(got == status, f"exit status {got}, not {status}")
    if status in (0, 1):
        tally.expect(NOISE.search(log) is None, f"the log says {log}")


def memory(pid: int) -> int:
    """Resident bytes of a process."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Clients


async def leave_somewhere(url: str, path: str, body: dict[str, Any], chance: random.Random) -> Outcome:
    """Leave in the middle of asking, of waiting, or of reading."""
    connection = await Connection.open(url)
    asked, how = request("POST", path, body), chance.randrange(4)
    try:
        if how == 0:
            await connection.send(asked[: chance.randrange(1, len(asked))])
        else:
            await connection.send(asked)
        if how == 2 and body.get("stream"):
            head = await connection.head()
            pieces = chance.randrange(1, 12)
            async for _ in connection.pieces(head):
                if not (pieces := pieces - 1):
                    break
        elif how:
            await asyncio.sleep(chance.random() * 0.5)
    finally:
        await connection.leave(abruptly=chance.random() < 0.5)
    return Outcome("left")


async def disconnects(start: Start, scale: Scale) -> Tally:
    """Of many clients at once, a third leave at some moment."""
    server, tally, chance = start(environ=DEBUG), Tally(), random.Random(1)
    wanted = await alone(server.url, 8, scale.tokens)

    async def client(place: int) -> None:
        if place % 3 == 0:
            path, body = mixed(place // 3, scale.tokens)
            tally.add(await leave_somewhere(server.url, path, body, chance), "left")
        elif place % 3 == 1:
            tally.add(await ask(server.url, "/generate", generate(place % 8, scale.tokens)), "answered", wanted=wanted[place % 8])
        else:
            tally.add(await ask(server.url, *mixed(place // 3, scale.tokens)), "answered")

    await asyncio.gather(*(client(place) for place in range(scale.clients)))
    await rest(server, tally)
    return tally


async def malformed_bodies(start: Start, scale: Scale) -> Tally:
    """Each is refused with the error object, and streams beside them stay as they are."""
    server, tally = start(environ=DEBUG), Tally()
    kinds: Counter[str] = Counter()
    bodies = malformed(scale.bodies)

    async def client() -> None:
        for body in bodies:
            async with await Connection.open(server.url) as connection:
                await connection.ask("POST", body.path, body.body, **{"Content-Type": body.content_type})
                outcome = await answer_of(connection)
            kinds[body.kind] += 1
            tally.counts[outcome.name] += 1
            fine = 400 <= outcome.status < 500 and outcome.kind not in ("answered", "wrong")
            tally.expect(fine, f"{body.path} {body.kind}: {outcome.status} {outcome.name} {outcome.why}: {body.body[:300]!r}")

    async with neighbours(server.url, tally, 4, scale.tokens):
        await asyncio.gather(*(client() for _ in range(4)))
    tally.notes["kinds"] = len(kinds)
    await rest(server, tally)
    return tally


async def slow_readers(start: Start, scale: Scale) -> Tally:
    """One that reads nothing loses its request, one that reads slowly gets all of it, and the others notice neither."""
    server, tally = start(environ=DEBUG), Tally()
    unread = generate(
        100,
        scale.endless * 3 // 4,
        sampling_params={"n": scale.unread_choices},
        return_hidden_states=True,
        hidden_states_layers=list(range(scale.layers)),
        hidden_states_format="base64",
    )

    async def dawdle(place: int) -> None:
        async with await Connection.open(server.url, receive_buffer=4096) as connection:
            await connection.ask("POST", "/generate", generate(place, scale.tokens))
            await asyncio.sleep(2.0)
            tally.add(await answer_of(connection), "answered")

    async with neighbours(server.url, tally, 4, scale.tokens):
        stuck = [await Connection.open(server.url, receive_buffer=4096) for _ in range(scale.slow)]
        for connection in stuck:
            await connection.ask("POST", "/generate", unread)
        await asyncio.gather(*(dawdle(200 + place) for place in range(scale.slow)))

        async def given_up() -> bool:
            now = await stats(server.url)
            return bool(now["running"] + now["waiting"] <= 4)

        tally.expect(await until(given_up, 300), "requests that nobody reads go on")
        for connection in stuck:
            async with connection:
                try:
                    tally.add(await answer_of(connection), "slow_reader")
                except (ConnectionError, asyncio.IncompleteReadError):
                    tally.counts["cut"] += 1
    await rest(server, tally)
    return tally


async def memory_growth(start: Start, scale: Scale) -> Tally:
    """Clients that leave cost no memory afterwards."""
    server, tally, chance = start(environ=DEBUG), Tally(), random.Random(2)

    async def round(count: int) -> int:
        for first in range(0, count, 25):
            leaving = (leave_somewhere(server.url, *mixed(place, scale.tokens), chance) for place in range(first, min(first + 25, count)))
            for outcome in await asyncio.gather(*leaving):
                tally.add(outcome, "left")
        return memory(server.process.pid)

    before = await round(scale.disconnects // 2)
    grown = await round(scale.disconnects) - before
    tally.notes["grown by"] = f"{grown / 2**20:.1f} MiB"
    tally.expect(grown < MEMORY_GROWTH, f"the API process has grown by {grown} bytes")
    await rest(server, tally)
    return tally


# Connections


async def half_open(start: Start, scale: Scale) -> Tally:
    """Connections that say nothing, or half of something, keep nobody waiting, at the end neither."""
    server, tally = start(environ=DEBUG), Tally()
    asked = request("POST", "/generate", generate(0, scale.tokens))
    words = (b"", b"POST /gen", asked[: asked.index(b"\r\n\r\n")], asked[:-10])
    silent = [await Connection.open(server.url) for _ in range(scale.idle)]
    for place, connection in enumerate(silent):
        await connection.send(words[place % len(words)])
    tally.counts["silent"] = len(silent)
    wanted = await alone(server.url, 4, scale.tokens)
    for place in range(4):
        tally.add(await ask(server.url, "/generate", generate(place, scale.tokens)), "answered", wanted=wanted[place])
    for connection in silent[::2]:
        await connection.leave(abruptly=True)
    await rest(server, tally)
    for connection in silent:
        await connection.leave()
    return tally


async def header_floods(start: Start, scale: Scale) -> Tally:
    """Heads without an end are refused before they cost memory."""
    server, tally = start(), Tally()
    before, size = memory(server.process.pid), 64 * 2**20

    async def flood(head: bytes, piece: bytes) -> None:
        async with await Connection.open(server.url) as connection:
            await connection.send(head)
            sent = 0
            try:
                while sent < size:
                    await connection.send(piece)
                    sent += len(piece)
                tally.counts["taken"] += 1
                tally.violations.append(f"{sent} bytes of a head were taken")
            except ConnectionError:
                tally.counts["cut"] += 1

    line = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    await flood(line, b"X-Flood: " + b"a" * 1000 + b"\r\n")
    await flood(line + b"X-Flood: ", b"a" * 65536)
    await flood(b"GET /", b"a" * 65536)
    await flood(line, b"".join(b"X-%d: a\r\n" % number for number in range(5000)))
    grown = memory(server.process.pid) - before
    tally.notes["grown by"] = f"{grown / 2**20:.1f} MiB"
    tally.expect(grown < MEMORY_GROWTH, f"the API process has grown by {grown} bytes")
    await rest(server, tally)
    return tally


async def pipelined(start: Start, scale: Scale) -> Tally:
    """Requests that follow each other on a connection without waiting are answered in order."""
    server, tally = start(environ=DEBUG), Tally()
    wanted = await alone(server.url, 4, scale.tokens)
    asked = [request("POST", "/generate", generate(place, scale.tokens, stream=place % 2 == 0)) for place in range(4)]
    async with await Connection.open(server.url) as connection:
        await connection.send(b"".join(asked))
        for place in range(4):
            tally.add(await answer_of(connection), "answered", wanted=wanted[place])
    async with await Connection.open(server.url) as connection:  # a mistake does not spoil what follows it
        await connection.send(request("POST", "/generate", b"{") + asked[1] + request("GET", "/nothing") + asked[0])
        for allowed, text in (("invalid_value", None), ("answered", wanted[1]), ("not_found", None), ("answered", wanted[0])):
            tally.add(await answer_of(connection), allowed, wanted=text)
    for abruptly in (False, True):  # and leaving ends all of them
        connection = await Connection.open(server.url)
        await connection.send(request("POST", "/generate", generate(9, scale.endless)) + asked[0] + asked[1])
        await connection.head()
        await connection.leave(abruptly=abruptly)
        tally.add(Outcome("left"), "left")
    await rest(server, tally)
    return tally


async def bodies_at_the_limit(start: Start, scale: Scale) -> Tally:
    """A body of the size limit is taken, one byte more is not, however its size is told; meanwhile others are served."""
    server, tally = start("--max-body-size", str(scale.body_limit)), Tally()
    body = request("POST", "/", generate(0, 4, stream=False)).partition(b"\r\n\r\n")[2]
    full = body + b" " * (scale.body_limit - len(body))
    long = b'{"text": "%b"}' % (b"word " * (scale.body_limit // 5 - 10))
    ids = b'{"input_ids": [%b]}' % b",".join([b"7"] * (scale.body_limit // 2 - 10))

    async def chunked(data: bytes) -> None:
        async with await Connection.open(server.url) as connection:
            await connection.send(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
            for start in range(0, len(data), 2**18):
                piece = data[start : start + 2**18]
                await connection.send(b"%x\r\n%b\r\n" % (len(piece), piece))
            await connection.send(b"0\r\n\r\n")
            tally.add(await answer_of(connection), "answered" if len(data) <= scale.body_limit else "body_too_large")

    async with pulse(server.url, tally):
        tally.add(await ask(server.url, "/generate", full), "answered")
        tally.add(await ask(server.url, "/generate", full + b" "), "body_too_large")
        await chunked(full)
        await chunked(full + b" ")
        tally.add(await ask(server.url, "/generate", long), "context_length_exceeded")
        tally.add(await ask(server.url, "/generate", ids), "context_length_exceeded")
        async with await Connection.open(server.url) as connection:
            await connection.ask("POST", "/generate", None, Expect="100-continue", Content_Length=str(scale.body_limit + 1))
            tally.add(whole(head := await connection.head(), await connection.body(head)), "body_too_large")
    await rest(server, tally)
    return tally


@asynccontextmanager
async def pulse(url: str, tally: Tally) -> AsyncIterator[None]:
    """Ask a cheap route every millisecond: the longest wait is the longest stall of the server's event loop."""
    waits: list[float] = []

    async def beat() -> None:
        async with await Connection.open(url) as connection:
            while True:
                asked = time.perf_counter()
                await connection.ask("GET", "/health/live")
                await connection.body(await connection.head())
                waits.append(time.perf_counter() - asked)
                await asyncio.sleep(0.001)

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        tally.notes["longest stall"] = f"{1000 * max(waits):.0f} ms of {len(waits)}"


# The queue


async def full_queue(start: Start, scale: Scale) -> Tally:
    """What has no place is refused with 429 and Retry-After, the rest is answered; afterwards there is place again."""
    server, tally = start("--max-running-requests", "2", "--max-queued-requests", "3"), Tally()
    bodies = [generate(place, scale.tokens, stream=place % 2 == 0) for place in range(scale.clients // 4)]
    outcomes = await asyncio.gather(*(ask(server.url, "/generate", body) for body in bodies))
    for outcome in outcomes:
        tally.add(outcome, "answered", "queue_full")
    tally.expect(tally.counts["answered"] >= 5, "fewer were answered than there are places")
    tally.expect(tally.counts["429 queue_full"], "the queue was never full")
    many = {**generate(0, 2, stream=False), "text": ["a", "b", "c", "d", "e", "f"]}
    tally.add(await ask(server.url, "/generate", many), "queue_full", "answered")
    await rest(server, tally)
    return tally


async def abort_queued(start: Start, scale: Scale) -> Tally:
    """A request that waits, and one that runs, end by their ids, each with one terminal answer."""
    server, tally = start("--max-running-requests", "1", environ=DEBUG), Tally()
    rids = [f"request-{place}" for place in range(6)]
    seen = asyncio.Event()
    first = asyncio.create_task(ask(server.url, "/generate", generate(0, scale.endless, rid=rids[0]), seen=seen))
    await seen.wait()
    bodies = [generate(place, scale.endless, stream=place % 2 == 0, rid=rids[place]) for place in range(1, 6)]
    waiting = [asyncio.create_task(ask(server.url, "/generate", body)) for body in bodies]

    async def queued() -> bool:
        return bool((await stats(server.url))["waiting"] == 5)

    tally.expect(await until(queued, 10), "the requests are not queued")
    for rid in [*rids[1:], rids[0], "nobody", rids[1]]:
        async with await Connection.open(server.url) as connection:
            await connection.ask("POST", "/abort_request", {"rid": rid})
            tally.expect((await connection.head()).status == 200, f"{rid} cannot be aborted")
    for outcome in await asyncio.gather(first, *waiting):
        tally.add(outcome, "aborted", "answered")
    tally.expect(tally.counts["aborted"] + tally.counts["499 aborted"] >= 5, "requests that waited were not aborted")
    await rest(server, tally)
    return tally


# Life and death


async def loading(start: Start, scale: Scale) -> Tally:
    """The port answers before the model has loaded: with 503, a reason, and when to try again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server, tally = start("--port", str(port), wait=False), Tally()
    server.url = f"http://127.0.0.1:{port}"
    end = time.monotonic() + 120
    while time.monotonic() < end:
        outcome = await ask(server.url, "/generate", generate(0, 4, stream=False))
        tally.add(outcome, "no answer", "loading", "answered")
        if outcome.kind == "answered":
            break
        if outcome.kind == "loading":
            status, body = await get(server.url, "/health")
            tally.expect((status == 503 and b"loading" in body) or status == 200, f"/health says {status} {body!r}")
        await asyncio.sleep(0.05)
    tally.expect(tally.counts["503 loading"], "no request was told that the model is loading")
    await rest(server, tally)
    return tally


async def engine_killed(start: Start, scale: Scale) -> Tally:
    """kill -9 of the engine under load: the server ends too, and every open request hears of it."""
    server, tally = start("--max-running-requests", str(scale.streams)), Tally()
    unread = await stuck_reader(server.url, scale)
    open_requests = await under_load(server.url, scale, tokens=scale.endless)
    os.kill(server.engine_pid, signal.SIGKILL)
    killed = time.monotonic()
    for outcome in await asyncio.gather(*open_requests):
        tally.add(outcome, "engine_error", "failed")
    answered = time.monotonic() - killed
    await ended(server, tally, 1, 0)
    tally.notes["answered after"] = f"{answered:.2f} s"
    tally.notes["ended after"] = f"{time.monotonic() - killed:.2f} s"
    tally.expect(time.monotonic() - killed < LIFE_SECONDS, f"the server lived on for {time.monotonic() - killed:.1f} s")
    await unread.leave()
    return tally


async def server_killed(start: Start, scale: Scale) -> Tally:
    """kill -9 of the API process under load: the engine's process ends too."""
    server, tally = start(), Tally()
    engine = server.engine_pid
    open_requests = await under_load(server.url, scale, tokens=scale.endless)
    server.process.kill()
    killed = time.monotonic()
    for outcome in await asyncio.gather(*open_requests):
        tally.add(outcome, "cut")

    async def gone() -> bool:
        return not alive(engine)

    tally.expect(await until(gone, LIFE_SECONDS), "the engine's process lives on")
    tally.notes["engine gone after"] = f"{time.monotonic() - killed:.2f} s"
    await ended(server, tally, -signal.SIGKILL)
    return tally


async def terminated(start: Start, scale: Scale) -> Tally:
    """SIGTERM under load: what is open is answered, what comes is refused, the exit status is 0."""
    server, tally = start(environ=DEBUG), Tally()
    open_requests = await under_load(server.url, scale, tokens=scale.tokens * 2)
    server.process.terminate()
    told = time.monotonic()
    await asyncio.sleep(0.1)
    for _ in range(4):
        tally.add(await ask(server.url, "/generate", generate(0, 4)), "draining", "no answer", "cut")
    for outcome in await asyncio.gather(*open_requests):
        tally.add(outcome, "answered")
    await ended(server, tally, 0, 0)
    tally.notes["ended after"] = f"{time.monotonic() - told:.2f} s"
    return tally


async def terminated_twice(start: Start, scale: Scale) -> Tally:
    """A second SIGTERM aborts: every client hears of it, also where another one reads nothing."""
    server, tally = start("--max-running-requests", str(scale.streams), environ=DEBUG), Tally()
    engine = server.engine_pid
    unread = await stuck_reader(server.url, scale)
    open_requests = await under_load(server.url, scale, tokens=scale.endless)
    server.process.terminate()
    await asyncio.sleep(0.3)
    tally.expect(server.process.poll() is None, "the first signal ended open requests")
    server.process.terminate()
    told = time.monotonic()
    for outcome in await asyncio.gather(*open_requests):
        tally.add(outcome, "aborted", "engine_error", "answered")
    tally.expect(tally.counts["answered"] < len(open_requests), "the second signal aborted nothing")
    await ended(server, tally, 0, 0)
    tally.expect(not alive(engine), "the engine's process lives on")
    tally.notes["ended after"] = f"{time.monotonic() - told:.2f} s"
    await unread.leave()
    return tally


async def stuck_reader(url: str, scale: Scale) -> Connection:
    """A client that has asked for much and reads nothing: the server's writes to it are blocked."""
    connection = await Connection.open(url, receive_buffer=4096)
    await connection.ask("POST", "/generate", generate(99, scale.endless, return_hidden_states=True, hidden_states_layers=[0] * 16))
    return connection


# Large answers


async def large_hidden(start: Start, scale: Scale) -> Tally:
    """Much data to one client in every form, while others stream."""
    server, tally = start(), Tally()
    ids = [10 + place % 200 for place in range(scale.large_tokens)]
    for form, stream in (("safetensors", False), ("base64", False), ("json", False), ("base64", True)):
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_hidden_states": True,
            "hidden_states_layers": list(range(scale.layers)),
            "hidden_states_format": form,
            "stream": stream,
        }
        beats = Tally()
        began = time.monotonic()
        async with neighbours(server.url, tally, scale.streams, scale.tokens), pulse(server.url, beats):
            async with await Connection.open(server.url) as connection:
                await connection.ask("POST", "/generate", body)
                head, size = await connection.head(), 0
                async for piece in connection.pieces(head):
                    size += len(piece)
        tally.expect(head.status == 200 and size > scale.large_bytes, f"{form}: status {head.status}, {size} bytes")
        name = f"{form}{' streamed' if stream else ''}"
        tally.notes[name] = f"{size / 2**20:.0f} MiB {time.monotonic() - began:.1f} s stall {beats.notes['longest stall']}"
    await rest(server, tally)
    return tally


SCENARIOS: dict[str, Scenario] = {
    each.__name__: each
    for each in (
        disconnects,
        malformed_bodies,
        slow_readers,
        memory_growth,
        half_open,
        header_floods,
        pipelined,
        bodies_at_the_limit,
        full_queue,
        abort_queued,
        loading,
        engine_killed,
        server_killed,
        terminated,
        terminated_twice,
        large_hidden,
    )
}


class Server:
    """`sidestream serve` in a process of its own."""

    def __init__(self, model: str, *flags: str, environ: Mapping[str, str] | None = None, wait: bool = True) -> None:
        self._log = tempfile.NamedTemporaryFile("w+", prefix="faults-", suffix=".log")  # noqa: SIM115
        command = [sys.executable, "-m", "sidestream", "serve", model, "--port", "0", *flags]
        self.process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **(environ or {})}, stdout=self._log, stderr=self._log)
        self.url = ""
        while wait and not self.url:
            if self.process.poll() is not None:
                raise SystemExit(self.log)
            if found := re.search(r"ready +(http://\S+)", self.log):
                self.url = found[1]
            else:
                time.sleep(0.05)

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text()

    @property
    def engine_pid(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0])

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", choices=[*SCENARIOS, []], metavar="SCENARIO", help=f"of {', '.join(SCENARIOS)}")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quick", action="store_true", help="less of everything: for a model that is small and fast")
    options = parser.parse_args(words)
    failed = False
    for name in options.scenarios or SCENARIOS:
        servers: list[Server] = []

        def start(*flags: str, servers: list[Server] = servers, **how: Any) -> Server:
            servers.append(Server(options.model, *flags, **how))
            return servers[-1]

        began = time.monotonic()
        try:
            tally = asyncio.run(SCENARIOS[name](start, QUICK if options.quick else Scale()))
        except Exception as error:
            tally = Tally(violations=[f"{type(error).__name__}: {error}"])
        finally:
            for each in servers:
                each.stop(signal.SIGKILL)
        print(tally.line(name, time.monotonic() - began), flush=True)
        for violation, count in Counter(tally.violations).most_common(10):
            print(f"    {count} x {violation[:2000]}", flush=True)
        failed |= bool(tally.violations)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
