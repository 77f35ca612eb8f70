"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API for text. What is not done here is refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from msgspec import UNSET
from starlette.responses import Response

from sidestream.api import message_shapes as shapes
from sidestream.api.chat import checked_variables
from sidestream.api.chat_message import calls_tools
from sidestream.api.dialect import Exchange, asked_for, encode_conversation
from sidestream.api.dialogue import Dialogue
from sidestream.api.errors import error_event
from sidestream.api.message_blocks import Blocks, blocks_of
from sidestream.api.message_shapes import Ending, Message, MessageUsage, TokenCount
from sidestream.api.messages_body import CountBody, MessagesBody, conversation, reasoned, tool_use
from sidestream.api.openai import check_not_aborted
from sidestream.api.route import Call, Route
from sidestream.api.sse import EventStream, event, json_response
from sidestream.api.structured import format_fields
from sidestream.output import Output

SYNONYMS = {"max_new_tokens": "max_tokens", "stop": "stop_sequences"}


def _event(value: shapes.Event) -> bytes:
    return event(value, str(value.__struct_config__.tag))


async def create_message(call: Call[MessagesBody]) -> Response:
    body, engine = call.body, call.service.engine
    call.service.check_model(body.model)
    values, places = format_fields(body.output_config.format if body.output_config is not None else None, "output_config.format")
    if body.thinking is not None and body.thinking.budget_tokens is not None:
        values["max_thinking_tokens"], places["max_thinking_tokens"] = body.thinking.budget_tokens, "thinking.budget_tokens"
    asked = asked_for(body, SYNONYMS, context=engine.context_length, more=(values, places))
    dialogue, ids = await _encoded(call)
    answering = _Answering(Exchange(call, dialogue, ids, asked, param="messages", prefix="msg", calls="toolu_"), body.max_tokens)
    return await answering.stream() if body.stream else await answering.answer()


async def count_tokens(call: Call[CountBody]) -> Response:
    call.service.check_model(call.body.model)
    _, ids = await _encoded(call)
    return json_response(TokenCount(len(ids)))


async def _encoded(call: Call[Any]) -> tuple[Dialogue, list[int]]:
    """The conversation and its token ids. An answer that was begun is continued."""
    body: MessagesBody | CountBody = call.body
    messages = conversation(body)
    last = messages[-1]
    begun = last["role"] == "assistant" and "tool_calls" not in last
    continued = "".join(part["text"] for part in last["content"]) if begun else ""
    dialogue = Dialogue(call.service, tool_use(body), reasoned(body, continued=continued))
    template = {"add_generation_prompt": not begun, "continue_final_message": begun}
    variables = dialogue.variables(checked_variables(body.chat_template_kwargs))
    return dialogue, await encode_conversation(call.service.engine, messages, "messages", variables, **template)


class _Answering:
    """The answer to one request, whole or as events."""

    def __init__(self, exchange: Exchange, max_tokens: int) -> None:
        self._exchange = exchange
        self._max_tokens = max_tokens
        self._called = False

    async def answer(self) -> Response:
        events, output = await self._exchange.answer()
        self._called = calls_tools(events)
        ending = self._ending(output)
        extras = await self._extras(output, streamed=False)
        return self._exchange.respond(self._message(output, blocks_of(events), ending, extras))

    async def stream(self) -> Response:
        await self._exchange.open()
        return EventStream(self._events(), id=self._exchange.request_id)

    async def _events(self) -> AsyncIterator[bytes]:
        """They begin with the first token: only then it is known what the cache had."""
        latest: Output | None = None
        blocks = Blocks()
        try:
            async with aclosing(self._exchange.pieces()) as pieces:
                async for piece in pieces:
                    begun = b"" if latest is not None else self._beginning(piece.output)
                    latest = piece.output
                    self._called = self._called or calls_tools(piece.events)
                    yield begun + b"".join(map(_event, blocks.told(piece, await self._extras(latest, streamed=True))))
            assert latest is not None
            ending = self._ending(latest)
        except Exception as error:
            yield event(error_event(error, self._exchange.request_id, "anthropic"), "error")
            return
        last = [*blocks.ended(), shapes.MessageDelta(ending, _usage(latest)), shapes.MessageStop()]
        yield b"".join(map(_event, last))

    def _beginning(self, output: Output) -> bytes:
        message = self._message(output, [], None, {})
        message.usage.output_tokens = 0
        return _event(shapes.MessageStart(message))

    async def _extras(self, output: Output, *, streamed: bool) -> dict[str, Any]:
        """What stands beside the text, by name."""
        logprobs = await self._exchange.logprobs(output)
        extras = {"logprobs": UNSET if logprobs is None else logprobs}
        extras["hidden_states"] = await self._exchange.hidden_states(output, streamed=streamed)
        return {name: value for name, value in extras.items() if value is not UNSET}

    def _message(self, output: Output, content: list[shapes.AnswerBlock], ending: Ending | None, extras: dict[str, Any]) -> Message:
        return Message(
            id=self._exchange.id,
            model=self._exchange.model,
            content=content,
            stop_reason=None if ending is None else ending.stop_reason,
            stop_sequence=None if ending is None else ending.stop_sequence,
            usage=_usage(output),
            **extras,
        )

    def _ending(self, output: Output) -> Ending:
        """Raises Aborted, for which this API has no word."""
        check_not_aborted(output)
        if output.finish_reason == "length":
            return Ending("max_tokens" if output.completion_tokens >= self._max_tokens else "model_context_window_exceeded", None)
        if isinstance(output.matched_stop, str):
            return Ending("stop_sequence", output.matched_stop)
        return Ending("tool_use" if self._called else "end_turn", None)


def _usage(output: Output) -> MessageUsage:
    cached = output.cached_tokens
    return MessageUsage(input_tokens=output.prompt_tokens - cached, output_tokens=output.completion_tokens, cache_read_input_tokens=cached)


MESSAGES = (
    Route(
        "POST",
        "/v1/messages",
        create_message,
        "Answer in Anthropic's Messages API",
        body=MessagesBody,
        answer=Message,
        streams=True,
        events=shapes.Events,
        errors="anthropic",
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        "Count the tokens of a conversation",
        body=CountBody,
        answer=TokenCount,
        queues=False,
        errors="anthropic",
    ),
)
