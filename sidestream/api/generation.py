"""What every generating route does: check, queue, measure, and hand out answers whole or in parts."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from sidestream.api.route import Call
from sidestream.api.service import Service
from sidestream.errors import EngineDead, InvalidRequest
from sidestream.observe.tracing import REQUEST_ATTRIBUTES, Span
from sidestream.options import fields_of
from sidestream.output import Output
from sidestream.params import OutputParams, SamplingParams, outputs_per_prompt, per_prompt


class Generation:
    """One request to the engine: prompts of token ids, each with `sampling.n` choices. Raises InvalidRequest and Unavailable."""

    def __init__(
        self,
        call: Call[Any],
        ids: list[list[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        outputs: dict[str, Any],
        *,
        rid: str | list[str] | None = None,
        operation: str = "text_completion",
    ) -> None:
        self.service: Service = call.service
        self.ids = ids
        self._sampling = sampling
        self._outputs = outputs
        # A client may use one X-Request-Id for several requests at a time.
        self._rid: Any = rid if rid is not None else [f"{call.id}-{secrets.token_hex(4)}" for _ in ids]
        self._engine = self.service.engine
        check_ceiling(self.service.config.hidden_states, outputs)
        self._started = time.monotonic()
        self._open = _choices(sampling, len(ids))  # choices not finished
        self._span: Span = self.service.tracing.start(
            operation, self.service.model_names[0], rid=call.id, headers=call.request.headers, request=_attributes(sampling)
        )

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._started

    async def answers(self) -> list[Output]:
        """All choices of the first prompt, then those of the next. Cancelling it aborts them."""
        self._received()
        limit = self._engine.facts.max_running + self._engine.config.max_queued_requests
        try:
            if len(self.ids) <= limit:
                outputs = await self._answer(self.ids, self._sampling, self._rid, self._outputs, wait=False)
            else:
                outputs = await self._answer_in_groups(max(1, limit // 2))
        except BaseException as error:
            self._failed(error)
            raise
        self._finished(outputs)
        for output in outputs:  # of an answer that came whole, the mean gap
            if output.timing and output.timing.first_token is not None:
                self.service.metrics.token_gap(output.timing.total - output.timing.first_token, output.completion_tokens - 1)
        return outputs

    async def _answer(self, ids: list[list[int]], sampling: Any, rid: Any, outputs: dict[str, Any], *, wait: bool) -> list[Output]:
        got = await self._engine.generate(ids, sampling, rid=rid, wait=wait, **outputs)
        return got if isinstance(got, list) else [got]

    async def _answer_in_groups(self, size: int) -> list[Output]:
        """A list longer than the queue, group by group: it is no reason to refuse the requests of others."""
        count = len(self.ids)
        wanted = outputs_per_prompt(self._outputs, count)
        sampling, rids = per_prompt("sampling_params", self._sampling, count), per_prompt("rid", self._rid, count)
        outputs: list[Output] = []
        for first in range(0, count, size):
            group = slice(first, first + size)
            spread = {field.name: [getattr(each, field.name) for each in wanted[group]] for field in fields_of(OutputParams)}
            outputs += await self._answer(self.ids[group], sampling[group], rids[group], spread, wait=first > 0)
        return outputs

    async def parts(self) -> AsyncGenerator[tuple[int, Output], None]:
        """`(which prompt, part)`, in the order of coming. Closing it early aborts what is not finished.

        Queued before the first part is awaited: call `open` first where an error must still become a status.
        """
        stream = await self.open()
        metrics = self.service.metrics
        latest: dict[tuple[int, int], float] = {}
        done: list[Output] = []
        try:
            async for place, part in stream:
                now, key = time.monotonic(), (place, part.index)
                if key not in latest:
                    self._span.event("first_token")
                elif part.token_ids:
                    metrics.token_gap(now - latest[key], len(part.token_ids))
                latest[key] = now
                if part.finish_reason is not None:
                    done.append(part)
                yield place, part
            self._finished(done)
        except BaseException as error:
            self._failed(error)
            raise
        finally:
            await stream.aclose()

    async def open(self) -> Any:
        """Queue the request for `parts`: what is wrong with it is raised here. Idempotent."""
        if self._stream is None:
            self._received()
            try:
                await self._engine.compile(self.ids, self._sampling)
                self._stream = self._engine.stream_many(self.ids, self._sampling, rid=self._rid, **self._outputs)
            except BaseException as error:
                self._failed(error)
                raise
        return self._stream

    _stream: Any = None

    def _received(self) -> None:
        """Each choice is a request of its own, as in the engine's counters."""
        for _ in range(self._open):
            self.service.metrics.request_received()

    def _finished(self, outputs: Sequence[Output]) -> None:
        metrics = self.service.metrics
        self._open -= len(outputs)
        for output in outputs:
            timing = output.timing
            assert timing is not None, "it is finished"
            if timing.first_token is not None:
                metrics.first_token(timing.first_token)
            metrics.request_finished(
                output.finish_reason or "abort",
                e2e_seconds=timing.total,
                queue_seconds=timing.queued,
                prompt_tokens=output.prompt_tokens,
                completion_tokens=output.completion_tokens,
                cached_tokens=output.cached_tokens,
            )
        self._span.finish(
            [output.finish_reason or "abort" for output in outputs],
            prompt_tokens=sum(output.prompt_tokens for output in outputs if output.index == 0),
            completion_tokens=sum(output.completion_tokens for output in outputs),
            cached_tokens=sum(output.cached_tokens for output in outputs if output.index == 0),
        )

    def _failed(self, error: BaseException) -> None:
        code = getattr(error, "code", "client_left")
        while self._open:
            self._open -= 1
            self.service.metrics.request_aborted("engine_error" if isinstance(error, EngineDead) else code)
        self._span.fail(code, str(error))


def _choices(sampling: SamplingParams | Sequence[SamplingParams], prompts: int) -> int:
    return prompts * sampling.n if isinstance(sampling, SamplingParams) else sum(each.n for each in sampling)


def _attributes(sampling: SamplingParams | Sequence[SamplingParams]) -> dict[str, Any]:
    """What a trace says of the request."""
    first = sampling if isinstance(sampling, SamplingParams) else sampling[0]
    return {name: getattr(first, name) for name in REQUEST_ATTRIBUTES if hasattr(first, name)}


def check_ceiling(ceiling: str, outputs: dict[str, Any]) -> None:
    """The operator's ceiling over hidden states: off, last or full. Raises InvalidRequest."""
    given = outputs.get("return_hidden_states", False)
    for wanted in given if isinstance(given, list) else [given]:
        _check_mode(ceiling, wanted)


def _check_mode(ceiling: str, wanted: bool | str) -> None:
    if wanted and (ceiling == "off" or (ceiling == "last" and wanted is True)):
        allowed = "false" if ceiling == "off" else 'false or "last"'
        message = f"got {'true' if wanted is True else repr(wanted)}, must be {allowed} on this server"
        raise InvalidRequest("return_hidden_states", message, hint=f"It runs with --hidden-states {ceiling}.")
