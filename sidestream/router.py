"""Between the calls of an engine and its loop: which requests are open, which wait for a place, and who gets what the loop says."""

from __future__ import annotations

import queue
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sidestream.answers import Choice, Delta, Prompt, StreamedChoice, deltas
from sidestream.engine.loop import EngineLoop
from sidestream.errors import EngineDead, InvalidRequest, QueueFull
from sidestream.messages import Abort, EngineFailed, Finish, Outbound, StepOutputs, Submit


class Router:
    """All that the receiving thread needs. It does not refer to the `Engine`, so that one nobody uses any more is collected and ends.

    `limit` prompts may be in the loop at a time; the others of a call are held back, and calls take turns when a place becomes free.
    """

    def __init__(self, loop: EngineLoop, outbox: queue.SimpleQueue[Outbound | None], limit: int) -> None:
        self._loop = loop
        self._outbox = outbox
        self._limit = limit
        self._lock = threading.Lock()
        self._placed: set[str] = set()  # prompts that the loop has, by rid
        self._held: deque[deque[Prompt]] = deque()  # the others, by call
        self.prompts: dict[str, Prompt] = {}  # open ones, by rid
        self.choices: dict[int, Choice] = {}  # of prompts that the loop has, by key
        self.failure: BaseException | None = None

    # For the calls

    def open(self, prompts: Sequence[Prompt], *, wait: bool) -> None:
        """Queue the prompts of a call, all or none. Without `wait` raises QueueFull if not all of them have a place now."""
        with self._lock:
            self.check()
            for prompt in prompts:
                if prompt.rid in self.prompts:
                    raise InvalidRequest("rid", f"got {prompt.rid!r}, must differ from the ids of requests that are still open")
            if not wait and len(self._placed) + len(prompts) > self._limit:
                raise QueueFull(f"{self._limit} requests are running or waiting", hint="Try again later, or raise --max-queued-requests.")
            self.prompts.update((prompt.rid, prompt) for prompt in prompts)
            self._held.append(deque(prompts))
            self._feed()

    def abort(self, rid: str) -> None:
        """End a request. One that is held back ends here; the loop answers for the others."""
        with self._lock:
            prompt = self.prompts.get(rid)
            if prompt is None:
                return
            if rid in self._placed:
                self._loop.inbox.put(abort_of(prompt))
                return
            self._end(prompt)
        finish = Finish("abort", None, None, False, {"token": 0, "logprob": 0, "hidden": 0})
        for choice in prompt.choices:
            self._deliver(choice, Delta(None, None, finish))

    def give_up(self, prompts: Sequence[Prompt]) -> None:
        """Forget prompts of a call that takes no answers any more, however far they have come."""
        with self._lock:
            for prompt in prompts:
                if self.prompts.get(prompt.rid) is prompt:  # its rid may belong to somebody else by now
                    if prompt.rid in self._placed:
                        self._loop.inbox.put(abort_of(prompt))
                    self._end(prompt)
            self._feed()

    def check(self) -> None:
        """Raise EngineDead if the engine answers no more."""
        if self.failure is not None:
            raise dead(self.failure)

    # The receiving thread

    def run(self) -> None:
        """Route what the loop says to the calls that wait for it, until the loop has ended."""
        try:
            while (message := self._outbox.get()) is not None:
                if isinstance(message, EngineFailed):
                    self._fail(message.error)
                else:
                    self._route(message)
            self._fail(EngineDead("the engine is closed"))
        except BaseException as error:  # nobody may wait for an answer that cannot come
            self._fail(error)

    def _route(self, step: StepOutputs) -> None:
        for key, cached in step.cached_tokens.items():
            choice = self.choices.get(key)
            if choice is not None and choice.index == 0:
                choice.prompt.cached_tokens = cached
        for key, delta in deltas(step).items():
            choice = self.choices.get(key)
            if choice is None:  # given up
                continue
            if delta.finish is not None:
                self._finished(choice)
            self._deliver(choice, delta)

    def _deliver(self, choice: Choice, delta: Delta) -> None:
        if not isinstance(choice, StreamedChoice):
            choice.take(delta)
            if delta.finish is None:
                return
        choice.prompt.events.put((choice, delta))

    def _finished(self, choice: Choice) -> None:
        with self._lock:
            prompt = choice.prompt
            self.choices.pop(choice.key, None)
            if self.prompts.get(prompt.rid) is prompt and all(other.key not in self.choices for other in prompt.choices):
                self._end(prompt)
                self._feed()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.failure = self.failure or error
            waiting = {id(prompt.events): prompt.events for prompt in self.prompts.values()}
            self.prompts.clear()
            self.choices.clear()
            self._held.clear()
        for events in waiting.values():
            events.put(error)

    # With the lock

    def _feed(self) -> None:
        """Give the loop prompts that are held back, one of each call in turn, as far as there are places."""
        while self._held and len(self._placed) < self._limit:
            call = self._held.popleft()
            prompt = call.popleft()
            if call:
                self._held.append(call)
            if self.prompts.get(prompt.rid) is prompt:  # not aborted meanwhile
                self._submit(prompt)

    def _submit(self, prompt: Prompt) -> None:
        ids, sampling, primary = np.asarray(prompt.ids, np.int32), prompt.sampling, prompt.choices[0].key
        if sampling.seed is None:  # one of its own: two such requests differ
            sampling = replace(sampling, seed=secrets.randbits(63))
        self._placed.add(prompt.rid)
        self.choices.update((choice.key, choice) for choice in prompt.choices)
        for choice in prompt.choices:
            follows = primary if choice.index else None
            self._loop.inbox.put(Submit(choice.key, prompt.rid, choice.index, ids, sampling, prompt.plan, follows))

    def _end(self, prompt: Prompt) -> None:
        """Its rid and its place are free."""
        for choice in prompt.choices:
            self.choices.pop(choice.key, None)
        del self.prompts[prompt.rid]
        self._placed.discard(prompt.rid)


def abort_of(prompt: Prompt) -> Abort:
    """By the keys of its choices: the rid may have another owner when the message arrives."""
    return Abort(prompt.rid, frozenset(choice.key for choice in prompt.choices))


def dead(error: BaseException) -> EngineDead:
    """The error of everybody who asks an engine that has ended with `error`."""
    if isinstance(error, EngineDead):
        return EngineDead(error.message)
    made = EngineDead(f"the engine stopped: {type(error).__name__}: {error}")
    made.__cause__ = error
    return made
