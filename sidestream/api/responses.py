"""`POST /v1/responses`: what OpenAI's Responses API is without state. What this server does not do is refused by name."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import count
from typing import Any, cast

import msgspec
from msgspec import UNSET
from msgspec.structs import replace
from starlette.responses import Response as HTTPResponse

from sidestream.api import response_shapes as shapes
from sidestream.api.chat import checked_variables
from sidestream.api.dialect import Exchange, asked_for, encode_conversation
from sidestream.api.dialogue import Dialogue
from sidestream.api.errors import described
from sidestream.api.logprobs import ChatLogprobs
from sidestream.api.response_items import NO_ENTRIES, Items, Send
from sidestream.api.response_shapes import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseUsage,
)
from sidestream.api.responses_body import STATELESS, ResponsesBody, conversation, reasoned, tool_use
from sidestream.api.route import Call, Route
from sidestream.api.sse import EventStream, event
from sidestream.api.structured import format_fields
from sidestream.errors import InvalidRequest
from sidestream.output import Output

SYNONYMS = {"max_new_tokens": "max_output_tokens", "top_logprobs_num": "top_logprobs"}


async def create_response(call: Call[ResponsesBody]) -> HTTPResponse:
    body, engine = call.body, call.service.engine
    call.service.check_model(body.model)
    for name in ("store", "background"):
        if getattr(body, name):
            raise InvalidRequest(name, "got true, must be false", hint=STATELESS)
    logprobs = "message.output_text.logprobs" in (body.include or ())
    format = format_fields(body.text.format if body.text is not None else None, "text.format")
    asked = asked_for(body, SYNONYMS, context=engine.context_length, logprobs=logprobs, more=format)
    dialogue = Dialogue(call.service, tool_use(body), reasoned(body))
    messages = conversation(body)
    ids = await encode_conversation(engine, messages, "input", dialogue.variables(checked_variables(body.chat_template_kwargs)))
    answering = _Answering(Exchange(call, dialogue, ids, asked, param="input", prefix="resp", calls="call_"), body)
    return await answering.stream() if body.stream else await answering.answer()


STATUS = {"stop": "completed", "length": "incomplete"}  # by the reason of the end; any other is an abort


class _Answering:
    """The answer to one request, whole or as events."""

    def __init__(self, exchange: Exchange, body: ResponsesBody) -> None:
        asked = exchange.asked
        self._exchange = exchange
        self._suffix = exchange.id.removeprefix("resp_")
        self._response = Response(
            id=exchange.id,
            created_at=int(time.time()),
            instructions=body.instructions,
            max_output_tokens=None if asked.tokens_by_default else asked.sampling.max_new_tokens,
            model=exchange.model,
            temperature=asked.sampling.temperature,
            top_p=asked.sampling.top_p,
            top_logprobs=asked.outputs.get("top_logprobs_num", 0),
            metadata=body.metadata or {},
            user=body.user,
            tools=body.tools or [],
            tool_choice=body.tool_choice or "auto",
            reasoning=body.reasoning,
            parallel_tool_calls=body.parallel_tool_calls is not False,
        )

    async def answer(self) -> HTTPResponse:
        events, output = await self._exchange.answer()
        entries, extras = await self._told(output, streamed=False)
        items = Items(self._suffix, _numbered())
        items.told(events, NO_ENTRIES, {})
        items.told([], entries, {})
        items.ended(_item_status(output), output.matched_stop)
        last = items.items[-1]
        if entries != NO_ENTRIES and not isinstance(last, shapes.OutputMessage):
            extras["logprobs"] = msgspec.Raw(entries)
        for name, value in extras.items():
            setattr(last, name, value)
        return self._exchange.respond(self._ended(output, items))

    async def stream(self) -> HTTPResponse:
        await self._exchange.open()
        return EventStream(self._events(), id=self._exchange.request_id)

    async def _events(self) -> AsyncIterator[bytes]:
        """The last event has the whole answer but for our extras, which went out with the text they belong to."""
        send = _numbered()
        yield send(shapes.Created, response=self._response) + send(shapes.InProgress, response=self._response)
        items = Items(self._suffix, send)
        latest: Output | None = None
        try:
            async with aclosing(self._exchange.pieces()) as pieces:
                async for events, latest in pieces:
                    yield items.told(events, *await self._told(latest, streamed=True))
        except Exception as error:
            yield send(shapes.Failed, response=self._failed(error, latest, items))
            return
        assert latest is not None
        last = items.ended(_item_status(latest), latest.matched_stop)
        ended = self._ended(latest, items)
        yield last + send(shapes.Completed if ended.status == "completed" else shapes.Incomplete, response=ended)

    async def _told(self, output: Output, *, streamed: bool) -> tuple[bytes, dict[str, Any]]:
        """The JSON of the tokens' logprobs, which OpenAI's text has a place for, and by name what stands beside it."""
        logprobs = await self._exchange.logprobs(output)
        extras: dict[str, Any] = {"hidden_states": await self._exchange.hidden_states(output, streamed=streamed)}
        entries = NO_ENTRIES
        if isinstance(logprobs, ChatLogprobs):
            entries, extras["prompt_logprobs"] = bytes(cast(msgspec.Raw, logprobs.content)), logprobs.prompt
        elif logprobs is not None:
            extras["flat_logprobs"] = logprobs
        return entries, {name: value for name, value in extras.items() if value is not UNSET}

    def _ended(self, output: Output, items: Items) -> Response:
        status: Any = STATUS.get(output.finish_reason or "", "cancelled")
        return replace(
            self._response,
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            output=items.items,
            usage=self._usage(output),
        )

    def _failed(self, error: Exception, latest: Output | None, items: Items) -> Response:
        said = described(error, self._exchange.request_id)[1].error.message
        usage = None if latest is None else self._usage(latest)
        return replace(self._response, status="failed", error=ResponseError(said), output=items.items, usage=usage)

    def _usage(self, output: Output) -> ResponseUsage:
        read, made = output.prompt_tokens, output.completion_tokens
        reasoning = OutputTokensDetails(self._exchange.reader.reasoning_tokens)
        return ResponseUsage(read, InputTokensDetails(output.cached_tokens), made, reasoning, read + made)


def _item_status(output: Output) -> shapes.ItemStatus:
    return "completed" if output.finish_reason == "stop" else "incomplete"


def _numbered() -> Send:
    """Makes events, each with the next number."""
    numbers = count()

    def send(kind: type[shapes.Event], **content: Any) -> bytes:
        return event(kind(sequence_number=next(numbers), **content), str(kind.__struct_config__.tag))

    return send


RESPONSES = (
    Route(
        "POST",
        "/v1/responses",
        create_response,
        "Answer in OpenAI's Responses API",
        body=ResponsesBody,
        answer=Response,
        streams=True,
        events=shapes.Events,
    ),
)
