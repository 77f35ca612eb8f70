"""The numbers of a run against a server, for people and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sidestream.bench.answer import Answer
from sidestream.bench.load import CONCURRENCY
from sidestream.bench.serve import Run
from sidestream.bench.spread import short
from sidestream.options import fields_of

HEAD = ("ms", "mean", "p50", "p90", "p99")
BUSY, LATE = 0.7, 0.01  # share of a core, and seconds, from which the client is named as a suspect
LATENCIES = {
    "ttft": "to the first token",
    "itl": "between chunks",
    "tpot": "per output token after the first",
    "e2e": "to the end",
}


class Latency(NamedTuple):
    """Seconds: the mean and percentiles."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency | None:
        return cls(float(np.mean(seconds)), *map(float, np.percentile(seconds, [50, 90, 99]))) if seconds else None


class Summary:
    """What a run comes to. Tokens and latencies are those of requests that were answered; the others are counted by kind."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.ok = [answer for answer in run.answers if answer.failure is None]
        self.failures = Counter(answer.failure.kind for answer in run.answers if answer.failure is not None)
        self.messages = {answer.failure.kind: answer.failure.message for answer in reversed(run.answers) if answer.failure is not None}
        self.output_tokens = sum(answer.completion_tokens for answer in self.ok)
        self.received = sum(answer.received for answer in run.answers)
        self.input_tokens = _sum(answer.prompt_tokens for answer in self.ok)
        self.cached_tokens = _sum(answer.cached_tokens for answer in self.ok)
        self.latencies = {
            "ttft": Latency.of([answer.ttft for answer in self.ok if answer.ttft is not None]),
            "itl": Latency.of([gap for answer in self.ok for gap in answer.gaps]),
            "tpot": Latency.of([answer.tpot for answer in self.ok if answer.tpot is not None]),
            "e2e": Latency.of([answer.e2e for answer in self.ok]),
        }

    @property
    def counts(self) -> str:
        """Where the numbers of tokens come from: the usage of each `chunk`, the usage at the `end`, or `none`."""
        if self.ok and all(answer.counted for answer in self.ok):
            return "chunk"
        return "end" if self.input_tokens is not None else "none"

    @property
    def tokens_per_chunk(self) -> tuple[float, float] | None:
        """Mean and most. The most is that of answers' means where the server counts at the end only."""
        tokens = [arrival.tokens for answer in self.ok for arrival in answer.arrivals]
        return (sum(tokens) / len(tokens), max(tokens)) if tokens else None

    @property
    def processor_share(self) -> float:
        return self.run.client.processor_seconds / self.run.seconds

    @property
    def delay(self) -> float:
        """Seconds: p99 of how late the client came to what was waiting."""
        return float(np.percentile(self.run.client.delays, 99)) if self.run.client.delays else 0.0

    def per_second(self, count: int | None) -> float | None:
        return None if count is None else count / self.run.seconds

    def as_json(self) -> dict[str, Any]:
        load, chunk = self.run.load, self.tokens_per_chunk
        return {
            "load": {field.name: getattr(load, field.name) for field in fields_of(type(load)) if field.name != "api_key"},
            "model": self.run.model,
            "requests": len(self.run.answers),
            "ok": len(self.ok),
            "failed": sum(self.failures.values()),
            "failures": [{"kind": kind, "count": count, "message": self.messages[kind]} for kind, count in self.failures.most_common()],
            "seconds": self.run.seconds,
            "requests_per_second": self.per_second(len(self.ok)),
            "input_tokens": self.input_tokens,
            "input_tokens_per_second": self.per_second(self.input_tokens),
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "output_tokens_per_second": self.per_second(self.output_tokens),
            "received_bytes": self.received,
            "token_counts": self.counts,
            "tokens_per_chunk": None if chunk is None else {"mean": chunk[0], "most": chunk[1]},
            **{f"{name}_seconds": None if of is None else of._asdict() for name, of in self.latencies.items()},
            "client": {"processor_share": self.processor_share, "delay_p99_seconds": self.delay},
            "answers": [_answer(answer) for answer in self.run.answers],
        }

    def head(self) -> list[str]:
        """Lines that stand above the table: what was sent and what came of it."""
        load = self.run.load
        pace = f"{load.request_rate:g} a second" if load.request_rate else f"{load.concurrency or CONCURRENCY} at once"
        sent = f"prompts of {load.prompts}" if load.prompts else f"{load.input_len:,} + {load.output_len:,} tokens"
        shared = f", {load.shared_prefix:,} shared" if load.shared_prefix and not load.prompts else ""
        failed = sum(self.failures.values())
        cached = f" ({self.cached_tokens:,} cached)" if self.cached_tokens else ""
        return [
            f"{load.base}{load.path} · {self.run.model} · {len(self.run.answers):,} requests, {pace} · {sent}{shared}",
            "",
            f"requests  {len(self.ok):,} answered, {failed:,} failed in {short(self.run.seconds)} s"
            f"    {short(len(self.ok) / self.run.seconds)} request/s",
            f"input     {_tokens(self.input_tokens)}{cached}    {_rate(self.per_second(self.input_tokens))}",
            f"output    {_tokens(self.output_tokens)}    {_rate(self.per_second(self.output_tokens))}",
            f"received  {short(self.received / 1e6)} MB    {short(self.received / 1e6 / self.run.seconds)} MB/s",
        ]

    def rows(self) -> list[tuple[str, ...]]:
        rows = []
        for name, meaning in LATENCIES.items():
            of = self.latencies[name]
            cells = ("-",) * 4 if of is None else tuple(short(seconds * 1e3) for seconds in of)
            rows.append((f"{name.upper() if name != 'e2e' else name} {meaning}", *cells))
        return rows

    def notes(self) -> list[str]:
        """What has to be known to read the numbers; failures first."""
        notes = [f"failed: {count:,} x {kind}: {self.messages[kind]}" for kind, count in self.failures.most_common()]
        load, chunk = self.run.load, self.tokens_per_chunk
        if self.ok and self.counts == "none":
            notes.append("The server tells no usage: a chunk counts as one token.")
        elif chunk is not None and chunk[1] > 1.05:
            most = f", {chunk[1]:g} at most" if self.counts == "chunk" else ""
            notes.append(f"A chunk brings {chunk[0]:.2f} tokens on average{most}: ITL is the time between chunks, TPOT that of a token.")
        if load.ignore_eos and not load.prompts and (other := sum(answer.completion_tokens != load.output_len for answer in self.ok)):
            notes.append(f"{other:,} answers have not the {load.output_len:,} tokens of --output-len, in spite of --ignore-eos.")
        if (self.processor_share > BUSY and self.run.seconds > 1) or self.delay > LATE:
            notes.append(
                f"The client took {self.processor_share:.0%} of a core and came up to {self.delay * 1e3:.0f} ms late (p99) to what had "
                "arrived: it, or the machine it runs on, is too busy, and latencies may be too long by that."
            )
        return notes


def _sum(numbers: Iterable[int | None]) -> int | None:
    """None where one is not known."""
    known = list(numbers)
    return None if not known or None in known else sum(number for number in known if number is not None)


def _tokens(count: int | None) -> str:
    return "unknown" if count is None else f"{count:,} tokens"


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{short(rate)} tok/s"


def _answer(answer: Answer) -> dict[str, Any]:
    return {
        "sent": answer.sent,
        "ttft_seconds": answer.ttft,
        "tpot_seconds": answer.tpot,
        "e2e_seconds": answer.e2e,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "completion_tokens": answer.completion_tokens,
        "finish_reason": answer.finish_reason,
        "failure": None if answer.failure is None else answer.failure.kind,
    }
