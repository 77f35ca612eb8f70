"""Clients on bare sockets, which may do what no library lets them: leave, dawdle, send half of a request or nonsense.

Each request comes to one `Outcome`. What a client may meet and still be well served has a name; everything else is a violation.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

PATIENCE_SECONDS = 120.0  # without a byte from the server: it hangs
PIECE = 64 * 1024


class Head(NamedTuple):
    status: int
    headers: Mapping[str, str]  # names in lower case


class Connection:
    """One TCP connection. Raises ConnectionError and IncompleteReadError where the server ends it, TimeoutError where it says nothing."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, url: str, *, receive_buffer: int | None = None) -> Connection:
        """`receive_buffer` bytes for what was not read, so that the server notices a slow reader soon."""
        address = urlsplit(url)
        connected = socket.socket()
        connected.setblocking(False)
        if receive_buffer is not None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            await asyncio.get_running_loop().sock_connect(connected, (address.hostname, address.port))
        except BaseException:
            connected.close()
            raise
        return cls(*await asyncio.open_connection(sock=connected, limit=receive_buffer or PIECE))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> None:
        """Send a request. A body that is not bytes is sent as JSON."""
        await self.send(request(method, path, body, **headers))

    async def head(self) -> Head:
        """The head of the next answer; those of 1xx are left out."""
        while True:
            lines = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PATIENCE_SECONDS)).decode("latin-1").split("\r\n")
            status = int(lines[0].split()[1])
            if status >= 200:
                pairs = (line.split(":", 1) for line in lines[1:] if line)
                return Head(status, {name.strip().lower(): value.strip() for name, value in pairs})

    async def pieces(self, head: Head) -> AsyncIterator[bytes]:
        """The body as it comes."""
        if head.headers.get("transfer-encoding") != "chunked":
            left = int(head.headers.get("content-length", "0"))
            while left:
                piece = await asyncio.wait_for(self.reader.read(min(left, PIECE)), PATIENCE_SECONDS)
                if not piece:
                    raise asyncio.IncompleteReadError(b"", left)
                left -= len(piece)
                yield piece
            return
        while size := int(await asyncio.wait_for(self.reader.readuntil(b"\r\n"), PATIENCE_SECONDS), 16):
            yield (await asyncio.wait_for(self.reader.readexactly(size + 2), PATIENCE_SECONDS))[:-2]
        await self.reader.readexactly(2)

    async def body(self, head: Head) -> bytes:
        return b"".join([piece async for piece in self.pieces(head)])

    async def events(self, head: Head) -> AsyncIterator[str]:
        """The data of server-sent events; comments are left out."""
        rest = b""
        async for piece in self.pieces(head):
            *whole, rest = (rest + piece).split(b"\n\n")
            for each in whole:
                data = [line[5:].strip() for line in each.decode().split("\n") if line.startswith("data:")]
                if data:
                    yield "\n".join(data)
        if rest:
            raise asyncio.IncompleteReadError(rest, None)

    async def leave(self, *, abruptly: bool = False) -> None:
        """Close. `abruptly`: with a reset, whatever is under way."""
        if abruptly and not self.writer.is_closing():
            self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()
        await asyncio.sleep(0)  # it is closed in the loop's next round

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()


def request(method: str, path: str, body: Any = None, **headers: str) -> bytes:
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Host": "localhost", **({"Content-Type": "application/json"} if data else {}), "Content-Length": str(len(data))}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    return "\r\n".join([f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items()), "", ""]).encode() + data


@dataclass
class Outcome:
    """What became of a request. `kind`: answered, aborted, left, cut, hang, no answer, wrong, or the code of an error."""

    kind: str
    status: int = 0
    why: str = ""
    texts: dict[int, str] = field(default_factory=dict)  # by choice
    tokens: dict[int, list[int]] = field(default_factory=dict)  # the native route's
    ended: set[int] = field(default_factory=set)  # choices
    headers: Mapping[str, str] = field(default_factory=dict)
    streamed: bool = False

    @property
    def name(self) -> str:
        """For counting."""
        if self.kind in ("answered", "aborted", "left", "cut", "hang", "no answer", "wrong"):
            return self.kind
        return f"event {self.kind}" if self.streamed else f"{self.status} {self.kind}"


