"""What the OpenAI routes share: the fields of a request, their meaning in our own words, and what all parts of an answer have."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from sidestream import __version__
from sidestream.api.errors import Aborted
from sidestream.api.fields import DECLARED, HiddenStatesFormat, LogprobsFormat, Shared, called, params_of
from sidestream.api.generation import Generation
from sidestream.api.hidden import Packed, check_format, hidden_json, safetensors_response
from sidestream.api.route import Call
from sidestream.api.service import Service, report_of
from sidestream.api.shapes import Usage, usage_of
from sidestream.api.sse import DONE, EventStream, event, json_response
from sidestream.api.structured import ResponseFormat, StructuredOutputs, grammar_fields
from sidestream.errors import ContextLengthExceeded, InvalidRequest
from sidestream.options import shown
from sidestream.output import Output
from sidestream.params import OutputParams, SamplingParams

MAX_TOP_LOGPROBS = 20  # in OpenAI's own fields; top_logprobs_num goes further
MAX_RID = 128  # characters

IGNORED = msgspec.Meta(description="Accepted and ignored: it changes no answer.")
NOT_CUT = msgspec.Meta(description="A prompt is never cut: shorten it where it is made.")
NOT_SALTED = msgspec.Meta(description="Cached prefixes are shared by all requests; --disable-radix-cache turns the cache off.")
MAX_TOKENS = msgspec.Meta(ge=DECLARED["max_new_tokens"].option.low, description=DECLARED["max_new_tokens"].option.help)
MIN_TOKENS = msgspec.Meta(ge=DECLARED["min_new_tokens"].option.low, description=DECLARED["min_new_tokens"].option.help)
TOP_LOGPROBS = msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS, description="Alternatives returned for each token, best first.")


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: Annotated[bool, msgspec.Meta(description="A last chunk without choices has the usage.")] | None = None
    continuous_usage_stats: Annotated[bool, msgspec.Meta(description="Every chunk has the usage so far.")] | None = None
    include_obfuscation: Annotated[bool, IGNORED] | None = None


class OpenAIRequest(Shared, kw_only=True, forbid_unknown_fields=True):
    """The fields that both routes have."""

    model: Annotated[str, msgspec.Meta(description="Name of the model; may be left out.")] | None = None
    stream: Annotated[bool, msgspec.Meta(description="Answer with server-sent events.")] | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, MAX_TOKENS] | None = None
    max_completion_tokens: Annotated[int, MAX_TOKENS] | None = None
    min_tokens: Annotated[int, MIN_TOKENS] | None = None
    rid: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_RID, description="Id of the request, for /abort_request.")] | None = None
    hidden_states_format: Annotated[HiddenStatesFormat, msgspec.Meta(description="How hidden states are written.")] | None = None
    logprobs_format: Annotated[LogprobsFormat, msgspec.Meta(description="OpenAI's objects, or base64 arrays.")] | None = None
    return_token_ids: Annotated[bool, msgspec.Meta(description="Return prompt_token_ids and token_ids.")] | None = None

    user: Annotated[str, IGNORED] | None = None
    metadata: Annotated[dict[str, Any], IGNORED] | None = None
    service_tier: Annotated[str, IGNORED] | None = None
    safety_identifier: Annotated[str, IGNORED] | None = None
    prompt_cache_key: Annotated[str, IGNORED] | None = None
    prompt_cache_retention: Annotated[str, IGNORED] | None = None
    priority: Annotated[Literal[0], msgspec.Meta(description="Requests have no priorities.")] | None = None

    response_format: Annotated[ResponseFormat, msgspec.Meta(description="Which form the text has.")] | None = None
    structured_outputs: Annotated[StructuredOutputs, msgspec.Meta(description="The same, in vLLM's words.")] | None = None

    # Null is all that these may be; the description says why.
    truncate_prompt_tokens: Annotated[None, NOT_CUT] = None
    cache_salt: Annotated[None, NOT_SALTED] = None


# From a request to what the engine is asked


@dataclass(frozen=True)
class Asked:
    """What a request asks for, in our own words."""

    sampling: SamplingParams
    outputs: dict[str, Any]  # keywords for generate
    names: Mapping[str, str]  # what the request calls our fields, where that is something else
    tokens_by_default: bool  # the request does not say how many
    return_logprob: bool
    flat_logprobs: bool
    hidden_format: HiddenStatesFormat


def asked_for(body: OpenAIRequest, *, logprobs: bool | None, top_logprobs: str, default_tokens: int, context: int) -> Asked:
    """`logprobs` as the route's own field means it; `top_logprobs` is the name of its field for alternatives. Raises InvalidRequest."""
    max_name, max_tokens = one_of(body, "max_tokens", "max_completion_tokens", "max_new_tokens")
    min_name, min_tokens = one_of(body, "min_tokens", "min_new_tokens")
    top_name, top = one_of(body, top_logprobs, "top_logprobs_num")
    grammar, grammar_names = grammar_fields(body)
    names = {"max_new_tokens": max_name, "min_new_tokens": min_name, "top_logprobs_num": top_name, **grammar_names}
    renamed = {
        # The context bounds it too, so a number of any size is a good one.
        "max_new_tokens": default_tokens if max_tokens is None else min(max_tokens, context),
        "min_new_tokens": min_tokens,
        "top_logprobs_num": top,
        "return_logprob": logprobs or None,
        **grammar,
    }
    with called(names):
        sampling, outputs = params_of(body, renamed)
    if "hidden_states_start" in outputs:  # there is no row so late: any such number gives none
        outputs["hidden_states_start"] = min(outputs["hidden_states_start"], context)
    return_logprob = OutputParams(**outputs).return_logprob
    if logprobs is False and return_logprob:
        raise InvalidRequest("logprobs", "got false, must be true or left out beside fields that ask for logprobs")
    if body.logprobs_format == "flat" and not return_logprob:
        raise InvalidRequest("logprobs_format", "got 'flat', must be left out without logprobs")
    form = check_format(body.hidden_states_format, wanted=outputs.get("return_hidden_states"), streamed=bool(body.stream))
    return Asked(sampling, outputs, names, max_tokens is None, return_logprob, body.logprobs_format == "flat", form)


