"""Between the calls of an engine and its loop: which requests are open, which wait for a place, and who gets what the loop says."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sidestream.answers import Choice, Delta, Prompt, StreamedChoice, dead, deltas
from sidestream.errors import InvalidRequest, QueueFull
from sidestream.messages import Abort, Answer, Ask, EngineFailed, Finish, Inbound, Outbound, Report, StepOutputs, Submit

Reply = Callable[[Any, BaseException | None], None]  # takes the answer, or what went wrong


class Router:
    """All that the receiving side needs. It does not refer to the `Engine`, so that one nobody uses any more is collected and ends.

    `send` gives a message to the loop, `take` gets what it says. `limit` prompts may be in the loop at a time; the others of a call
    are held back, and calls take turns when a place becomes free.
    """

    def __init__(self, send: Callable[[Inbound], None], limit: int) -> None:
        self._send = send
        self._limit = limit
        self._lock = threading.Lock()
        self.keys = itertools.count(1)  # of choices
        self._ids = itertools.count(1)  # of questions
        self._placed: set[str] = set()  # prompts that the loop has, by rid
        self._held: deque[deque[Prompt]] = deque()  # the others, by call
        self._replies: dict[int, Reply] = {}  # of questions not answered yet, by id
        self.prompts: dict[str, Prompt] = {}  # open ones, by rid
        self.choices: dict[int, Choice] = {}  # of prompts that the loop has, by key
        self.report: Report | None = None  # the loop's latest
        self.busy_since = 0.0  # when a prompt came while none was open, by time.monotonic()
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
            if not self.prompts:
                self.busy_since = time.monotonic()
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
                self._send(abort_of(prompt))
                return
            self._end(prompt)
        finish = Finish("abort", None, None, False, {"token": 0, "logprob": 0, "hidden": 0})
        for choice in prompt.choices:
            self._deliver(choice, Delta((), None, finish))

    def give_up(self, prompts: Sequence[Prompt]) -> None:
        """Forget prompts of a call that takes no answers any more, however far they have come."""
        with self._lock:
            for prompt in prompts:
                if self.prompts.get(prompt.rid) is prompt:  # its rid may belong to somebody else by now
                    if prompt.rid in self._placed:
                        self._send(abort_of(prompt))
                    self._end(prompt)
            self._feed()

    def check(self) -> None:
        """Raise EngineDead if the engine answers no more."""
        if self.failure is not None:
            raise dead(self.failure)

    def ask(self, what: str, argument: str | None, reply: Reply) -> None:
        """Put a question to the loop (`engine.questions.ANSWERS`). `reply` is called once, by whoever receives."""
        with self._lock:
            self.check()
            question = Ask(next(self._ids), what, argument)
            self._replies[question.id] = reply
            self._send(question)

    # For the one who receives

    def take(self, message: Outbound) -> None:
        """Route what the loop says to the calls that wait for it."""
        if isinstance(message, StepOutputs):
            self._route(message)
        elif isinstance(message, Report):
            self.report = message
        elif isinstance(message, Answer):
            with self._lock:
                reply = self._replies.pop(message.id, None)
            if reply is not None:
                reply(message.value, message.error)
        elif isinstance(message, EngineFailed):
            self.fail(message.error)

    def _route(self, step: StepOutputs) -> None:
        for key, admission in step.admitted.items():
            choice = self.choices.get(key)
            if choice is not None and choice.index == 0:
                choice.prompt.cached_tokens = admission.cached_tokens
                choice.prompt.admitted_at = admission.at
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

    def fail(self, error: BaseException) -> None:
        """The loop says no more: nobody may wait for an answer that cannot come."""
        with self._lock:
            self.failure = self.failure or error
            waiting = {id(prompt.events): prompt.events for prompt in self.prompts.values()}
            self.prompts.clear()
            self.choices.clear()
            self._held.clear()
            replies = list(self._replies.values())
            self._replies.clear()
        for events in waiting.values():
            events.put(error)
        for reply in replies:
            reply(None, error)

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
        ids, asked, most, primary = np.asarray(prompt.ids, np.int32), prompt.sampling, prompt.max_tokens, prompt.choices[0].key
        # A caller's numbers may have any size; beyond the context they mean the same as at its end, where they fit into a message.
        sampling = replace(
            asked,
            max_new_tokens=most,
            min_new_tokens=min(asked.min_new_tokens, most),
            seed=secrets.randbits(63) if asked.seed is None else asked.seed,  # one of its own: two such requests differ
        )
        plan = replace(prompt.plan, hidden_start=min(prompt.plan.hidden_start, len(ids) + most))
        self._placed.add(prompt.rid)
        self.choices.update((choice.key, choice) for choice in prompt.choices)
        for choice in prompt.choices:
            follows = primary if choice.index else None
            self._send(Submit(choice.key, prompt.rid, choice.index, ids, sampling, plan, follows, prompt.grammar))

    def _end(self, prompt: Prompt) -> None:
        """Its rid and its place are free."""
        for choice in prompt.choices:
            self.choices.pop(choice.key, None)
        del self.prompts[prompt.rid]
        self._placed.discard(prompt.rid)


def abort_of(prompt: Prompt) -> Abort:
    """By the keys of its choices: the rid may have another owner when the message arrives."""
    return Abort(prompt.rid, frozenset(choice.key for choice in prompt.choices))
