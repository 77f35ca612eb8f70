"""`POST /v1/responses`: what OpenAI's Responses API is without state and tools. What this server does not do is refused by name."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from itertools import count
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import UNSET, Meta, Struct
from msgspec.structs import replace
from starlette.responses import Response as HTTPResponse

from sidestream.api import response_shapes as shapes
from sidestream.api.dialect import DialectBody, Exchange, Ignored, asked_for, encode_conversation, parts_of
from sidestream.api.errors import described
from sidestream.api.logprobs import ChatLogprobs
from sidestream.api.openai import MAX_TOKENS, TOP_LOGPROBS
from sidestream.api.response_shapes import (
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseUsage,
)
from sidestream.api.route import Call, Route
from sidestream.api.sse import EventStream, event
from sidestream.errors import InvalidRequest
from sidestream.output import Output

STATELESS = "Nothing is stored here: send the whole conversation as `input`."
NO_TOOLS = "Tools are not supported yet."
SYNONYMS = {"max_new_tokens": "max_output_tokens", "top_logprobs_num": "top_logprobs"}
NO_ENTRIES = b"[]"
Metadata = dict[str, Annotated[str, Meta(max_length=512)]]
Includable = Literal[
    "message.output_text.logprobs",
    # Of what this server never has; clients ask for it as a matter of course.
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class InputPart(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None  # these two come back with an answer that is sent in again
    logprobs: list[Any] | None = None


class InputMessage(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Annotated[Literal["message"], Meta(description=f"{STATELESS} {NO_TOOLS}")] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[InputPart], Meta(min_length=1)]
    id: str | None = None  # what an answer has besides, and nothing here needs
    status: str | None = None
    phase: str | None = None
    matched_stop: str | int | None = None
    hidden_states: Any = None
    prompt_logprobs: Any = None
    flat_logprobs: Any = None


class PlainFormat(Struct):
    type: Annotated[Literal["text"], Meta(description="Structured output is not supported yet.")] = "text"


class TextOptions(Struct, forbid_unknown_fields=True):
    format: PlainFormat | None = None
    verbosity: Annotated[Literal["medium"], Meta(description="The model has no such setting.")] | None = None


class ReasoningOptions(Struct, forbid_unknown_fields=True):
    effort: Annotated[Literal["none"], Meta(description="Reasoning is not supported yet.")] | None = None
    summary: Annotated[None, Meta(description="Reasoning is not supported yet.")] = None


class Obfuscation(Struct, forbid_unknown_fields=True):
    include_obfuscation: Annotated[bool, Meta(description="Accepted; nothing is added to hide the length of a text.")] | None = None


class ResponsesBody(DialectBody, kw_only=True, forbid_unknown_fields=True):
    input: Annotated[
        str | Annotated[list[InputMessage], Meta(min_length=1)],
        Meta(description="A user's message, or the conversation.", examples=["Name three fruits."]),
    ]
    instructions: Annotated[str, Meta(description="A system message that goes before the input.")] | None = None
    max_output_tokens: Annotated[int, MAX_TOKENS] | None = None
    top_logprobs: Annotated[int, TOP_LOGPROBS] | None = None
    include: Annotated[list[Includable], Meta(description="Only the logprobs are something that there is here.")] | None = None
    stream_options: Obfuscation | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[Any], Meta(max_length=0, description=NO_TOOLS)] | None = None
    tool_choice: Annotated[Literal["auto", "none"], Meta(description="Without tools both are the same.")] | None = None
    parallel_tool_calls: Annotated[bool, Meta(description="Accepted; there are no tools.")] | None = None
    max_tool_calls: Annotated[int, Meta(description="Accepted; there are no tools.")] | None = None
    store: Annotated[bool, Meta(description=STATELESS, extra_json_schema={"const": False})] | None = None
    background: Annotated[bool, Meta(description=STATELESS, extra_json_schema={"const": False})] | None = None
    truncation: Annotated[Literal["disabled"], Meta(description="A conversation that is too long is refused, never cut.")] | None = None
    previous_response_id: Annotated[None, Meta(description=STATELESS)] = None
    conversation: Annotated[None, Meta(description=STATELESS)] = None
    prompt: Annotated[None, Meta(description=STATELESS)] = None
    context_management: Annotated[None, Meta(description="A conversation is never cut or summarised.")] = None
    moderation: Annotated[None, Meta(description="There is no moderation here.")] = None
    metadata: Annotated[Metadata, Meta(max_length=16, description="Comes back with the answer.")] | None = None
    user: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Annotated[dict[str, Any], Meta(description="Accepted; prefixes are cached anyway.")] | None = None
    service_tier: Ignored = None


async def create_response(call: Call[ResponsesBody]) -> HTTPResponse:
    body, engine = call.body, call.service.engine
    call.service.check_model(body.model)
    for name in ("store", "background"):
        if getattr(body, name):
            raise InvalidRequest(name, "got true, must be false", hint=STATELESS)
    logprobs = "message.output_text.logprobs" in (body.include or ())
    asked = asked_for(body, SYNONYMS, context=engine.context_length, logprobs=logprobs)
    ids = await encode_conversation(engine, _messages(body), "input", body.chat_template_kwargs)
    answering = _Answering(Exchange(call, ids, asked, param="input", prefix="resp"), body)
    return await answering.stream() if body.stream else await answering.answer()


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """As chat templates know them: `developer` is OpenAI's newer word for `system`."""
    given = [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    first = [] if body.instructions is None else [InputMessage(role="system", content=body.instructions)]
    roles = {"developer": "system"}
    return [{"role": roles.get(each.role, each.role), "content": parts_of(each.content)} for each in (*first, *given)]


class _Answering:
    """The answer to one request, whole or as events."""

    def __init__(self, exchange: Exchange, body: ResponsesBody) -> None:
        asked = exchange.asked
        self._exchange = exchange
        self._message_id = f"msg_{exchange.id.removeprefix('resp_')}"
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
            tool_choice=body.tool_choice or "auto",
            parallel_tool_calls=body.parallel_tool_calls is not False,
        )

    async def answer(self) -> HTTPResponse:
        output = await self._exchange.answer()
        entries, extras = await self._told(output, streamed=False)
        return self._exchange.respond(self._ended(output, _text(output.text, [entries]), extras))

    async def stream(self) -> HTTPResponse:
        await self._exchange.open()
        return EventStream(self._events(), id=self._exchange.request_id)

    async def _events(self) -> AsyncIterator[bytes]:
        """The last event has the whole answer but for our extras, which went out with the text they belong to."""
        send, item_id = _numbered(), self._message_id
        yield send(shapes.Created, response=self._response) + send(shapes.InProgress, response=self._response)
        begun = OutputMessage(id=item_id, status="in_progress", content=[])
        yield send(shapes.ItemAdded, item=begun) + send(shapes.PartAdded, item_id=item_id, part=_text("", []))
        text, logprobs = "", list[bytes]()
        latest: Output | None = None
        try:
            async with aclosing(self._exchange.parts()) as parts:
                async for latest in parts:
                    entries, extras = await self._told(latest, streamed=True)
                    text += latest.text
                    logprobs.append(entries)
                    if latest.text or entries != NO_ENTRIES or extras:
                        yield send(shapes.TextDelta, item_id=item_id, delta=latest.text, logprobs=msgspec.Raw(entries), **extras)
        except Exception as error:
            yield send(shapes.Failed, response=self._failed(error, latest, _text(text, logprobs)))
            return
        assert latest is not None
        ended = self._ended(latest, _text(text, logprobs), {})
        part = ended.output[0].content[0]
        yield send(shapes.TextDone, item_id=item_id, text=text, logprobs=part.logprobs)
        yield send(shapes.PartDone, item_id=item_id, part=part)
        yield send(shapes.ItemDone, item=ended.output[0])
        yield send(shapes.Completed if ended.status == "completed" else shapes.Incomplete, response=ended)

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

    def _ended(self, output: Output, part: OutputText, extras: dict[str, Any]) -> Response:
        status: Any = {"stop": "completed", "length": "incomplete"}.get(output.finish_reason or "", "cancelled")
        message = OutputMessage(
            id=self._message_id,
            status="completed" if status == "completed" else "incomplete",
            content=[part],
            matched_stop=output.matched_stop,
            **extras,
        )
        return replace(
            self._response,
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            output=[message],
            usage=_usage(output),
        )

    def _failed(self, error: Exception, latest: Output | None, part: OutputText) -> Response:
        said = described(error, self._exchange.request_id)[1].error.message
        output = OutputMessage(id=self._message_id, status="incomplete", content=[part])
        usage = None if latest is None else _usage(latest)
        return replace(self._response, status="failed", error=ResponseError(said), output=[output], usage=usage)


def _text(text: str, logprobs: Sequence[bytes]) -> OutputText:
    """`logprobs` are the JSON of lists that follow each other."""
    entries = b",".join(each[1:-1] for each in logprobs if each != NO_ENTRIES)
    return OutputText(text=text, logprobs=cast(Any, msgspec.Raw(b"[%b]" % entries)))


def _numbered() -> Callable[..., bytes]:
    """Makes events, each with the next number."""
    numbers = count()

    def send(kind: type[shapes.Event], **content: Any) -> bytes:
        return event(kind(sequence_number=next(numbers), **content), str(kind.__struct_config__.tag))

    return send


def _usage(output: Output) -> ResponseUsage:
    read, made = output.prompt_tokens, output.completion_tokens
    return ResponseUsage(read, InputTokensDetails(output.cached_tokens), made, OutputTokensDetails(), read + made)


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
