"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from sidestream.api.logprobs import CompletionLogprobs, Echo, Entries, TextOffsets, TokenTexts, completion_logprobs, echoed
from sidestream.api.openai import TOP_LOGPROBS, Asked, Choice, Chunk, Exchange, OpenAIRequest, asked_for, check_room
from sidestream.api.prompts import MAX_PROMPTS, read_prompts
from sidestream.api.route import Call, Route
from sidestream.api.shapes import Usage, flat_logprobs, usage_of
from sidestream.async_client import AsyncEngine
from sidestream.errors import InvalidRequest
from sidestream.output import Logprobs, Output

DEFAULT_TOKENS = 16  # OpenAI's
DEFAULT_HINT = "/v1/completions without max_tokens answers with 16 tokens at most, as OpenAI's API does; clients that want more say so"
NO_SUFFIX = msgspec.Meta(description="The model writes no text before a given end.")


class CompletionRequest(OpenAIRequest, kw_only=True, forbid_unknown_fields=True):
    prompt: Annotated[
        str | list[str | int | list[int]], msgspec.Meta(description="A text, token ids, or a list of texts or of lists of token ids.")
    ]
    echo: Annotated[bool, msgspec.Meta(description="The answer begins with the prompt; with logprobs, also theirs.")] | None = None
    logprobs: Annotated[int, TOP_LOGPROBS] | None = None
    best_of: Annotated[int, msgspec.Meta(ge=1, description="Only the same as n.")] | None = None
    suffix: Annotated[None, NO_SUFFIX] = None