def one_of(body: msgspec.Struct, *names: str) -> tuple[str, Any]:
    """The name and the value of the field among synonyms that was given; the last name and None if none was.

    Raises InvalidRequest if they contradict each other.
    """
    found = [(name, value) for name in names if (value := getattr(body, name)) is not None]
    if not found:
        return names[-1], None
    (name, value), *others = found
    for other, theirs in others:
        if theirs != value:
            raise InvalidRequest(name, f"got {shown(value)} beside {other}={shown(theirs)}, must be the same: they mean the same")
    return name, value


def check_room(param: str, count: int, asked: Asked, context: int, *, least: bool = False) -> None:
    """Refuse a prompt of `count` tokens (at least, if so) that leaves no room for an answer, in the words that OpenAI's clients look for.

    An answer that would go beyond the context is not refused: it ends there. Raises ContextLengthExceeded.
    """
    if count > context or (count == context and asked.sampling.max_new_tokens > 0):
        full = ", which leaves no room for an answer" if count == context else ""
        sent = f"{'at least ' if least else ''}{count} tokens were sent"
        said = f"This model's maximum context length is {context} tokens. However, {sent}{full}."
        raise ContextLengthExceeded(param, said, hint=f"Shorten the {'messages' if param == 'messages' else 'prompt'}.")


# From the engine's outputs to answers


