"""`Engine`: the public class. Validates and tokenizes requests, hands them to the engine loop, and makes outputs of what comes back."""

from __future__ import annotations

import ctypes
import queue
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, cast

from sidestream.answers import Choice, Event, Prompt, StreamedChoice, dead, finished
from sidestream.assemble import Assembled, assemble
from sidestream.config import EngineConfig
from sidestream.engine.loop import EngineLoop
from sidestream.errors import EngineDead
from sidestream.messages import Outbound, Stop
from sidestream.observe.progress import open_progress
from sidestream.output import Output
from sidestream.params import SamplingParams
from sidestream.prepare import PromptLike, encode, is_one_prompt, prepare
from sidestream.router import Router
from sidestream.stream import OutputStream


class Engine:
    """An inference engine in this process. Safe to use from several threads; close it, or use it as a context manager.

    Options are those of `EngineConfig` (docs/options.md); raises ConfigError or ModelError when it cannot start.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.config = EngineConfig.from_env(model, **options)
        self._outbox: queue.SimpleQueue[Outbound | None] = queue.SimpleQueue()
        self._parts = self._assemble()
        loop = self._parts.loop
        self._frontend = self._parts.frontend
        self._router = Router(lambda message: loop.inbox.put(message), self._frontend.facts.max_running + self.config.max_queued_requests)
        self._threads = [
            threading.Thread(target=_run, args=(loop, self._outbox), name="sidestream-engine", daemon=True),
            threading.Thread(target=_receive, args=(self._outbox, self._router), name="sidestream-receive", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        # A dropped engine is told to stop and not waited for: it may be collected in any thread, its own among them. The router
        # lives until the receiving thread has ended, so at the interpreter's exit the threads of every engine are waited for.
        weakref.finalize(self, loop.inbox.put, Stop()).atexit = False
        self._closer = weakref.finalize(self._router, _close, loop, self._threads)

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
        answers = self._answer([encode(self._frontend, prompt) for prompt in listed], sampling_params, rid, progress, outputs)
        return answers if many or len(answers) != 1 else answers[0]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        rid: str | Sequence[str] | None = None,
        progress: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **outputs: Any,
    ) -> Output | list[Output]:
        """Like `generate`, for conversations: a list of messages with `role` and `content`, or a list of such lists.

        The chat template tells the model of `tools`, objects as OpenAI's API has them. What it writes comes back as it is.
        """
        many = bool(messages) and isinstance(messages[0], (list, tuple))
        listed: Sequence[Any] = messages if many else [messages]
        variables = {**(chat_template_kwargs or {}), **({} if tools is None else {"tools": tools})}
        ids = [self.encode_chat(conversation, **variables) for conversation in listed]
        answers = self._answer(ids, sampling_params, rid, progress, outputs)
        return answers if many or len(answers) != 1 else answers[0]

    def stream(
        self, prompt: PromptLike, sampling_params: SamplingParams | None = None, *, rid: str | None = None, **outputs: Any
    ) -> OutputStream:
        """Answer one prompt in parts: each Output holds only what is new, `finish_reason` is set in the last part of each `index`.

        The request is checked and queued now; it is aborted when the stream is closed early. Raises QueueFull if the queue is.
        """
        events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        prompts = self._prepare([encode(self._frontend, prompt)], sampling_params, rid, outputs, StreamedChoice, events)
        try:
            self._router.open(prompts, wait=False)
            return OutputStream(prompts[0], events, self._parts.loop.inbox, self)
        except BaseException:
            self._router.give_up(prompts)
            raise

    def abort(self, rid: str) -> None:
        """End a request; what was computed for it is returned with `finish_reason="abort"`. Unknown ids are ignored."""
        self._router.abort(rid)

    def flush_cache(self) -> int:
        """Drop the cached prefixes that no running request uses. Returns the number of tokens dropped."""
        return cast(int, self._ask("flush_cache"))

    def update_weights(self, path: str) -> int:
        """Go on with other weights of the same model: a .gguf file or a directory. Returns how often that was done.

        Requests made before are answered with the old weights, those made after with the new; nothing of the old cache is used again.
        Raises ModelError, and the old weights stay.
        """
        return cast(int, self._ask("update_weights", path))

    def stats(self) -> dict[str, Any]:
        """Counters of the engine, taken between two steps (docs/outputs.md, The ledger)."""
        return cast("dict[str, Any]", self._ask("stats"))

    def check(self) -> None:
        """Verify that every page is free, cached or owned, exactly once. Raises AssertionError."""
        self._ask("check")

    @property
    def tokenizer(self) -> Any:
        return self._frontend.tokenizer

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and output together."""
        return self._frontend.facts.context

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Token ids of a conversation by the model's chat template."""
        return self._frontend.encode_chat(messages, **kwargs)

    def close(self) -> None:
        """Abort what is open and end the engine's threads. Idempotent."""
        self._router.failure = self._router.failure or EngineDead("the engine is closed")
        self._closer()

    def __repr__(self) -> str:
        facts, failure = self._frontend.facts, self._router.failure
        state = "open" if failure is None else "closed" if isinstance(failure, EngineDead) else f"stopped by {type(failure).__name__}"
        return f"{type(self).__name__}({facts.name!r}, device={facts.device!r}, dtype={facts.dtype!r}, {state})"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # From requests to answers

    def _prepare(
        self,
        ids: list[list[int]],
        sampling_params: Any,
        rid: Any,
        outputs: Mapping[str, Any],
        kind: type[Choice],
        events: queue.SimpleQueue[Event | None],
    ) -> list[Prompt]:
        most, keys = self.config.max_output_bytes, self._router.keys
        return prepare(self._frontend, ids, sampling_params, rid, outputs, events=events, kind=kind, keys=keys, max_output_bytes=most)

    def _answer(
        self, ids: list[list[int]], sampling_params: Any, rid: Any, progress: bool | None, outputs: Mapping[str, Any]
    ) -> list[Output]:
        if not ids:
            return []
        events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        prompts = self._prepare(ids, sampling_params, rid, outputs, Choice, events)
        answers: dict[int, Output] = {}
        total = sum(len(prompt.choices) for prompt in prompts)
        try:
            self._router.open(prompts, wait=True)
            with open_progress(progress, total) as bar:
                while len(answers) < total:
                    choice, output = finished(events.get())
                    answers[choice.key] = output
                    bar.advance(output.completion_tokens)
        except BaseException:
            self._router.give_up(prompts)
            raise
        return [answers[choice.key] for prompt in prompts for choice in prompt.choices]

    def _ask(self, what: str, argument: str | None = None) -> Any:
        replies: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._router.ask(what, argument, lambda value, error: replies.put((value, error)))
        value, error = replies.get()
        if error is not None:
            raise dead(error) if self._router.failure is not None else error
        return value


def _receive(outbox: queue.SimpleQueue[Outbound | None], router: Router) -> None:
    """The receiving thread: until the loop has ended."""
    try:
        while (message := outbox.get()) is not None:
            router.take(message)
        router.fail(EngineDead("the engine is closed"))
    except BaseException as error:
        router.fail(error)


def _run(loop: EngineLoop, outbox: queue.SimpleQueue[Outbound | None]) -> None:
    """The engine's thread. When it ends, the engine's memory is the system's again, and the receiving thread ends too."""
    try:
        loop.run()
    finally:
        _trim_heap()
        outbox.put(None)


def _close(loop: EngineLoop, threads: Sequence[threading.Thread]) -> None:
    loop.inbox.put(Stop())
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()


def _trim_heap() -> None:
    """Give freed memory back to the system, where the C library can: glibc keeps it in the heaps of the threads that allocated it.

    Without it a process grew from 717 to 1,016 MB over eight engines on the default model, one after the other; with it not at all.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library; on Windows there is none of that name
        return
    trim(0)
