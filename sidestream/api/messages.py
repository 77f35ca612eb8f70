"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API for text. What is not done here is refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.responses import Response

from sidestream.api.dialect import (
    DialectBody,
    Exchange,
    Ignored,
    Model,
    TemplateVariables,
    asked_for,
    encode_conversation,
    parts_of,
)
from sidestream.api.errors import AnthropicErrorAnswer, error_event
from sidestream.api.fields import STOPS
from sidestream.api.logprobs import ChatLogprobs
from sidestream.api.openai import check_not_aborted
from sidestream.api.route import Call, Route
from sidestream.api.sse import EventStream, event, json_response
from sidestream.output import Output

SYNONYMS = {"max_new_tokens": "max_tokens", "stop": "stop_sequences"}
TEXT_ONLY = "Images, documents, tools and thinking are not supported."
NO_TOOLS = "Tools are not supported yet."


# What comes in


class CacheControl(Struct):
    type: Literal["ephemeral"] = "ephemeral"


class TextBlock(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Annotated[Literal["text"], Meta(description=TEXT_ONLY)]
    text: str
    cache_control: Annotated[CacheControl, Meta(description="Accepted; prefixes are cached anyway.")] | None = None
    citations: Annotated[None, Meta(description="There are no citations here.")] = None


Content = str | Annotated[list[TextBlock], Meta(min_length=1)]


class MessageParam(Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: Content


class ToolChoice(Struct):
    type: Annotated[Literal["auto", "none"], Meta(description="Without tools both are the same.")]


class Thinking(Struct):
    type: Annotated[Literal["disabled"], Meta(description="Thinking is not supported yet.")]


Messages = Annotated[
    list[MessageParam],
    Meta(
        min_length=1,
        description="The conversation. Where an assistant has the last word, the answer goes on with it.",
        examples=[[{"role": "user", "content": "Name three fruits."}]],
    ),
]
System = Annotated[Content, Meta(description="A system message that goes before the conversation.")]
Tools = Annotated[list[Any], Meta(max_length=0, description=NO_TOOLS)]


class MessagesBody(DialectBody, kw_only=True, forbid_unknown_fields=True):
    messages: Messages
    max_tokens: Annotated[int, Meta(ge=0, examples=[64], description="Most tokens to produce; the context length bounds it too.")]
    system: System | None = None
    stop_sequences: Annotated[STOPS, Meta(description="End when one of these texts appears; the text is cut before it.")] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: Annotated[None, Meta(description="Structured output and effort are not supported yet.")] = None
    container: Annotated[None, Meta(description=NO_TOOLS)] = None
    mcp_servers: Annotated[list[Any], Meta(max_length=0, description=NO_TOOLS)] | None = None
    context_management: Annotated[None, Meta(description="A conversation is never cut or summarised.")] = None
    metadata: Annotated[dict[str, Any], Meta(description="Accepted; changes nothing here.")] | None = None
    cache_control: Annotated[CacheControl, Meta(description="Accepted; prefixes are cached anyway.")] | None = None
    service_tier: Ignored = None
    speed: Ignored = None


class CountBody(Struct, kw_only=True, forbid_unknown_fields=True):
    messages: Messages
    model: Model | None = None
    system: System | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: Annotated[None, Meta(description="Structured output and effort are not supported yet.")] = None
    cache_control: Annotated[CacheControl, Meta(description="Accepted; prefixes are cached anyway.")] | None = None
    speed: Ignored = None
    chat_template_kwargs: TemplateVariables | None = None


# What goes out


class AnswerBlock(Struct, kw_only=True):
    type: Literal["text"] = "text"
    text: str
    citations: None = None


class MessageUsage(Struct, kw_only=True):
    """All of the prompt is `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


Logprobs = Annotated[ChatLogprobs, Meta(description="As chat completions have them; or all lists, with the flat format.")]
HiddenStates = Annotated[Any, Meta(description="In the form that hidden_states_format says.")]
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "model_context_window_exceeded"]


class Message(Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    logprobs: Logprobs | UnsetType = UNSET
    hidden_states: HiddenStates | UnsetType = UNSET


class TokenCount(Struct):
    input_tokens: int


# Events


class MessageStart(Struct, tag_field="type", tag="message_start"):
    message: Message


class ContentBlockStart(Struct, kw_only=True, tag_field="type", tag="content_block_start"):
    index: int = 0
    content_block: AnswerBlock


class Ping(Struct, tag_field="type", tag="ping"):
    pass


class TextPiece(Struct):
    text: str
    type: Literal["text_delta"] = "text_delta"


class ContentBlockDelta(Struct, kw_only=True, tag_field="type", tag="content_block_delta"):
    index: int = 0
    delta: TextPiece
    logprobs: Logprobs | UnsetType = UNSET
    hidden_states: HiddenStates | UnsetType = UNSET


class ContentBlockStop(Struct, tag_field="type", tag="content_block_stop"):
    index: int = 0


class Ending(Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    delta: Ending
    usage: MessageUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    pass


Event = MessageStart | ContentBlockStart | Ping | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop
Events = Event | AnthropicErrorAnswer


def _event(value: Event) -> bytes:
    return event(value, str(value.__struct_config__.tag))


async def create_message(call: Call[MessagesBody]) -> Response:
    body, engine = call.body, call.service.engine
    call.service.check_model(body.model)
    asked = asked_for(body, SYNONYMS, context=engine.context_length)
    answering = _Answering(Exchange(call, await _encode(call), asked, param="messages", prefix="msg"), body.max_tokens)
    return await answering.stream() if body.stream else await answering.answer()


async def count_tokens(call: Call[CountBody]) -> Response:
    call.service.check_model(call.body.model)
    return json_response(TokenCount(len(await _encode(call))))


async def _encode(call: Call[Any]) -> list[int]:
    """Token ids of the conversation. An answer that was begun is continued."""
    body: MessagesBody | CountBody = call.body
    messages = _joined([*([] if body.system is None else [MessageParam(role="system", content=body.system)]), *body.messages])
    begun = messages[-1]["role"] == "assistant"
    template = {"add_generation_prompt": not begun, "continue_final_message": begun}
    return await encode_conversation(call.service.engine, messages, "messages", body.chat_template_kwargs, **template)


def _joined(messages: Sequence[MessageParam]) -> list[dict[str, Any]]:
    """As chat templates know them: messages of one role that follow each other are one, as in this API."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        parts = parts_of(message.content)
        if joined and joined[-1]["role"] == message.role:
            joined[-1]["content"] += parts
        else:
            joined.append({"role": message.role, "content": parts})
    return joined


class _Answering:
    """The answer to one request, whole or as events."""

    def __init__(self, exchange: Exchange, max_tokens: int) -> None:
        self._exchange = exchange
        self._max_tokens = max_tokens

    async def answer(self) -> Response:
        output = await self._exchange.answer()
        ending = self._ending(output)
        extras = await self._extras(output, streamed=False)
        return self._exchange.respond(self._message(output, [AnswerBlock(text=output.text)], ending, extras))

    async def stream(self) -> Response:
        await self._exchange.open()
        return EventStream(self._events(), id=self._exchange.request_id)

    async def _events(self) -> AsyncIterator[bytes]:
        """They begin with the first token: only then it is known what the cache had."""
        latest: Output | None = None
        try:
            async with aclosing(self._exchange.parts()) as parts:
                async for part in parts:
                    begun = b"" if latest is not None else self._beginning(part)
                    latest = part
                    yield begun + await self._delta(part)
            assert latest is not None
            ending = self._ending(latest)
        except Exception as error:
            yield event(error_event(error, self._exchange.request_id, "anthropic"), "error")
            return
        yield _event(ContentBlockStop()) + _event(MessageDelta(ending, _usage(latest))) + _event(MessageStop())

    def _beginning(self, part: Output) -> bytes:
        message = self._message(part, [], None, {})
        message.usage.output_tokens = 0
        return _event(MessageStart(message)) + _event(ContentBlockStart(content_block=AnswerBlock(text=""))) + _event(Ping())

    async def _delta(self, part: Output) -> bytes:
        extras = await self._extras(part, streamed=True)
        return _event(ContentBlockDelta(delta=TextPiece(part.text), **extras)) if part.text or extras else b""

    async def _extras(self, output: Output, *, streamed: bool) -> dict[str, Any]:
        """What stands beside the text, by name."""
        logprobs = await self._exchange.logprobs(output)
        extras = {"logprobs": UNSET if logprobs is None else logprobs}
        extras["hidden_states"] = await self._exchange.hidden_states(output, streamed=streamed)
        return {name: value for name, value in extras.items() if value is not UNSET}

    def _message(self, output: Output, content: list[AnswerBlock], ending: Ending | None, extras: dict[str, Any]) -> Message:
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
        return Ending("end_turn", None)


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
        events=Events,
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
