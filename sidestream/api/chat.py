"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from sidestream.api.chat_message import AnswerMessage, Delta, calls_tools, delta_of, message_of
from sidestream.api.dialogue import AnswerReader, Dialogue, Piece, Reading, Reasoned
from sidestream.api.logprobs import ChatLogprobs, Entries, TokenTexts, chat_logprobs
from sidestream.api.openai import (
    IGNORED,
    TOP_LOGPROBS,
    Choice,
    Chunk,
    Exchange,
    OpenAIRequest,
    asked_for,
    check_room,
)
from sidestream.api.route import Call, Route
from sidestream.api.shapes import Usage, flat_logprobs, usage_of
from sidestream.api.tools import Parallel, ToolChoice, Tools, tool_use
from sidestream.async_client import LONG_TEXT, AsyncEngine
from sidestream.errors import InvalidRequest
from sidestream.output import Output

TEMPLATE_NAMES = frozenset({"self", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "chat"})


TEXT_ONLY = msgspec.Meta(description="The model reads text only.")
NO_TEMPLATE = msgspec.Meta(description="A template is a program, not taken from requests: start the server with --chat-template FILE.")
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
EFFORT = msgspec.Meta(description="The template finds it as reasoning_effort, and as enable_thinking whether it is none.")
NOT_STORED = msgspec.Meta(description="Only false: answers are not stored.", extra_json_schema={"enum": [False]})


class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Of a message's content. Other types' fields are declared to be refused by their names."""

    type: Annotated[Literal["text"], TEXT_ONLY]
    text: str
    cache_control: Annotated[Any, IGNORED] = None
    image_url: Annotated[None, TEXT_ONLY] = None
    video_url: Annotated[None, TEXT_ONLY] = None
    audio_url: Annotated[None, TEXT_ONLY] = None
    input_audio: Annotated[None, TEXT_ONLY] = None
    file: Annotated[None, TEXT_ONLY] = None


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Annotated[str, msgspec.Meta(min_length=1, description="The template knows which: system, user, assistant, tool.")]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], msgspec.Meta(description="Of an assistant's message that called tools.")] | None = None
    tool_call_id: str | None = None
    reasoning_content: Annotated[str, msgspec.Meta(description="The template finds it as reasoning_content and as reasoning.")] | None = (
        None
    )
    reasoning: Annotated[str, msgspec.Meta(description="The same as reasoning_content.")] | None = None
    annotations: Annotated[list[Any], IGNORED] | None = None
    refusal: Annotated[None, msgspec.Meta(description="No model here refuses in a field of its own: send it as content.")] = None
    audio: Annotated[None, TEXT_ONLY] = None
    function_call: Annotated[None, msgspec.Meta(description="Send tool_calls.")] = None


class ChatRequest(OpenAIRequest, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, examples=[[{"role": "user", "content": "Name three fruits."}]])]
    logprobs: Annotated[bool, msgspec.Meta(description="Return the logprob of each token.")] | None = None
    top_logprobs: Annotated[int, TOP_LOGPROBS] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], msgspec.Meta(description="Variables for the chat template.")] | None = None
    add_generation_prompt: Annotated[bool, msgspec.Meta(description="Begin an answer after the last message.")] | None = None
    continue_final_message: Annotated[bool, msgspec.Meta(description="Go on with the last message.")] | None = None

    modalities: Annotated[list[Literal["text"]], TEXT_ONLY] | None = None
    store: Annotated[bool, NOT_STORED] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Parallel | None = None
    reasoning_effort: Annotated[Effort, EFFORT] | None = None
    separate_reasoning: Annotated[bool, msgspec.Meta(description="False: reasoning stays in the content.")] | None = None
    # Null is all that this may be; the description says why.
    chat_template: Annotated[None, NO_TEMPLATE] = None


class ChatChoice(Choice, kw_only=True):
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None


class ChatDelta(Choice, kw_only=True):
    delta: Delta


class ChatChunk(Chunk, kw_only=True):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: Sequence[ChatDelta]


class ChatAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_token_ids: list[int] | UnsetType = UNSET


async def chat_completions(call: Call[ChatRequest]) -> Response:
    body, engine = call.body, call.service.engine
    call.service.check_model(body.model)
    _check(body)
    context = engine.context_length
    asked = asked_for(body, logprobs=body.logprobs, top_logprobs="top_logprobs", default_tokens=context, context=context)
    check_room("messages", len(body.messages), asked, context, least=True)  # one token each: before all of them are rendered
    for text in _long_texts(body.messages):  # to tokenize all of one that is much too long would take seconds
        if await asyncio.to_thread(engine.tokenizer.surely_exceeds, text, context):
            check_room("messages", 2 * context, asked, context, least=True)
    dialogue = _dialogue(call)
    ids = await encode_messages(
        engine,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=dialogue.variables(checked_variables(body.chat_template_kwargs)),
    )
    check_room("messages", len(ids), asked, context)
    asked, reading = dialogue.begin(asked, ids)
    exchange = Exchange(call, [ids], asked, kind="chatcmpl", operation="chat")
    chat = _Chat(exchange, reading, body)
    return await chat.stream() if body.stream else await chat.answer()


def _dialogue(call: Call[ChatRequest]) -> Dialogue:
    body = call.body
    continued = "".join(_texts(body.messages[-1])) if body.continue_final_message else ""
    before = getattr(body, "require_reasoning", None)
    reasoned = Reasoned(body.separate_reasoning is not False, body.reasoning_effort, before_grammar=before, continued=continued)
    return Dialogue(call.service, tool_use(body.tools, body.tool_choice, body.parallel_tool_calls), reasoned)


class _Chat:
    """One conversation on its way to the answer."""

    def __init__(self, exchange: Exchange, reading: Reading, body: ChatRequest) -> None:
        self._exchange = exchange
        self._reading = reading
        self._readers: dict[int, AnswerReader] = {}  # by choice
        self._calling: set[int] = set()  # choices with calls
        self._texts = TokenTexts(exchange.tokenizer)
        self._prompt_ids = list(reading.ids) if body.return_token_ids else UNSET

    async def answer(self) -> Response:
        exchange = self._exchange
        outputs = await exchange.answers()
        choices = []
        for index, output in enumerate(outputs):
            piece = await self._read(index, output)
            assert piece is not None, "it is the last part, too"
            rest = await self._ending(index, output, streamed=False)
            choices.append(ChatChoice(message=message_of(piece.events), logprobs=await self._logprobs(output), **rest))
        return exchange.respond(
            ChatAnswer(
                id=exchange.id,
                created=exchange.created,
                model=exchange.model,
                choices=choices,
                usage=usage_of(outputs, exchange.reasoning_tokens),
                system_fingerprint=exchange.fingerprint,
                prompt_token_ids=self._prompt_ids,
            )
        )

    async def stream(self) -> Response:
        return await self._exchange.stream(ChatChunk, self._deltas, prompt_token_ids=self._prompt_ids)

    async def _deltas(self, index: int, part: Output, first: bool) -> Sequence[Choice]:
        """The role comes in a chunk of its own; the last chunk may have nothing else than the reason of the end."""
        role = [ChatDelta(index=index, delta=Delta(role="assistant", content=""))] if first else []
        piece = await self._read(index, part)
        if piece is None:
            return role
        rest = await self._ending(index, piece.output, streamed=True)
        return [*role, ChatDelta(delta=delta_of(piece.events), logprobs=await self._logprobs(piece.output), **rest)]

    async def _read(self, index: int, part: Output) -> Piece | None:
        if index not in self._readers:
            self._readers[index] = self._reading.reader()
        reader = self._readers[index]
        piece = await reader.read(part)
        self._exchange.reasoning_tokens[index] = reader.reasoning_tokens
        if piece is not None and calls_tools(piece.events):
            self._calling.add(index)
        return piece

    async def _ending(self, index: int, output: Output, *, streamed: bool) -> dict[str, Any]:
        rest = await self._exchange.ending(index, output, streamed=streamed)
        return rest | {"finish_reason": "tool_calls"} if rest.get("finish_reason") == "stop" and index in self._calling else rest

    async def _logprobs(self, output: Output) -> Any:
        logprobs = output.logprobs
        if logprobs is None:
            return None
        if self._exchange.asked.flat_logprobs:
            return flat_logprobs(logprobs)
        ids = self._reading.ids
        return await chat_logprobs(self._texts, Entries.of_output(logprobs, output.token_ids), Entries.of_prompt(logprobs, ids))


# From messages to token ids


def _check(body: ChatRequest) -> None:
    if body.store:
        raise InvalidRequest("store", "got true, must be false: answers are not stored")


def checked_variables(given: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Those of a request for its template. Raises InvalidRequest."""
    for key in given or ():
        if key in TEMPLATE_NAMES:
            raise InvalidRequest("chat_template_kwargs", f"got the key {key!r}, which is not a variable of the template's own")
    return given


