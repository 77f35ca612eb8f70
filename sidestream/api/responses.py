"""`POST /v1/responses`: what OpenAI's Responses API is without state and tools. What this server does not do is refused by name."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from itertools import count
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta, Struct
from starlette.responses import Response as HTTPResponse

from sidestream.api import response_shapes as shapes
from sidestream.api.dialect import DialectBody, Extras, Ignored, Wanted, by_our_names, encode_conversation, parts_of
from sidestream.api.errors import described
from sidestream.api.fields import params_of
from sidestream.api.generation import Generation
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
from sidestream.api.token_logprobs import TokenLogprob, token_logprobs
from sidestream.errors import InvalidRequest
from sidestream.output import Output
from sidestream.params import SamplingParams

STATELESS = "Nothing is stored here: send the whole conversation as `input`."
NO_TOOLS = "Tools are not supported yet."
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
    token_logprobs: Any = None


class TextFormat(Struct):
    type: Annotated[Literal["text"], Meta(description="Structured output is not supported yet.")] = "text"


class TextOptions(Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Annotated[Literal["medium"], Meta(description="The model has no such setting.")] | None = None


class ReasoningOptions(Struct, forbid_unknown_fields=True):
    effort: Annotated[Literal["none"], Meta(description="Reasoning is not supported yet.")] | None = None
    summary: Annotated[None, Meta(description="Reasoning is not supported yet.")] = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_obfuscation: Annotated[bool, Meta(description="Accepted; nothing is added to hide the length of a text.")] | None = None


class ResponsesBody(DialectBody, kw_only=True, forbid_unknown_fields=True):
    input: Annotated[
        str | Annotated[list[InputMessage], Meta(min_length=1)],
        Meta(description="A user's message, or the conversation.", examples=["Name three fruits."]),
    ]
    instructions: Annotated[str, Meta(description="A system message that goes before the input.")] | None = None
    max_output_tokens: Annotated[int, Meta(ge=0, description="Most tokens to produce; without it the context's length is the limit.")] | (
        None
    ) = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20, description="Alternatives for each token; above 0 it implies logprobs.")] | None = None
    include: Annotated[list[Includable], Meta(description="Only the logprobs are something that there is here.")] | None = None
    stream_options: StreamOptions | None = None
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
    body, service = call.body, call.service
    model = service.check_model(body.model)
    for name in ("store", "background"):
        if getattr(body, name):
            raise InvalidRequest(name, "got true, must be false", hint=STATELESS)
    sampling, outputs = _params(body, service.engine.context_length)
    wanted = Wanted.of(body, outputs)
    ids = await encode_conversation(service, _messages(body), "input", **(body.chat_template_kwargs or {}))
    answering = _Answering(call, model, sampling, outputs, wanted)
    generation = Generation(call, [ids], sampling, outputs, operation="chat")
    if body.stream:
        generation.open()
        return EventStream(answering.events(generation), id=call.id)
    (output,) = await generation.answers()
    return cast(HTTPResponse, wanted.response(await answering.finished(output), output.hidden_states))


def _params(body: ResponsesBody, context: int) -> tuple[SamplingParams, dict[str, Any]]:
    renamed = by_our_names(body, {"max_output_tokens": "max_new_tokens", "top_logprobs": "top_logprobs_num"})
    if renamed["max_new_tokens"] is None and body.max_new_tokens is None:  # type: ignore[attr-defined]
        renamed["max_new_tokens"] = context
    if "message.output_text.logprobs" in (body.include or ()):
        renamed["return_logprob"] = True
    return params_of(body, renamed)


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """As chat templates know them: `developer` is OpenAI's newer word for `system`."""
    given = [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    first = [] if body.instructions is None else [InputMessage(role="system", content=body.instructions)]
    roles = {"developer": "system"}
    return [{"role": roles.get(each.role, each.role), "content": parts_of(each.content)} for each in (*first, *given)]


class _Answering:
    """The answer to one request, whole or as events."""

    def __init__(self, call: Call[ResponsesBody], model: str, sampling: SamplingParams, outputs: dict[str, Any], wanted: Wanted) -> None:
        body = call.body
        self._id = call.id
        self._wanted = wanted
        self._tokenizer = call.service.engine.tokenizer
        self._logprobs = not wanted.flat
        # What OpenAI's shape cannot say: the flat form, and logprobs of the prompt or of ids that were asked for.
        self._beside = wanted.flat or outputs.get("logprob_start_len", -1) >= 0 or bool(outputs.get("token_ids_logprob"))
        self._response = Response(
            id=f"resp_{call.id}",
            created_at=int(time.time()),
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=model,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_logprobs=outputs.get("top_logprobs_num", 0),
            metadata=body.metadata or {},
            user=body.user,
            tool_choice=body.tool_choice or "auto",
            parallel_tool_calls=body.parallel_tool_calls is not False,
        )

    async def finished(self, output: Output) -> Response:
        extras = await self._wanted.extras(output, logprobs=self._beside)
        return self._ended(output, self._text(output.text, await self._token_logprobs(output)), extras)

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The stream: its last event has the whole answer but for our extras, which went out with the text they belong to."""
        send, item_id = _numbered(), f"msg_{self._id}"
        yield send(shapes.Created, response=self._response) + send(shapes.InProgress, response=self._response)
        begun = OutputMessage(id=item_id, status="in_progress", content=[])
        yield send(shapes.ItemAdded, item=begun) + send(shapes.PartAdded, item_id=item_id, part=self._text("", []))
        text, logprobs = "", list[TokenLogprob]()
        latest: Output | None = None
        try:
            async with aclosing(cast(Any, generation.parts())) as parts:
                async for _, latest in parts:
                    entries = await self._token_logprobs(latest)
                    extras = await self._wanted.extras(latest, logprobs=self._beside, streamed=True)
                    text += latest.text
                    logprobs += entries
                    if latest.text or entries or extras:
                        beside = msgspec.structs.asdict(extras)
                        yield send(shapes.TextDelta, item_id=item_id, delta=latest.text, logprobs=entries, **beside)
        except Exception as error:
            yield send(shapes.Failed, response=self._failed(error, latest, text))
            return
        assert latest is not None
        ended = self._ended(latest, self._text(text, logprobs), Extras())
        part = ended.output[0].content[0]
        yield send(shapes.TextDone, item_id=item_id, text=text, logprobs=part.logprobs)
        yield send(shapes.PartDone, item_id=item_id, part=part)
        yield send(shapes.ItemDone, item=ended.output[0])
        yield send(shapes.Completed if ended.status == "completed" else shapes.Incomplete, response=ended)

    def _text(self, text: str, logprobs: Sequence[TokenLogprob]) -> OutputText:
        return OutputText(text=text, logprobs=list(logprobs))

    async def _token_logprobs(self, output: Output) -> list[TokenLogprob]:
        return await token_logprobs(self._tokenizer, output) if self._logprobs else []

    def _ended(self, output: Output, part: OutputText, extras: Extras) -> Response:
        status: Any = {"stop": "completed", "length": "incomplete"}.get(output.finish_reason or "", "cancelled")
        message = OutputMessage(
            id=f"msg_{self._id}",
            status="completed" if status == "completed" else "incomplete",
            content=[part],
            matched_stop=output.matched_stop,
            token_logprobs=extras.token_logprobs,
            hidden_states=extras.hidden_states,
        )
        return msgspec.structs.replace(
            self._response,
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            output=[message],
            usage=_usage(output),
        )

    def _failed(self, error: Exception, latest: Output | None, text: str) -> Response:
        output = OutputMessage(id=f"msg_{self._id}", status="incomplete", content=[self._text(text, [])])
        said = described(error, self._id)[1].error.message
        usage = None if latest is None else _usage(latest)
        return msgspec.structs.replace(self._response, status="failed", error=ResponseError(said), output=[output], usage=usage)


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
