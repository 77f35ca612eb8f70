"""What the routes share that speak another API and answer a conversation with one text: our own fields, before and after.

Those APIs have no place for hidden states, logprobs of the prompt, or logprobs at all. Ours is beside their text, under our names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from sidestream.api.fields import HiddenStatesFormat, LogprobsFormat, Shared
from sidestream.api.hidden import check_format, described, hidden_json, safetensors_response
from sidestream.api.service import Service
from sidestream.api.shapes import finite, flat_logprobs
from sidestream.api.sse import json_response
from sidestream.async_client import LONG_TEXT
from sidestream.errors import InvalidRequest
from sidestream.output import HiddenStates, Logprobs, Output

LARGE = 10_000  # numbers or texts of logprobs; more are written beside the event loop
TENSOR = "hidden_states"  # in a safetensors answer

_encode = msgspec.json.Encoder().encode

Ignored = Annotated[str, Meta(description="Accepted; changes nothing here.")] | None


class DialectBody(Shared, kw_only=True, forbid_unknown_fields=True):
    """The fields that the other API does not have. Sampling and outputs may come under our names, too."""

    model: Annotated[str, Meta(description="A name that /v1/models lists; none is this server's model.")] | None = None
    stream: Annotated[bool, Meta(description="Answer with server-sent events as the text grows.")] | None = None
    n: Annotated[int, Meta(ge=1, le=1, description="These answers have one text.")] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="Variables for the chat template.")] | None = None
    hidden_states_format: (
        Annotated[HiddenStatesFormat, Meta(description="How hidden states are written; safetensors is the whole answer as one body.")]
        | None
    ) = None
    logprobs_format: (
        Annotated[LogprobsFormat, Meta(description="Logprobs as lists, or flat: as base64 of little endian arrays.")] | None
    ) = None


class Extras(msgspec.Struct, kw_only=True):
    """What we have besides the text; in a stream, beside each piece of it, only what is new."""

    token_logprobs: (
        Annotated[dict[str, Any], Meta(description="Each list of logprobs that was asked for, as docs/outputs.md names them.")] | UnsetType
    ) = UNSET
    hidden_states: Annotated[Any, Meta(description="In the form that hidden_states_format says.")] | UnsetType = UNSET

    def __bool__(self) -> bool:
        return self.token_logprobs is not UNSET or self.hidden_states is not UNSET


class Wanted(msgspec.Struct, frozen=True):
    """How a request wants its outputs written."""

    hidden_states_format: HiddenStatesFormat
    hidden_states_start: int
    flat: bool

    @classmethod
    def of(cls, body: DialectBody, outputs: Mapping[str, Any]) -> Wanted:
        """Raises InvalidRequest."""
        form = check_format(body.hidden_states_format, wanted=outputs.get("return_hidden_states"), streamed=bool(body.stream))
        return cls(form, outputs.get("hidden_states_start", 0), body.logprobs_format == "flat")

    async def extras(self, output: Output, *, logprobs: bool, streamed: bool = False) -> Extras:
        """Of an output or a part of one. Without `logprobs` they have a place of their own in the answer."""
        extras = Extras()
        if logprobs and output.logprobs is not None:
            extras.token_logprobs = await self._logprobs(output.logprobs)
        states = output.hidden_states
        if states is not None and self.hidden_states_format == "safetensors":
            extras.hidden_states = {"tensor": TENSOR, **described(states)}
        elif states is not None and not (streamed and not states.positions):
            extras.hidden_states = await hidden_json(output, self.hidden_states_format, start=self.hidden_states_start, streamed=streamed)
        return extras

    async def _logprobs(self, logprobs: Logprobs) -> Any:
        write = _flat if self.flat else _lists
        return await beside(write, logprobs, size=sum(_numbers(entries) for entries in vars(logprobs).values()))

    def response(self, answer: msgspec.Struct, states: HiddenStates | None) -> Any:
        """The HTTP answer; `states` are what `extras` left out of it."""
        if states is not None and self.hidden_states_format == "safetensors":
            return safetensors_response(answer, {TENSOR: states})
        return json_response(answer)


async def beside(work: Any, *arguments: Any, size: int) -> Any:
    """The result of `work`, in another thread if it is so large that others would wait for it."""
    return await asyncio.to_thread(work, *arguments) if size > LARGE else work(*arguments)


def by_our_names(body: msgspec.Struct, names: Mapping[str, str]) -> dict[str, Any]:
    """The values that came under the other API's names, by our own. Raises InvalidRequest for one that came under both."""
    values = {}
    for theirs, ours in names.items():
        value = getattr(body, theirs)
        if value is not None and getattr(body, ours) is not None:
            raise InvalidRequest(ours, f"must be left out where {theirs} is given: they are the same")
        values[ours] = value
    return values


async def encode_conversation(service: Service, messages: Sequence[Mapping[str, Any]], param: str, **template: Any) -> list[int]:
    """Token ids of a conversation; a long one is tokenized beside the event loop. Raises InvalidRequest about `param`."""
    engine = service.engine
    size = sum(len(part["text"]) for message in messages for part in message["content"])
    try:
        if size > LONG_TEXT:
            return await asyncio.to_thread(engine.encode_chat, messages, **template)
        return engine.encode_chat(messages, **template)
    except InvalidRequest as error:
        if error.param in ("messages", "prompt"):
            raise InvalidRequest(param, error.said, hint=error.hint) from None
        raise


def parts_of(content: str | list[Any]) -> list[dict[str, str]]:
    """A message's content as the chat template takes it."""
    texts: list[str] = [content] if isinstance(content, str) else [part.text for part in content]
    return [{"type": "text", "text": text} for text in texts]


def _lists(logprobs: Logprobs) -> dict[str, Any]:
    """Row by row: a thread that writes many of them lets others run between two."""
    answer: dict[str, Any] = {}
    for name, entries in vars(logprobs).items():
        if len(entries):
            answer[name] = msgspec.Raw(b"[%b]" % b",".join(_encode(_entry(entry)) for entry in entries))
    return answer


def _entry(entry: Any) -> Any:
    return finite(entry) if entry is None or isinstance(entry, float) else [(finite(value), token) for value, token in entry]


def _flat(logprobs: Logprobs) -> dict[str, Any]:
    return flat_logprobs(logprobs)


def _numbers(entries: Sequence[Any]) -> int:
    return len(entries) * max(1, next((len(entry) for entry in reversed(entries) if isinstance(entry, (list, tuple, np.ndarray))), 1))
