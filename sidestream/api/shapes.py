"""Parts of answers that several routes have: usage, the reason of an end, compact logprobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from sidestream.api.hidden import flat
from sidestream.output import JSON_MINUS_INFINITY, Logprobs, Output

Array = np.ndarray[Any, Any]


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


def usage_of(outputs: Sequence[Output], reasoning_tokens: Mapping[int, int] | None = None) -> Usage:
    """Of all choices of all prompts; in a stream, of the latest part of each. `reasoning_tokens` are those of each choice."""
    prompts = {output.rid: output for output in outputs}
    prompt = sum(output.prompt_tokens for output in prompts.values())
    completion = sum(output.completion_tokens for output in outputs)
    reasoning = sum((reasoning_tokens or {}).values())
    cached = sum(output.cached_tokens for output in prompts.values())
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached), CompletionTokensDetails(reasoning))


def finite(logprob: float | None) -> float | None:
    """JSON has no infinity, and no NaN."""
    if logprob is None or logprob != logprob:
        return None
    return JSON_MINUS_INFINITY if logprob == float("-inf") else logprob


def flat_logprobs(logprobs: Logprobs) -> dict[str, Any]:
    """The compact form: `logprobs_format="flat"`. Each list that was asked for is base64 of little endian arrays with its shape.

    Minus infinity and NaN are themselves; position 0 of the prompt, which has no logprob, is NaN, and its ids are -1.
    """
    lists = FlatLogprobs()
    lists.add(logprobs)
    return lists.written()


class FlatLogprobs:
    """The compact form of logprobs that come in parts."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[tuple[Array, Array | None]]] = {}  # by list: values, and their ids where there are several each

    def add(self, logprobs: Logprobs) -> None:
        for name in ("input", "output"):
            values = getattr(logprobs, name)
            if len(values):
                self._pieces.setdefault(name, []).append((np.array([_nan(value) for value in values], np.float32), None))
            for kind in ("top", "ids"):
                rows = getattr(logprobs, f"{name}_{kind}")
                if len(rows):
                    self._pieces.setdefault(f"{name}_{kind}", []).append(_arrays(rows))

    def clear(self) -> None:
        self._pieces = {}

    def written(self) -> dict[str, Any]:
        return {name: _written(pieces) for name, pieces in self._pieces.items()}


def _arrays(rows: Sequence[Sequence[tuple[float, int]] | None]) -> tuple[Array, Array]:
    width = max((len(row) for row in rows if row is not None), default=0)
    values, ids = np.full((len(rows), width), np.nan, np.float32), np.full((len(rows), width), -1, np.int32)
    for place, row in enumerate(rows):
        if row:
            values[place], ids[place] = [value for value, _ in row], [token for _, token in row]
    return values, ids


def _written(pieces: Sequence[tuple[Array, Array | None]]) -> dict[str, Any]:
    values = np.concatenate([each for each, _ in pieces])
    ids = [each for _, each in pieces if each is not None]
    if not ids:
        return {"dtype": "float32", "shape": list(values.shape), "data": flat(values, "float32")}
    return {"shape": list(values.shape), "logprobs": flat(values, "float32"), "token_ids": flat(np.concatenate(ids), "int32")}


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value
