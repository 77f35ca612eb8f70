"""What the routes share that speak another API and answer a conversation with one text: our own fields, before and after.

Those APIs have no place for hidden states, logprobs of the prompt, or logprobs at all. Ours stand beside their text.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta
from starlette.responses import Response

from sidestream.api.chat import size_of
from sidestream.api.dialogue import Dialogue, Piece
from sidestream.api.fields import HiddenStatesFormat, LogprobsFormat, Shared, called, params_of
from sidestream.api.generation import Generation
from sidestream.api.hidden import Packed, check_format, hidden_json, safetensors_response
from sidestream.api.logprobs import ChatLogprobs, Entries, TokenTexts, chat_logprobs
from sidestream.api.openai import MAX_RID, Asked, check_room, one_of
from sidestream.api.route import Call
from sidestream.api.shapes import flat_logprobs
from sidestream.api.sse import json_response
from sidestream.api.structured import check_alone
from sidestream.async_client import LONG_TEXT, AsyncEngine
from sidestream.errors import InvalidRequest
from sidestream.options import shown
from sidestream.output import Output
from sidestream.params import OutputParams

TENSOR = "hidden_states"  # in a safetensors answer

Ignored = Annotated[str, Meta(description="Accepted; changes nothing here.")] | None
Model = Annotated[str, Meta(description="A name that /v1/models lists; none is this server's model.")]
TemplateVariables = Annotated[dict[str, Any], Meta(description="Variables for the chat template.")]


class DialectBody(Shared, kw_only=True, forbid_unknown_fields=True):
    """The fields that the other API does not have. Sampling and outputs may come under our names, too."""

    model: Model | None = None
    stream: Annotated[bool, Meta(description="Answer with server-sent events as the text grows.")] | None = None
    n: Annotated[int, Meta(ge=1, le=1, description="An answer of this API has one text.")] | None = None
    rid: Annotated[str, Meta(min_length=1, max_length=MAX_RID, description="Id of the answer, and for /abort_request.")] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    hidden_states_format: (
        Annotated[HiddenStatesFormat, Meta(description="How hidden states are written; safetensors makes the whole answer one body.")]
        | None
    ) = None
    logprobs_format: Annotated[LogprobsFormat, Meta(description="OpenAI's objects, or base64 arrays.")] | None = None


def asked_for(
    body: DialectBody,
    synonyms: Mapping[str, str],
    *,
    context: int,
    logprobs: bool = False,
    more: tuple[Mapping[str, Any], Mapping[str, str]] = ({}, {}),
) -> Asked:
    """`synonyms` are the other API's names of our fields, by ours; `logprobs` says whether it asks for them; `more` are values of our
    fields that it has elsewhere, and where. Raises InvalidRequest.
    """
    values, places = more
    check_alone(body, places)
    for ours, value in values.items():
        if getattr(body, ours) not in (None, value):
            raise InvalidRequest(ours, f"got {shown(getattr(body, ours))} beside {places[ours]}={shown(value)}, must be the same")
    found = {ours: one_of(body, theirs, ours) for ours, theirs in synonyms.items()}
    names = {ours: name for ours, (name, _) in found.items()} | dict(places)
    renamed = {ours: value for ours, (_, value) in found.items()}
    most = renamed["max_new_tokens"]
    renamed["max_new_tokens"] = context if most is None else min(most, context)  # the context bounds it too
    renamed |= {"return_logprob": logprobs or None, **values}
    with called(names):
        sampling, outputs = params_of(body, renamed)
    if "hidden_states_start" in outputs:  # there is no row so late: any such number gives none
        outputs["hidden_states_start"] = min(outputs["hidden_states_start"], context)
    return_logprob = OutputParams(**outputs).return_logprob
    if body.logprobs_format == "flat" and not return_logprob:
        raise InvalidRequest("logprobs_format", "got 'flat', must be left out without logprobs")
    form = check_format(body.hidden_states_format, wanted=outputs.get("return_hidden_states"), streamed=bool(body.stream))
    return Asked(sampling, outputs, names, most is None, return_logprob, body.logprobs_format == "flat", form)


class Exchange:
    """One request on its way to the answer. Raises InvalidRequest, ModelError and Unavailable."""

    def __init__(self, call: Call[Any], dialogue: Dialogue, ids: list[int], asked: Asked, *, param: str, prefix: str, calls: str) -> None:
        """`prefix` is what the id of the answer begins with, `calls` those of its calls."""
        body: DialectBody = call.body
        engine = call.service.engine
        check_room(param, len(ids), asked, engine.context_length)
        asked, reading = dialogue.begin(asked, ids, id_prefix=calls)
        self.asked = asked
        self.reader = reading.reader()
        self.model = call.service.check_model(body.model)
        self.id = body.rid or f"{prefix}_{secrets.token_hex(12)}"
        self.request_id = call.id
        self._ids = ids
        self._texts = TokenTexts(engine.tokenizer)
        self._packed = Packed({})
        self._sent_rows = False
        self._generation = Generation(call, [ids], asked.sampling, asked.outputs, rid=self.id, operation="chat")

    async def answer(self) -> Piece:
        with called(self.asked.names):
            (output,) = await self._generation.answers()
        piece = await self.reader.read(output)
        assert piece is not None, "it is the last part, too"
        return piece

    async def open(self) -> None:
        """Queue the request; what is wrong with it is raised here, not by `parts`."""
        with called(self.asked.names):
            await self._generation.open()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        async with aclosing(self._generation.parts()) as parts:
            async for _, part in parts:
                piece = await self.reader.read(part)
                if piece is not None:
                    yield piece

    async def logprobs(self, output: Output) -> ChatLogprobs | dict[str, Any] | None:
        """Of an answer or a part of one, as chat completions have them, or in the compact form."""
        logprobs = output.logprobs
        if logprobs is None:
            return None
        if self.asked.flat_logprobs:
            return flat_logprobs(logprobs)
        return await chat_logprobs(self._texts, Entries.of_output(logprobs, output.token_ids), Entries.of_prompt(logprobs, self._ids))

    async def hidden_states(self, output: Output, *, streamed: bool) -> Any:
        """Those of an answer, or those that a part brings; UNSET for none."""
        states = output.hidden_states
        if states is None or (streamed and not states.shape[0] and (self._sent_rows or output.finish_reason is None)):
            return UNSET
        if self.asked.hidden_format == "safetensors":
            return self._packed.add(TENSOR, states)
        later, self._sent_rows = self._sent_rows, True  # only what comes first begins with the prompt's rows: the lists join to the whole
        start = self.asked.outputs.get("hidden_states_start", 0)
        return await hidden_json(output, self.asked.hidden_format, start=start, streamed=later)

    def respond(self, answer: msgspec.Struct) -> Response:
        return safetensors_response(answer, self._packed.tensors) if self._packed.tensors else json_response(answer)


async def encode_conversation(
    engine: AsyncEngine, messages: Sequence[Mapping[str, Any]], param: str, variables: Mapping[str, Any], **template: Any
) -> list[int]:
    """Token ids of a conversation; a long one is tokenized beside the event loop. `variables` are those of the template.

    Raises InvalidRequest about `param`.
    """

    def encode() -> list[int]:
        return engine.encode_chat(messages, **variables, **template)

    try:
        return await asyncio.to_thread(encode) if size_of(messages, variables) > LONG_TEXT else encode()
    except RecursionError:
        raise InvalidRequest("body", "must be a JSON object: it is nested too deeply") from None
    except InvalidRequest as error:
        if error.param in ("messages", "prompt"):
            raise InvalidRequest(param, error.said, hint=error.hint) from None
        raise


def text_parts(text: str | None) -> list[dict[str, str]]:
    """A message's content as the chat template takes it."""
    return [] if text is None else [{"type": "text", "text": text}]


def assistant(content: list[dict[str, str]], calls: list[dict[str, Any]], reasoning: str) -> dict[str, Any]:
    """An assistant's message as chat templates know it: reasoning under both of its names."""
    called = {"tool_calls": calls} if calls else {}
    reasoned = {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}
    return {"role": "assistant", "content": content, **called, **reasoned}


def call_of(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call of a tool, in an assistant's message."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_result(id: str, content: list[dict[str, str]]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}