class Choice(msgspec.Struct, kw_only=True):
    """What choices of both routes have, whole or in a chunk. Fields that were not asked for, or come later, are left out."""

    index: int
    logprobs: Any = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    matched_stop: str | int | UnsetType | None = UNSET
    stop_reason: str | int | UnsetType | None = UNSET
    hidden_states: Any | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Chunk(msgspec.Struct, kw_only=True):
    """Each route has its own."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[Choice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Exchange:
    """A request of one of the routes on its way to the answer. Raises InvalidRequest, ModelError and Unavailable."""

    def __init__(self, call: Call[Any], ids: list[list[int]], asked: Asked, *, kind: str, operation: str) -> None:
        body: OpenAIRequest = call.body
        service: Service = call.service
        self.asked = asked
        self.id = body.rid or f"{kind}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model = service.check_model(body.model)
        self.tokenizer = service.engine.tokenizer
        self._body = body
        self._call = call
        self._eos = frozenset(service.engine.facts.eos_token_ids)
        rids = self.id if len(ids) == 1 else [f"{self.id}-{place}" for place in range(len(ids))]
        self._generation = Generation(call, ids, asked.sampling, asked.outputs, rid=rids, operation=operation)
        self._packed = Packed({})
        self.reasoning_tokens: dict[int, int] = {}  # by choice, as far as it has come
        self._seen: set[int] = set()  # choices of which hidden states were sent

    @property
    def fingerprint(self) -> str:
        return fingerprint(self._call.service)

    async def answers(self) -> list[Output]:
        """Raises Aborted, what is wrong with the request, and what the engine says."""
        with called(self.asked.names):
            outputs = await self._generation.answers()
        for output in outputs:
            check_not_aborted(output)
        return outputs

    async def ending(self, index: int, output: Output, *, streamed: bool) -> dict[str, Any]:
        """The keywords of a choice that do not depend on the route."""
        made: dict[str, Any] = {"index": index}
        reason = output.finish_reason
        if reason is not None and reason != "abort":
            matched = output.matched_stop
            passed = matched in self._eos and matched not in self.asked.sampling.stop_token_ids
            made |= {"finish_reason": reason, "matched_stop": matched, "stop_reason": None if passed else matched}
        if output.hidden_states is not None and (not streamed or output.hidden_states.shape[0] or reason is not None):
            made["hidden_states"] = await self._hidden(index, output)
        if self._body.return_token_ids:
            made["token_ids"] = list(output.token_ids)
        return made

    async def _hidden(self, index: int, output: Output) -> Any:
        form = self.asked.hidden_format
        if form == "safetensors":
            return self._packed.add(f"choices.{index}.hidden_states", output.hidden_states)
        later = index in self._seen  # only what comes first begins with the rows of the prompt, so that lists join to the whole
        self._seen.add(index)
        return await hidden_json(output, form, start=self.asked.outputs.get("hidden_states_start", 0), streamed=later)

    def respond(self, answer: Any) -> Response:
        """The whole answer as a body."""
        return safetensors_response(answer, self._packed.tensors) if self.asked.hidden_format == "safetensors" else json_response(answer)

    async def stream(
        self, kind: type[Chunk], choices_of: Callable[[int, Output, bool], Awaitable[Sequence[Choice]]], **first: Any
    ) -> Response:
        """The answer as events. `choices_of(index, part, first)` gives the choices that a part becomes, each a chunk of its own.

        `first` are fields of the first chunk. What is wrong with the request is raised here.
        """
        with called(self.asked.names):
            await self._generation.open()
        return EventStream(self._events(kind, choices_of, first), id=self._call.id)

    async def _events(
        self, kind: type[Chunk], choices_of: Callable[[int, Output, bool], Awaitable[Sequence[Choice]]], first: dict[str, Any]
    ) -> AsyncIterator[bytes]:
        options = self._body.stream_options or StreamOptions()
        common: dict[str, Any] = {
            "id": self.id,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }
        nothing: Any = None if options.include_usage else UNSET
        latest: dict[int, Output] = {}
        async with aclosing(self._generation.parts()) as parts:
            async for place, part in parts:
                index = place * self.asked.sampling.n + part.index
                choices = await choices_of(index, part, index not in latest)
                latest[index] = part
                usage = usage_of(tuple(latest.values()), self.reasoning_tokens) if options.continuous_usage_stats else nothing
                yield b"".join(
                    event(kind(choices=[choice], usage=usage, **common, **(first if not at else {}))) for at, choice in enumerate(choices)
                )
                first = {}
                check_not_aborted(part)
        last = (
            event(kind(choices=[], usage=usage_of(tuple(latest.values()), self.reasoning_tokens), **common))
            if options.include_usage
            else b""
        )
        yield last + DONE


def check_not_aborted(output: Output) -> None:
    """OpenAI's clients know no such reason of an end. Raises Aborted."""
    if output.finish_reason == "abort":
        raise Aborted(f"the request {output.rid!r} was aborted after {output.completion_tokens} tokens")


def fingerprint(service: Service) -> str:
    """Changes when the same request may get other numbers."""
    facts, updates = service.any_engine.facts, report_of(service.any_engine).get("weight_version", 0)
    return _digest(facts.name, facts.dtype, facts.backend, facts.device, service.any_engine.config.quantization, *service.weights, updates)


@cache
def _digest(*facts: object) -> str:
    text = "\n".join(map(str, (*facts, __version__, version("torch"))))
    return f"fp_{sha256(text.encode()).hexdigest()[:12]}"
