"""The logprobs of an answer's tokens with their texts, in the shape that OpenAI's chat and responses share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from sidestream.api.dialect import beside
from sidestream.api.shapes import finite
from sidestream.output import JSON_MINUS_INFINITY, Output


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: Sequence[int]


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: Sequence[int]
    top_logprobs: Sequence[TopLogprob]


async def token_logprobs(tokenizer: Any, output: Output) -> list[TokenLogprob]:
    """One entry per token; none where no logprobs were asked for."""
    logprobs = output.logprobs
    if logprobs is None:
        return []
    tokens = output.token_ids
    tops = logprobs.output_top if len(logprobs.output_top) else [()] * len(tokens)

    def write() -> list[TokenLogprob]:
        return [_entry(tokenizer, *each) for each in zip(tokens, logprobs.output, tops, strict=True)]

    return list(await beside(write, size=len(tokens) * (1 + len(tops[0])) if tokens else 0))


def _entry(tokenizer: Any, token: int, logprob: float, top: Sequence[tuple[float, int]]) -> TokenLogprob:
    tops = [TopLogprob(tokenizer.token_text(id), _number(value), list(tokenizer.token_bytes(id))) for value, id in top]
    return TokenLogprob(tokenizer.token_text(token), _number(logprob), list(tokenizer.token_bytes(token)), tops)


def _number(logprob: float) -> float:
    """The shape has no null."""
    number = finite(logprob)
    return JSON_MINUS_INFINITY if number is None else number
