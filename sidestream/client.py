"""`Engine`: the public class. Validates and tokenizes requests, hands them to the engine loop, and makes outputs of what comes back."""

from __future__ import annotations

import itertools
import queue
import secrets
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, cast

import numpy as np

from sidestream.answers import Choice, Delta, Prompt, StreamedChoice, deltas
from sidestream.assemble import Assembled, assemble
from sidestream.config import EngineConfig
from sidestream.engine.loop import EngineLoop
from sidestream.errors import EngineDead, InvalidRequest, QueueFull
from sidestream.messages import Abort, Call, EngineFailed, Outbound, StepOutputs, Stop, Submit
from sidestream.observe.progress import Progress, open_progress
from sidestream.output import Output
from sidestream.params import SamplingParams
from sidestream.prepare import PromptLike, encode, is_one_prompt, prepare

Event = tuple[Choice, Delta] | BaseException


class Engine:
    """An inference engine in this process. Safe to use from several threads; close it, or use it as a context manager.

    Options are those of `EngineConfig` (docs/options.md); raises ConfigError or ModelError when it cannot start.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.config = EngineConfig.from_env(model, **options)
        self._outbox: queue.SimpleQueue[Outbound | None] = queue.SimpleQueue()
        self._choices: dict[int, Choice] = {}  # open ones, by key
        self._rids: set[str] = set()
        self._keys = itertools.count(1)
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._parts = self._assemble()
        limit = self._parts.max_running + self.config.max_queued_requests
        self._places = threading.BoundedSemaphore(limit)
        self._place_limit = limit
        self._threads = [
            threading.Thread(target=self._parts.loop.run, name="sidestream-engine", daemon=True),
            threading.Thread(target=self._receive, name="sidestream-receive", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._closer = weakref.finalize(self, _close, self._parts.loop, self._outbox, self._threads)

    def _assemble(self) -> Assembled:
        return assemble(self.config, self._outbox.put)

    # Asking

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        rid: str | Sequence[str] | None = None,
        progress: bool | None = None,
        **outputs: Any,
    ) -> Output | list[Output]:
        """Answer one prompt or many. A prompt is text or token ids; `outputs` are the keywords of `OutputParams`.

        One prompt gives one Output (a list if `n > 1`), a list of prompts a list, `n` outputs per prompt in order. Every keyword takes one
        value or a list with one per prompt. `progress` shows a bar (default: for many prompts on a terminal).
        Raises InvalidRequest before anything is queued, EngineDead if the engine stops.
        """
        many = not is_one_prompt(prompts)
        listed = list(cast("Sequence[PromptLike]", prompts)) if many else [cast(PromptLike, prompts)]
        answers = self._answer([encode(self._parts, prompt) for prompt in listed], sampling_params, rid, progress, outputs)
        return answers if many or len(answers) != 1 else answers[0]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        rid: str | Sequence[str] | None = None,
        progress: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **outputs: Any,
    ) -> Output | list[Output]:
        """Like `generate`, for conversations: a list of messages with `role` and `content`, or a list of such lists."""
        many = bool(messages) and isinstance(messages[0], (list, tuple))
        listed: Sequence[Any] = messages if many else [messages]
        ids = [self.encode_chat(conversation, **(chat_template_kwargs or {})) for conversation in listed]
        answers = self._answer(ids, sampling_params, rid, progress, outputs)
        return answers if many or len(answers) != 1 else answers[0]

    def stream(
        self, prompt: PromptLike, sampling_params: SamplingParams | None = None, *, rid: str | None = None, **outputs: Any
    ) -> Iterator[Output]:
        """Answer one prompt in parts: each Output holds only what is new, `finish_reason` is set in the last part of each `index`.

        The request is checked and queued now; it is aborted when the iterator is closed early. Raises QueueFull if the queue is.
        """
        prepared = self._prepare([encode(self._parts, prompt)], sampling_params, rid, outputs, StreamedChoice)[0]
        if not self._take_place(blocking=False):
            raise QueueFull(f"{self._place_limit} requests are running or waiting", hint="Try again later, or raise --max-queued-requests.")
        self._submit(prepared)
        parts = self._parts_of(prepared)
        next(parts)  # started: from now on closing it aborts the request
        return cast("Iterator[Output]", parts)

    def _parts_of(self, prompt: Prompt) -> Iterator[Output | None]:
        unfinished = len(prompt.choices)
        try:
            yield None
            while unfinished:
                choice, delta = self._next(prompt.events)
                unfinished -= delta.finish is not None
                if delta.finish is not None and delta.finish.error is not None:
                    raise delta.finish.error
                assert isinstance(choice, StreamedChoice)
                part = choice.part(delta)
                if part is not None:
                    yield part
        finally:
            if unfinished:
                self._give_up(prompt)

    def _give_up(self, prompt: Prompt) -> None:
        self._parts.loop.inbox.put(Abort(prompt.rid, frozenset(choice.key for choice in prompt.choices)))

    def abort(self, rid: str) -> None:
        """End a request; what was computed for it is returned with `finish_reason="abort"`. Unknown ids are ignored."""
        with self._lock:  # not between the choices of a prompt that is being submitted
            self._parts.loop.inbox.put(Abort(rid))

    def flush_cache(self) -> int:
        """Drop the cached prefixes that no running request uses. Returns the number of tokens dropped."""
        return cast(int, self._ask(lambda loop: loop.flush_cache()))

    def stats(self) -> dict[str, Any]:
        """Counters of the engine, taken between two steps (docs/outputs.md, The ledger)."""
        return cast("dict[str, Any]", self._ask(lambda loop: loop.stats()))

    def check(self) -> None:
        """Verify that every page is free, cached or owned, exactly once. Raises AssertionError."""
        self._ask(lambda loop: loop.check())

    @property
    def tokenizer(self) -> Any:
        return self._parts.tokenizer

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and output together."""
        return self._parts.limits.context

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Token ids of a conversation by the model's chat template."""
        return self._parts.tokenizer.encode_chat(self._parts.chat_template.render(messages, **kwargs))

    def close(self) -> None:
        """Abort what is open and end the engine's threads. Idempotent."""
        self._failure = self._failure or EngineDead("the engine is closed")
        self._closer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # From requests to answers

    def _prepare(
        self, ids: list[list[int]], sampling_params: Any, rid: Any, outputs: Mapping[str, Any], kind: type[Choice]
    ) -> list[Prompt]:
        prompts = prepare(self._parts, ids, sampling_params, rid, outputs, max_output_bytes=self.config.max_output_bytes)
        for prompt in prompts:
            prompt.choices = [kind(prompt, index, next(self._keys)) for index in range(prompt.sampling.n)]
        return prompts

    def _answer(
        self, ids: list[list[int]], sampling_params: Any, rid: Any, progress: bool | None, outputs: Mapping[str, Any]
    ) -> list[Output]:
        if not ids:
            return []
        prompts = self._prepare(ids, sampling_params, rid, outputs, Choice)
        answers: dict[int, Output] = {}
        total = sum(len(prompt.choices) for prompt in prompts)
        submitted = 0
        try:
            with open_progress(progress, total) as bar:
                while len(answers) < total:
                    # Feed the queue as far as there is room; wait for a place only when nothing of this call is under way.
                    while submitted < len(prompts) and self._take_place(
                        blocking=submitted == 0 or self._idle(prompts[:submitted], answers)
                    ):
                        submitted += 1  # first: an interrupted one is given up too
                        self._submit(prompts[submitted - 1])
                    self._collect(prompts[0].events, answers, bar)
        except BaseException:
            for prompt in prompts[:submitted]:
                self._give_up(prompt)
            raise
        return [answers[choice.key] for prompt in prompts for choice in prompt.choices]

    @staticmethod
    def _idle(submitted: Sequence[Prompt], answers: Mapping[int, Output]) -> bool:
        return sum(len(prompt.choices) for prompt in submitted) == len(answers)

    def _collect(self, events: queue.SimpleQueue[Event], answers: dict[int, Output], bar: Progress) -> None:
        """Wait for the next finished choice."""
        choice, delta = self._next(events)
        if delta.finish is not None:
            if delta.finish.error is not None:
                raise delta.finish.error
            output = choice.output()
            choice.rows = [] if choice.index else choice.rows  # the first choice's prompt rows serve the others
            answers[choice.key] = output
            bar.advance(output.completion_tokens)

    def _take_place(self, *, blocking: bool) -> bool:
        if self._failure is not None:
            raise _dead(self._failure)
        while not self._places.acquire(blocking=blocking, timeout=0.5 if blocking else None):
            if not blocking:
                return False
            if self._failure is not None:  # an engine that has stopped gives no place back
                raise _dead(self._failure)
        return True

    def _submit(self, prompt: Prompt) -> None:
        """Queue a prompt for which a place was taken. Gives the place back if it raises, also when it is interrupted."""
        submitted = False
        try:
            prompt_ids = np.asarray(prompt.ids, np.int32)
            seed = prompt.sampling.seed
            sampling = prompt.sampling if seed is not None else _with_seed(prompt.sampling, secrets.randbits(63))
            primary = prompt.choices[0].key
            messages = [
                Submit(choice.key, prompt.rid, choice.index, prompt_ids, sampling, prompt.plan, primary if choice.index else None)
                for choice in prompt.choices
            ]
            with self._lock:
                if self._failure is not None:
                    raise _dead(self._failure)
                if prompt.rid in self._rids:
                    raise InvalidRequest("rid", f"got {prompt.rid!r}, must differ from the ids of requests that are still open")
                self._rids.add(prompt.rid)
                self._choices.update((choice.key, choice) for choice in prompt.choices)
                submitted = True
                for message in messages:
                    self._parts.loop.inbox.put(message)
        finally:
            if not submitted:
                self._places.release()

    def _next(self, events: queue.SimpleQueue[Event]) -> tuple[Choice, Delta]:
        event = events.get()
        if isinstance(event, BaseException):
            raise _dead(event)
        return event

    def _receive(self) -> None:
        """The receiving thread: routes what the engine says to the calls that wait for it."""
        while (message := self._outbox.get()) is not None:
            if isinstance(message, EngineFailed):
                self._fail(message.error)
            else:
                self._route(message)
        self._fail(EngineDead("the engine is closed"))

    def _route(self, step: StepOutputs) -> None:
        for key, cached in step.cached_tokens.items():
            choice = self._choices.get(key)
            if choice is not None and choice.index == 0:
                choice.prompt.cached_tokens = cached
        for key, delta in deltas(step).items():
            choice = self._choices[key]
            if delta.finish is not None:
                self._forget(choice)
            if isinstance(choice, StreamedChoice):
                choice.prompt.events.put((choice, delta))
            else:
                choice.take(delta)
                if delta.finish is not None:
                    choice.prompt.events.put((choice, delta))

    def _forget(self, choice: Choice) -> None:
        with self._lock:
            del self._choices[choice.key]
            if all(other.key not in self._choices for other in choice.prompt.choices):
                self._rids.discard(choice.prompt.rid)
                self._places.release()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error
            waiting = {id(choice.prompt.events): choice.prompt.events for choice in self._choices.values()}
            self._choices.clear()
        for events in waiting.values():
            events.put(error)

    def _ask(self, ask: Any) -> Any:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def guarded(loop: EngineLoop) -> Any:
            try:
                return ask(loop)
            except Exception as error:
                return error

        if self._failure is not None:
            raise _dead(self._failure)
        self._parts.loop.inbox.put(Call(guarded, answers.put))
        while True:
            try:
                answer = answers.get(timeout=1.0)
                break
            except queue.Empty:
                if self._failure is not None:
                    raise _dead(self._failure) from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _close(loop: EngineLoop, outbox: queue.SimpleQueue[Outbound | None], threads: Sequence[threading.Thread]) -> None:
    loop.inbox.put(Stop())
    threads[0].join()
    outbox.put(None)
    if threading.current_thread() is not threads[1]:
        threads[1].join()


def _dead(error: BaseException) -> EngineDead:
    if isinstance(error, EngineDead):
        return EngineDead(error.message)
    dead = EngineDead(f"the engine stopped: {type(error).__name__}: {error}")
    dead.__cause__ = error
    return dead


def _with_seed(sampling: SamplingParams, seed: int) -> SamplingParams:
    """A seed of its own for a request that brings none: two such requests differ."""
    from dataclasses import replace

    return replace(sampling, seed=seed)
