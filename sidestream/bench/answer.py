"""One streamed answer: the events that come, when, and how many tokens they bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

MAX_MESSAGE = 300  # characters that are kept of a server's words


class Failure(NamedTuple):
    """Why a request has no answer: a kind to count by, and the words of the first of that kind."""

    kind: str
    message: str


class Arrival(NamedTuple):
    """A chunk with text or tokens: seconds since the run began, and its tokens; a fraction where only the sum is known."""

    at: float
    tokens: float


@dataclass(frozen=True)
class Answer:
    """What became of one request. Times are seconds since the run began."""

    sent: float
    ended: float
    arrivals: Sequence[Arrival] = ()
    counted: bool = False  # the server told how many tokens each chunk brings
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int = 0
    finish_reason: str | None = None
    received: int = 0  # bytes of the body
    failure: Failure | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return self.arrivals[0].at - self.sent if self.arrivals else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between one chunk and the next: what a reader sees, whatever a chunk holds."""
        return [later.at - earlier.at for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after those of the first chunk; None without such."""
        rest = self.completion_tokens - (max(1.0, self.arrivals[0].tokens) if self.arrivals else 0)
        return (self.arrivals[-1].at - self.arrivals[0].at) / rest if self.arrivals and rest > 0 else None

    @property
    def e2e(self) -> float:
        """Seconds to the end of the stream."""
        return self.ended - self.sent


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    """One event; what is not needed is not read."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


read_chunk = msgspec.json.Decoder(Chunk).decode


class Piece(NamedTuple):
    """A chunk as it came: whether it has text, and the tokens so far where it tells."""

    at: float
    has_text: bool
    tokens_so_far: int | None


class Reader:
    """Collects the events of one answer. `feed` raises msgspec.DecodeError for an event that is no chunk."""

    def __init__(self, sent: float) -> None:
        self.sent = sent
        self.pieces: list[Piece] = []
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.failure: Failure | None = None
        self.is_done = False
        self.received = 0
        self._rest: list[bytes] = []  # of an event that is not complete; joined once, for it may be many megabytes

    def feed(self, data: bytes, now: float) -> None:
        """Bytes as they come; an event may be cut anywhere. Comments and other fields of event streams say nothing here."""
        self.received += len(data)
        end = data.rfind(b"\n")
        if end < 0:
            self._rest.append(data)
            return
        lines = b"".join([*self._rest, data[:end]]).split(b"\n")
        self._rest = [data[end + 1 :]]
        for line in lines:
            if line.startswith(b"data:"):
                event = line[5:].strip()
                if event == b"[DONE]":
                    self.is_done = True
                else:
                    self._take(read_chunk(event), now)

    def _take(self, chunk: Chunk, now: float) -> None:
        if chunk.error is not None:
            self.failure = self.failure or Failure(f"error in the stream{_code(chunk.error)}", _message(chunk.error))
            return
        so_far = self.usage.completion_tokens if self.usage else 0
        if chunk.usage is not None:
            self.usage = chunk.usage
        if not chunk.choices:  # the usage that ends a stream
            return
        choice = chunk.choices[0]
        has_text = bool(choice.text or choice.delta)
        if has_text or (chunk.usage is not None and chunk.usage.completion_tokens > so_far):
            self.pieces.append(Piece(now, has_text, chunk.usage.completion_tokens if chunk.usage is not None else None))
        self.finish_reason = choice.finish_reason or self.finish_reason

    def answer(self, ended: float) -> Answer:
        """What has come. A stream that ends without [DONE] and without a finish_reason was cut; one without tokens is no answer."""
        counted = bool(self.pieces) and all(piece.tokens_so_far is not None for piece in self.pieces)
        arrivals = self._arrivals(counted)
        failure = self.failure
        if failure is None and not self.is_done and self.finish_reason is None:
            failure = Failure("stream cut short", f"it ended after {len(arrivals)} chunks without a finish_reason")
        if failure is None and not arrivals:
            failure = Failure("empty answer", f"no text came; finish_reason {self.finish_reason}")
        details = self.usage.prompt_tokens_details if self.usage else None
        return Answer(
            sent=self.sent,
            ended=ended,
            arrivals=arrivals,
            counted=counted,
            prompt_tokens=self.usage.prompt_tokens if self.usage else None,
            cached_tokens=details.cached_tokens if details else None,
            completion_tokens=self.usage.completion_tokens if self.usage else len(arrivals),
            finish_reason=self.finish_reason,
            received=self.received,
            failure=failure,
        )

    def _arrivals(self, counted: bool) -> list[Arrival]:
        if counted:
            totals = [piece.tokens_so_far or 0 for piece in self.pieces]
            return [
                Arrival(piece.at, max(0, total - before)) for piece, total, before in zip(self.pieces, totals, [0, *totals], strict=False)
            ]
        texts = [piece for piece in self.pieces if piece.has_text]
        each = self.usage.completion_tokens / len(texts) if self.usage and texts else 1.0
        return [Arrival(piece.at, each) for piece in texts]


def refusal(status: int, body: bytes) -> Failure:
    """The failure of an answer whose status is not 200: the status and the code tell kinds apart."""
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        answer = body.decode(errors="replace")
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return Failure(f"HTTP {status}{_code(error)}", _message(error))


def _code(error: Any) -> str:
    code = error.get("code") if isinstance(error, dict) else None
    return f" {code}" if isinstance(code, str) else ""


def _message(error: Any) -> str:
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:MAX_MESSAGE]
