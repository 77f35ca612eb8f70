"""`meta_info`: what the native route says beside the text, as SGLang's clients read it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from sidestream.api.shapes import FlatLogprobs, finite
from sidestream.output import Logprobs, Output

SLICE_ENTRIES = 4096  # of logprobs encoded at a time: a few milliseconds

Pairs = Sequence[tuple[float, int]]
TextOf = Callable[[int], str | None]
Entries = Annotated[Raw, Meta(description="For each token [logprob, token id, text or null]; the prompt's first token has no logprob.")]
Alternatives = Annotated[Raw, Meta(description="For each token a list of [logprob, token id, text or null], best first.")]
Asked = Annotated[Raw, Meta(description="For each token a list of [logprob, token id, text or null], as token_ids_logprob names them.")]

Flat = Annotated[dict[str, Any], Meta(description='With logprobs_format "flat", in place of the lists: arrays in base64.')]
Rows = Annotated[Any, Meta(description="As hidden_states_format says; in a stream only rows that were not sent before.")]
CopiedBytes = Annotated[dict[str, int], Meta(description="That went from the device to the host for this answer, by kind.")]

_encode = msgspec.json.Encoder().encode


class FinishReason(msgspec.Struct, kw_only=True):
    type: Literal["stop", "length", "abort"]
    matched: int | str | UnsetType = UNSET  # the stop string, or the token
    length: int | UnsetType = UNSET  # tokens produced
    message: str | UnsetType = UNSET


class MetaInfo(msgspec.Struct, kw_only=True):
    """What was not asked for, or comes with the last part of a stream, is left out."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    e2e_latency: float | UnsetType = UNSET
    logprob_start_len: int | UnsetType = UNSET
    input_token_logprobs: Entries | UnsetType = UNSET
    output_token_logprobs: Entries | UnsetType = UNSET
    input_top_logprobs: Alternatives | UnsetType = UNSET
    output_top_logprobs: Alternatives | UnsetType = UNSET
    input_token_ids_logprobs: Asked | UnsetType = UNSET
    output_token_ids_logprobs: Asked | UnsetType = UNSET
    logprobs: Flat | UnsetType = UNSET
    hidden_states: Rows | UnsetType = UNSET
    copied_bytes: CopiedBytes | UnsetType = UNSET


def finish_reason(output: Output) -> FinishReason | None:
    reason = output.finish_reason
    if reason == "stop":
        return FinishReason(type="stop", matched=UNSET if output.matched_stop is None else output.matched_stop)
    if reason == "length":
        return FinishReason(type="length", length=output.completion_tokens)
    if reason is None:
        return None
    return FinishReason(type="abort", message=f"the request was aborted after {output.completion_tokens} tokens")


class LogprobLists:
    """The lists of one choice, which grow: each entry is encoded once, however often a stream repeats it."""

    def __init__(self, prompt: Sequence[int], start: int, text_of: TextOf) -> None:
        self._prompt = prompt
        self._position = max(start, 0)  # of the next entry of the prompt
        self._text_of = text_of
        self._json: dict[str, bytearray] = {"input_token_logprobs": bytearray(), "output_token_logprobs": bytearray()}

    async def add(self, logprobs: Logprobs, tokens: Sequence[int]) -> None:
        """What a part brought; `tokens` are its output tokens."""
        inputs = self._prompt[self._position : self._position + len(logprobs.input)]
        self._position += len(inputs)
        for side, values, ids in (("input", logprobs.input, inputs), ("output", logprobs.output, tokens)):
            entries = ([finite(value), token, self._text_of(token)] for value, token in zip(values, ids, strict=True))
            await self._extend(f"{side}_token_logprobs", entries, 1)
        top, asked = (logprobs.input_top, logprobs.output_top), (logprobs.input_ids, logprobs.output_ids)
        for name, both in (("top", top), ("token_ids", asked)):
            if any(map(len, both)):
                for side, rows in zip(("input", "output"), both, strict=True):
                    await self._extend(f"{side}_{name}_logprobs", map(self._row, rows), _width(rows))

    def _row(self, row: Pairs | None) -> list[Any] | None:
        return None if row is None else [[finite(value), token, self._text_of(token)] for value, token in row]

    async def _extend(self, name: str, entries: Iterable[Any], width: int) -> None:
        data, left, count = self._json.setdefault(name, bytearray()), iter(entries), max(1, SLICE_ENTRIES // width)
        while piece := list(islice(left, count)):
            data += b"," if data else b""
            data += _encode(piece)[1:-1]
            if len(piece) == count:
                await asyncio.sleep(0)

    def clear(self) -> None:
        """What was written is not written again."""
        for data in self._json.values():
            data.clear()

    def written(self) -> dict[str, Raw]:
        return {name: Raw(b"[%b]" % bytes(data)) for name, data in self._json.items()}


class FlatLists:
    """The compact form of the same."""

    def __init__(self) -> None:
        self._lists = FlatLogprobs()

    async def add(self, logprobs: Logprobs, tokens: Sequence[int]) -> None:
        tops = (logprobs.input_top, logprobs.input_ids)
        if len(logprobs.input) + sum(len(rows) * _width(rows) for rows in tops) > SLICE_ENTRIES:
            await asyncio.to_thread(self._lists.add, logprobs)
        else:
            self._lists.add(logprobs)

    def clear(self) -> None:
        self._lists.clear()

    def written(self) -> dict[str, Any]:
        return {"logprobs": self._lists.written()}


def _width(rows: Sequence[Pairs | None]) -> int:
    """Pairs of a row; the first one may be empty."""
    return max(1, len(rows[-1] or ())) if len(rows) else 1