async def ask(url: str, path: str, body: Any, *, receive_buffer: int | None = None, seen: asyncio.Event | None = None) -> Outcome:
    """Ask and read all of the answer. `seen` is set with the first byte of its body, or its end."""
    try:
        async with await Connection.open(url, receive_buffer=receive_buffer) as connection:
            await connection.ask("POST", path, body)
            return await answer_of(connection, seen)
    except ConnectionRefusedError:
        return Outcome("no answer", why="nobody listens")
    except (OSError, asyncio.IncompleteReadError) as error:  # TimeoutError is an OSError, as of Python 3.11
        return Outcome("hang" if isinstance(error, TimeoutError) else "cut", why=repr(error))
    except asyncio.TimeoutError as error:
        return Outcome("hang", why=repr(error))
    finally:
        if seen is not None:
            seen.set()


async def answer_of(connection: Connection, seen: asyncio.Event | None = None) -> Outcome:
    """Read the next answer of a connection."""
    head = await connection.head()
    if head.headers.get("content-type", "").startswith("text/event-stream"):
        return await _streamed(connection, head, seen)
    return whole(head, await connection.body(head))


def whole(head: Head, body: bytes) -> Outcome:
    """The outcome of an answer in one piece."""
    outcome = Outcome("answered", head.status, headers=head.headers)
    if head.headers.get("content-type") == "application/octet-stream":
        return outcome
    try:
        value = json.loads(body, parse_constant=_refused)
    except ValueError as error:
        return Outcome("wrong", head.status, f"{error}: {body[:200]!r}")
    if head.status >= 400:
        return _error(outcome, value)
    _collect(outcome, value if isinstance(value, list) else [value])
    return outcome


async def _streamed(connection: Connection, head: Head, seen: asyncio.Event | None) -> Outcome:
    outcome = Outcome("answered", head.status, headers=head.headers, streamed=True)
    over = False
    async for data in connection.events(head):
        if seen is not None:
            seen.set()
        if over:
            return Outcome("wrong", head.status, f"said after the end: {data[:200]}")
        if data == "[DONE]":
            over = True
            continue
        value = json.loads(data, parse_constant=_refused)
        if "error" in value:
            over = True
            _error(outcome, value)
        else:
            _collect(outcome, [value])
    if not over or (outcome.kind == "answered" and not (outcome.texts and outcome.ended == outcome.texts.keys())):
        return Outcome("cut", head.status, "the stream has no last event, or a choice no end", streamed=True)
    return outcome


def _error(outcome: Outcome, value: Any) -> Outcome:
    """Check the error object: OpenAI's, or Anthropic's on its routes."""
    error = value.get("error") if isinstance(value, dict) else None
    has = {"message", "type"} if isinstance(value, dict) and value.get("type") == "error" else {"message", "type", "param", "code"}
    if not isinstance(error, dict) or not has <= error.keys() or not error["message"]:
        return Outcome("wrong", outcome.status, f"not the error object: {str(value)[:200]}")
    if outcome.status in (429, 503) and "retry-after" not in outcome.headers:
        return Outcome("wrong", outcome.status, "without Retry-After")
    outcome.kind, outcome.why = error.get("code") or error["type"], error["message"]
    return outcome


def _collect(outcome: Outcome, answers: list[Any]) -> None:
    """Take text, tokens and ends from an answer or a part of one: the native route's is cumulative, OpenAI's a difference."""
    for value in answers:
        for choice in value.get("choices", [value]):
            index = choice.get("index", 0) if "choices" in value else len(outcome.texts) if len(answers) > 1 else value.get("index", 0)
            if "choices" in value:
                said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
                outcome.texts[index] = outcome.texts.get(index, "") + (said.get("content") or "")
                reason = choice.get("finish_reason")
            else:
                outcome.texts[index] = choice.get("text", "")
                outcome.tokens[index] = choice.get("output_ids", [])
                finish = choice.get("meta_info", {}).get("finish_reason")
                reason = finish and finish["type"]
            if index in outcome.ended:
                outcome.kind, outcome.why = "wrong", f"choice {index} goes on after its end"
            if reason is not None:
                outcome.ended.add(index)
                outcome.kind = "aborted" if reason == "abort" else outcome.kind


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
