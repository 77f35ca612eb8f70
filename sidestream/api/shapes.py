"""Parts of answers that several routes have: usage, the reason of an end, compact logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from sidestream.api.hidden import flat
from sidestream.output import JSON_MINUS_INFINITY, Logprobs, Output


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    """Tokens of a request; the prompt's count once for all its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage_of(outputs: Sequence[Output]) -> Usage:
    """Of all choices of all prompts; in a stream, of the latest part of each."""
    prompts = {output.rid: output for output in outputs}
    prompt = sum(output.prompt_tokens for output in prompts.values())
    completion = sum(output.completion_tokens for output in outputs)
    cached = sum(output.cached_tokens for output in prompts.values())
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached), CompletionTokensDetails())


def finite(logprob: float | None) -> float | None:
    """JSON has no infinity, and no NaN."""
    if logprob is None or logprob != logprob:
        return None
    return JSON_MINUS_INFINITY if logprob == float("-inf") else logprob


def flat_logprobs(logprobs: Logprobs) -> dict[str, Any]:
    """The compact form: `logprobs_format="flat"`. Each list that was asked for is base64 of little endian arrays with its shape.

    Minus infinity and NaN are themselves; position 0 of the prompt, which has no logprob, is NaN, and its ids are -1.
    """
    answer: dict[str, Any] = {}
    for name in ("input", "output"):
        values = getattr(logprobs, name)
        if len(values):
            answer[name] = {"dtype": "float32", "shape": [len(values)], "data": flat([_nan(value) for value in values], "float32")}
        for kind in ("top", "ids"):
            rows = getattr(logprobs, f"{name}_{kind}")
            if len(rows):
                answer[f"{name}_{kind}"] = _flat_rows(rows)
    return answer


def _flat_rows(rows: Sequence[Sequence[tuple[float, int]] | None]) -> dict[str, Any]:
    width = max((len(row) for row in rows if row is not None), default=0)
    values, ids = np.full((len(rows), width), np.nan, np.float32), np.full((len(rows), width), -1, np.int32)
    for place, row in enumerate(rows):
        if row:
            values[place], ids[place] = [value for value, _ in row], [token for _, token in row]
    return {"shape": [len(rows), width], "logprobs": flat(values, "float32"), "token_ids": flat(ids, "int32")}


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value
