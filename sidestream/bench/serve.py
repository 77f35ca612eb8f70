"""`sidestream bench serve`: a load on a server with the OpenAI routes, and what became of each request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sidestream.bench.answer import Answer, Failure, Reader, refusal
from sidestream.bench.load import CONCURRENCY, Load, Request, random_requests, requests_of
from sidestream.errors import SidestreamError
from sidestream.observe.progress import Progress, open_progress

if TYPE_CHECKING:
    import aiohttp

LISTEN_SECONDS = 0.05  # between two looks at the client's own clock
# What is asked of a server about its token counts, until it takes one: per chunk, at the end, nothing.
STREAM_OPTIONS = ({"include_usage": True, "continuous_usage_stats": True}, {"include_usage": True}, None)
PROBE_TOKENS = 2


class Client(NamedTuple):
    """What the client itself did: its processor seconds, and how late it came to what was waiting, in seconds, now and then."""

    processor_seconds: float
    delays: list[float]


class Run(NamedTuple):
    """The answers in the order of their requests, and the seconds from the first request to the end of the last answer."""

    load: Load
    model: str
    answers: list[Answer]
    seconds: float
    client: Client


def measure(load: Load) -> Run:
    """Send the load and wait for its end. Raises ConfigError for a load that cannot be, SidestreamError for a server that takes none."""
    requests = requests_of(load)
    return _run(_measure(load, requests))


def _run(work: Coroutine[Any, Any, Run]) -> Run:
    """In uvloop where it is installed: it halves what a chunk costs here (docs/bench-serve.md)."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


async def _measure(load: Load, requests: list[Request]) -> Run:
    async with _session(load) as session:
        model = load.model or await _first_model(load, session)
        stream_options = await _probe(load, model, session)
        bodies = [request.body(load, model, stream_options) for request in requests]
        delays: list[float] = []
        with open_progress(None, len(bodies)) as progress:
            sender = Sender(load, session, progress)
            listener = asyncio.create_task(_listen(delays))
            processor = time.process_time()
            answers = await (sender.by_clock(bodies) if load.request_rate else sender.by_turns(bodies))
            processor = time.process_time() - processor
            listener.cancel()
            with suppress(asyncio.CancelledError):
                await listener
    return Run(load, model, answers, max(answer.ended for answer in answers), Client(processor, delays))


def _session(load: Load) -> aiohttp.ClientSession:
    try:
        import aiohttp
    except ImportError:
        raise SidestreamError("sidestream bench serve needs aiohttp", hint="pip install 'sidestream[bench]'") from None
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {load.api_key}"} if load.api_key else {})
    timeout = aiohttp.ClientTimeout(total=load.timeout, sock_connect=load.timeout)
    # Each request has a connection of its own, as if from a client of its own: one that is used again may be closed by the server at the
    # very moment, and that would count as a failure (llama-server does so after some streams).
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)


class Sender:
    """Sends requests and keeps their answers; its clock starts when it is made."""

    def __init__(self, load: Load, session: aiohttp.ClientSession, progress: Progress) -> None:
        self.load, self.session, self.progress = load, session, progress
        self.url = load.base + load.path
        self._started = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._started

    async def by_turns(self, bodies: list[bytes]) -> list[Answer]:
        """At most `concurrency` at once: one is sent as another ends."""
        answers: dict[int, Answer] = {}
        waiting = iter(enumerate(bodies))

        async def take_turns(waiting: Iterator[tuple[int, bytes]]) -> None:
            for number, body in waiting:
                answers[number] = await self.ask(body)

        await asyncio.gather(*(take_turns(waiting) for _ in range(min(len(bodies), self.load.concurrency or CONCURRENCY))))
        return [answers[number] for number in range(len(bodies))]

    async def by_clock(self, bodies: list[bytes]) -> list[Answer]:
        """At random times of a mean rate, however many are under way."""
        due, asked = 0.0, []
        for body, gap in zip(bodies, self.load.gaps(), strict=False):
            await asyncio.sleep(due - self.now())
            asked.append(asyncio.create_task(self.ask(body)))
            due += gap
        return list(await asyncio.gather(*asked))

    async def ask(self, body: bytes) -> Answer:
        """One request to its end, whatever that is."""
        import aiohttp

        reader = Reader(self.now())
        try:
            async with self.session.post(self.url, data=body) as response:
                failure = await self._read(response, reader)
        except asyncio.TimeoutError:
            failure = Failure("timeout", f"no end after {self.load.timeout:g} s")
        except aiohttp.ClientConnectorError as error:
            failure = Failure("no connection", _words(error))
        except (aiohttp.ClientError, OSError) as error:
            failure = Failure("connection broken", _words(error))
        except msgspec.DecodeError as error:
            failure = Failure("malformed answer", str(error))
        answer = reader.answer(self.now())
        answer = answer if failure is None else replace(answer, failure=failure)
        self.progress.advance(0 if answer.failure else answer.completion_tokens)
        return answer

    async def _read(self, response: aiohttp.ClientResponse, reader: Reader) -> Failure | None:
        if response.status != 200:
            return refusal(response.status, await response.read())
        if response.content_type != "text/event-stream":
            return Failure("not a stream", f"the answer is {response.content_type}, must be text/event-stream")
        async for data in response.content.iter_any():
            reader.feed(data, self.now())
        return None


async def _listen(delays: list[float]) -> None:
    """How late the event loop comes to what is due: by so much may a time be wrong that is measured in it."""
    while True:
        asked = time.perf_counter()
        await asyncio.sleep(LISTEN_SECONDS)
        delays.append(max(0.0, time.perf_counter() - asked - LISTEN_SECONDS))


def _words(error: BaseException) -> str:
    """What the operating system says where aiohttp says much more."""
    cause = getattr(error, "os_error", None) or error
    return f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__


async def _first_model(load: Load, session: aiohttp.ClientSession) -> str:
    import aiohttp

    try:
        async with session.get(f"{load.base}/models") as response:
            body = await response.read()
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        raise SidestreamError(f"{load.base}: no answer ({_words(error)})", hint="Is a server running there?") from None
    if response.status != 200:
        raise _refused(load.base + "/models", refusal(response.status, body))
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (msgspec.DecodeError, LookupError, TypeError):
        raise SidestreamError(f"{load.base}/models: got {body[:80]!r}, must list a model", hint="Name one with --model.") from None


async def _probe(load: Load, model: str, session: aiohttp.ClientSession) -> dict[str, bool] | None:
    """A first request that is not counted: which `stream_options` the server takes. Raises SidestreamError if it answers none."""
    [request] = random_requests(load, f"probe {load.seed}", 1, PROBE_TOKENS)
    with open_progress(False, 1) as silent:
        sender = Sender(load, session, silent)
        for stream_options in STREAM_OPTIONS:
            failure = (await sender.ask(request.body(load, model, stream_options))).failure
            if failure is None:
                return stream_options
            if stream_options is None or not failure.kind.startswith(("HTTP 400", "HTTP 422")):
                raise _refused(sender.url, failure)
    raise AssertionError("None is the last that is tried")


def _refused(url: str, failure: Failure) -> SidestreamError:
    return SidestreamError(f"{url}: the first request failed: {failure.kind}: {failure.message}", hint="Nothing was measured.")
