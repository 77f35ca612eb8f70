"""`POST /generate`: SGLang's request and answer, with every output of ours."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from sidestream.api.fields import called
from sidestream.api.generation import Generation
from sidestream.api.hidden import Packed, hidden_json, safetensors_response
from sidestream.api.meta_info import FlatLists, LogprobLists, MetaInfo, finish_reason
from sidestream.api.native_body import Asked, Generate, asked_for
from sidestream.api.route import Call, Route
from sidestream.api.sse import DONE, EventStream, event, json_response
from sidestream.output import Output


class GenerateAnswer(msgspec.Struct, kw_only=True):
    """One answer; a list of prompts, or n above 1, gives a list of them."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET  # in a stream: which of all answers, those of the first prompt first
    prompt_token_ids: list[int] | UnsetType = UNSET


class _Exchange:
    """A request on its way to its answers."""

    def __init__(self, call: Call[Generate], asked: Asked) -> None:
        self.call = call
        self.asked = asked
        self.packed = Packed({})
        with called(asked.names):
            self.generation = Generation(call, asked.prompts, asked.sampling, asked.outputs, rid=asked.rids, operation="text_completion")

    @property
    def single(self) -> bool:
        return not self.asked.listed and self.asked.sampling[0].n == 1

    async def respond(self) -> Response:
        """All answers as one body."""
        with called(self.asked.names):
            outputs = await self.generation.answers()
        places = [place for place, sampling in enumerate(self.asked.sampling) for _ in range(sampling.n)]
        answers = [await _Answer(self, place, output.index).told(output) for place, output in zip(places, outputs, strict=True)]
        answer: Any = answers[0] if self.single else answers
        if self.asked.hidden_format == "safetensors":
            return safetensors_response(answer, self.packed.tensors)
        return json_response(answer)

    async def stream(self) -> Response:
        with called(self.asked.names):
            await self.generation.open()
        return EventStream(self._events(), id=self.call.id)

    async def _events(self) -> AsyncIterator[bytes]:
        answers: dict[int, _Answer] = {}
        async with aclosing(self.generation.parts()) as parts:
            async for place, part in parts:
                index = self.asked.first_answer(place) + part.index
                if index not in answers:
                    answers[index] = _Answer(self, place, part.index)
                yield event(await answers[index].told(part, index))
        yield DONE


class _Answer:
    """What one choice has said so far."""

    def __init__(self, exchange: _Exchange, place: int, index: int) -> None:
        asked, body = exchange.asked, exchange.call.body
        self._exchange = exchange
        self._place = place
        self._tensor = "hidden_states" if exchange.single else f"{asked.first_answer(place) + index}.hidden_states"
        self._wanted = asked.wanted[place]
        self._text = ""
        self._tokens: list[int] = []
        self._sent_rows = False
        tokenizer = exchange.call.service.any_engine.tokenizer
        text_of = tokenizer.token_text if body.return_text_in_logprobs else _no_text
        self._lists = FlatLists() if asked.flat else LogprobLists(asked.prompts[place], self._wanted.logprob_start_len, text_of)

    async def told(self, part: Output, index: int | UnsetType = UNSET) -> GenerateAnswer:
        """With a part of a stream, or the whole."""
        body = self._exchange.call.body
        if body.incremental:
            self._text, self._tokens = "", []
            self._lists.clear()
        self._text += part.text
        self._tokens += part.token_ids
        answer = GenerateAnswer(text=self._text, output_ids=self._tokens, meta_info=await self._meta_info(part), index=index)
        if body.return_prompt_token_ids:
            answer.prompt_token_ids = self._exchange.asked.prompts[self._place]
        return answer

    async def _meta_info(self, part: Output) -> MetaInfo:
        meta = MetaInfo(
            id=part.rid,
            finish_reason=finish_reason(part),
            prompt_tokens=part.prompt_tokens,
            completion_tokens=part.completion_tokens,
            cached_tokens=part.cached_tokens,
            weight_version=self._exchange.call.service.weights.version,
        )
        if part.logprobs is not None:
            await self._lists.add(part.logprobs, part.token_ids)
            meta.logprob_start_len = self._wanted.logprob_start_len
            for name, value in self._lists.written().items():
                setattr(meta, name, value)
        if part.hidden_states is not None and (part.hidden_states.shape[0] or (part.finish_reason is not None and not self._sent_rows)):
            meta.hidden_states = await self._hidden_states(part)
        if part.finish_reason is not None:
            meta.e2e_latency = self._exchange.generation.seconds
            meta.copied_bytes = UNSET if part.copied_bytes is None else dict(part.copied_bytes)
        return meta

    async def _hidden_states(self, part: Output) -> Any:
        form = self._exchange.asked.hidden_format
        if form == "safetensors":
            return self._exchange.packed.add(self._tensor, part.hidden_states)
        later, self._sent_rows = self._sent_rows, True  # only what comes first begins with the prompt's rows: the lists join to the whole
        return await hidden_json(part, form, start=self._wanted.hidden_states_start, streamed=later)


def _no_text(token: int) -> None:
    return None


async def generate(call: Call[Generate]) -> Response:
    service, body = call.service, call.body
    service.check_model(body.model)
    exchange = _Exchange(call, await asked_for(service.engine, body))
    return await exchange.stream() if body.stream else await exchange.respond()


NATIVE = (
    Route(
        "POST",
        "/generate",
        generate,
        "Generate",
        body=Generate,
        answer=GenerateAnswer | list[GenerateAnswer],
        streams=True,
        events=GenerateAnswer,
    ),
)