async def encode_messages(
    engine: AsyncEngine,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    variables: Mapping[str, Any] | None,
) -> list[int]:
    """Token ids of a conversation; of a long one beside the event loop. Raises InvalidRequest."""
    plain = [_plain(message, f"messages.{place}") for place, message in enumerate(messages)]
    continued = bool(continue_final_message)
    all_variables = {
        **(variables or {}),
        "add_generation_prompt": not continued if add_generation_prompt is None else add_generation_prompt,
        "continue_final_message": continued,
    }

    def encode() -> list[int]:
        return engine.encode_chat(plain, **all_variables)

    try:
        return await asyncio.to_thread(encode) if size_of(plain, all_variables) > LONG_TEXT else encode()
    except RecursionError:
        raise InvalidRequest("body", "must be a JSON object: it is nested too deeply") from None
    except InvalidRequest as error:
        raise InvalidRequest(re.sub(r"\[(\d+)\]", r".\1", error.param), error.said, hint=error.hint) from None


def _texts(message: ChatMessage) -> list[str]:
    content = message.content
    return [content] if isinstance(content, str) else [part.text for part in content or ()]


def _long_texts(messages: Sequence[ChatMessage]) -> list[str]:
    return [text for message in messages for text in _texts(message) if len(text) > LONG_TEXT]


def size_of(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> int:
    """About how many characters there are to render and to tokenize; a message without text costs something too."""
    return 50 * len(messages) + len(msgspec.json.encode((messages, variables)))


def _plain(message: ChatMessage, where: str) -> dict[str, Any]:
    """What the template gets: the fields that were given."""
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if message.reasoning is not None and message.reasoning != reasoning:
        raise InvalidRequest(f"{where}.reasoning", "differs from reasoning_content, must be the same: they mean the same")
    plain: dict[str, Any] = {"role": message.role}
    if isinstance(message.content, list):
        plain["content"] = [{"type": "text", "text": part.text} for part in message.content]
    elif message.content is not None:
        plain["content"] = message.content
    given = {
        "name": message.name,
        "tool_calls": message.tool_calls or None,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": reasoning,
        "reasoning": reasoning,
    }
    return plain | {name: value for name, value in given.items() if value is not None}


CHAT = (
    Route(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        "Answer a conversation",
        body=ChatRequest,
        answer=ChatAnswer,
        streams=True,
        events=ChatChunk,
    ),
)