class CompletionChoice(Choice, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(Chunk, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: Sequence[CompletionChoice]


class CompletionAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str


class Prompt(NamedTuple):
    given: str | list[int]
    ids: list[int]


async def completions(call: Call[CompletionRequest]) -> Response:
    body, engine = call.body, call.service.engine
    call.service.check_model(body.model)
    asked = _asked(body, engine)
    prompts = await _encoded(engine, body, asked)
    exchange = Exchange(call, [prompt.ids for prompt in prompts], asked, kind="cmpl", operation="text_completion")
    completion = _Completion(exchange, prompts, body)
    if asked.tokens_by_default:
        call.service.hint(DEFAULT_HINT)
    if body.stream:
        return await completion.stream()
    return await completion.answer(await exchange.answers())


class _Completion:
    """The prompts of one request on their way to the answer."""

    def __init__(self, exchange: Exchange, prompts: Sequence[Prompt], body: CompletionRequest) -> None:
        self._exchange = exchange
        self._prompts = prompts
        self._body = body
        self._texts = TokenTexts(exchange.tokenizer)
        self._echoes: dict[int, Echo] = {}  # by place of the prompt
        self._offsets: dict[int, TextOffsets] = {}  # by choice

    async def answer(self, outputs: Sequence[Output]) -> Response:
        exchange = self._exchange
        choices = [await self._choice(index, output, True, streamed=False) for index, output in enumerate(outputs)]
        return exchange.respond(
            CompletionAnswer(
                id=exchange.id,
                created=exchange.created,
                model=exchange.model,
                choices=choices,
                usage=usage_of(outputs),
                system_fingerprint=exchange.fingerprint,
            )
        )

    async def stream(self) -> Response:
        return await self._exchange.stream(CompletionChunk, self._parts)

    async def _parts(self, index: int, part: Output, first: bool) -> Sequence[Choice]:
        return [await self._choice(index, part, first, streamed=True)]

    async def _choice(self, index: int, output: Output, first: bool, *, streamed: bool) -> CompletionChoice:
        place = index // self._exchange.asked.sampling.n
        rest = await self._exchange.ending(index, output, streamed=streamed)
        choice = CompletionChoice(text=output.text, logprobs=await self._logprobs(index, place, output, first), **rest)
        if self._body.echo and first:
            choice.text = (await self._echo(place)).text + choice.text
        if self._body.return_token_ids and first:
            choice.prompt_token_ids = self._prompts[place].ids
        return choice

    async def _logprobs(self, index: int, place: int, output: Output, first: bool) -> Any:
        logprobs = output.logprobs
        if logprobs is None:
            return None
        if self._exchange.asked.flat_logprobs:
            return flat_logprobs(logprobs)
        entries = Entries.of_output(logprobs, output.token_ids)
        offsets = await self._offsets_of(index, place, output.token_ids)
        if not (first and len(logprobs.input)):
            return await completion_logprobs(self._texts, entries, offsets)
        prompt, prompt_offsets = await self._of_prompt(place, logprobs)
        if self._body.echo:
            return await completion_logprobs(self._texts, prompt.then(entries), prompt_offsets + offsets)
        made = await completion_logprobs(self._texts, entries, offsets)
        made.prompt = await completion_logprobs(self._texts, prompt, prompt_offsets)
        return made

    async def _of_prompt(self, place: int, logprobs: Logprobs) -> tuple[Entries, list[int]]:
        prompt = Entries.of_prompt(logprobs, self._prompts[place].ids)
        offsets = (await self._echo(place)).offsets
        return prompt, offsets[len(offsets) - len(prompt.tokens) :]

    async def _offsets_of(self, index: int, place: int, tokens: Sequence[int]) -> list[int]:
        if index not in self._offsets:
            start = len((await self._echo(place)).text) if self._body.echo else 0
            skip = self._exchange.asked.sampling.skip_special_tokens
            self._offsets[index] = TextOffsets(self._exchange.tokenizer, self._prompts[place].ids, start=start, skip_special_tokens=skip)
        return await self._offsets[index].feed(tokens)

    async def _echo(self, place: int) -> Echo:
        if place not in self._echoes:
            given, ids = self._prompts[place]
            skip = self._exchange.asked.sampling.skip_special_tokens
            self._echoes[place] = await echoed(self._exchange.tokenizer, given, ids, skip_special_tokens=skip)
        return self._echoes[place]


def _asked(body: CompletionRequest, engine: AsyncEngine) -> Asked:
    logprobs = None if body.logprobs is None else True
    asked = asked_for(body, logprobs=logprobs, top_logprobs="logprobs", default_tokens=DEFAULT_TOKENS, context=engine.context_length)
    if body.best_of not in (None, asked.sampling.n):
        raise InvalidRequest("best_of", f"got {body.best_of}, must be {asked.sampling.n}, the same as n: every choice is returned")
    if body.echo and asked.return_logprob:
        start = asked.outputs.get("logprob_start_len", 0)
        if start != 0:
            raise InvalidRequest("logprob_start_len", f"got {start}, must be 0 or left out with echo, which has the whole prompt")
        asked.outputs["logprob_start_len"] = 0
    return asked


async def _encoded(engine: AsyncEngine, body: CompletionRequest, asked: Asked) -> list[Prompt]:
    """The prompts and their token ids. Raises InvalidRequest and ContextLengthExceeded, naming the prompt."""
    one = isinstance(body.prompt, str) or isinstance(next(iter(body.prompt), None), int)
    given: Any = [body.prompt] if one else body.prompt
    names = ["prompt"] if one else [f"prompt.{place}" for place in range(len(given))]
    context = engine.context_length
    for name, prompt in zip(names, given, strict=True):
        if isinstance(prompt, list):
            check_room(name, len(prompt), asked, context)  # before its ids are looked at one by one
    most = min(MAX_PROMPTS, engine.facts.max_running + engine.config.max_queued_requests) if body.stream else MAX_PROMPTS
    read = await read_prompts(engine, body.prompt, "prompt", most=most)
    for name, ids in zip(names, read.ids, strict=True):
        check_room(name, len(ids), asked, context)
    return [Prompt(*each) for each in zip(given, read.ids, strict=True)]


COMPLETIONS = (
    Route(
        "POST",
        "/v1/completions",
        completions,
        "Continue a text",
        body=CompletionRequest,
        answer=CompletionAnswer,
        streams=True,
        events=CompletionChunk,
    ),
)
