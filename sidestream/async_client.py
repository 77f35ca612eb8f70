"""`AsyncEngine`: an engine in a process of its own, asked from an event loop. The methods are those of `Engine`."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, cast

import msgspec

from sidestream.answers import Choice, Prompt, StreamedChoice, dead, finished
from sidestream.async_stream import AsyncOutputStream, Mailbox, PartStream
from sidestream.channel import AskingEnd
from sidestream.config import EngineConfig
from sidestream.engine_process import Start
from sidestream.errors import EngineDead
from sidestream.frontend import Facts, Frontend, FrontendState, template_of
from sidestream.messages import Ended, EngineFailed, Stop
from sidestream.observe.logs import LogFormat
from sidestream.observe.progress import open_progress
from sidestream.output import Output
from sidestream.params import SamplingParams, per_prompt
from sidestream.prepare import PromptLike, encode, is_one_prompt, prepare
from sidestream.router import Router
from sidestream.text.grammar import MAX_SECONDS, too_slow
from sidestream.text.reasoning import reasoning_of
from sidestream.text.tokenizer import LONG_TEXT as LONG_TEXT

# How long OpenMP's threads spin for each other before they sleep. As libgomp would have it, a thread whose core somebody else uses is
# waited for until its turn comes, at each of some hundred barriers per token: beside one busy process (2 cores) decoding fell from
# 150 to 0.5 tokens per second; so it falls to 36 and loses 2 % alone.
WAITING = {"GOMP_SPINCOUNT": "3000"}
CLOSE_SECONDS = 10.0  # for the engine's process to end by itself
FAILED_SECONDS = 1.0  # the same, after it has said that it failed
KILLED_SECONDS, ENDED_SECONDS = 0.1, 2.0  # for what it said to arrive: a process that ends by itself says something last


class AsyncEngine:
    """An inference engine in a process of its own, which lives as long as this one at most. Use it from one event loop.

    Options are those of `EngineConfig` (docs/options.md); raises ConfigError. `async with`, or `start` and `close`.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.config = EngineConfig.from_env(model, **options)
        self.log_format: LogFormat = "text"
        self.heard = 0.0  # when the engine said something last, by time.monotonic()
        self._router: Router | None = None
        self._frontend: Frontend | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._channel: AskingEnd | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._closed = False

    # Life

    async def start(self) -> None:
        """Start the process and wait until the model is loaded. Raises ModelError or ConfigError, EngineDead if it ends by itself."""
        if self._channel is not None:
            raise RuntimeError("the engine was started before")
        self._channel = AskingEnd()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "sidestream.engine_process", stdin=asyncio.subprocess.PIPE, env={**WAITING, **os.environ}
            )
            assert self._process.stdin is not None
            start = Start(vars(self.config), self._channel.directory, self.log_format)
            self._process.stdin.write(msgspec.json.encode(start) + b"\n")
            state = await self._first_message()
            self._frontend = await asyncio.to_thread(Frontend.from_state, state)
        except BaseException:
            await self.close()
            raise
        self._router = Router(self._channel.send, self.facts.max_running + self.config.max_queued_requests)
        self.heard = time.monotonic()
        self._receiving = asyncio.create_task(self._receive(), name="sidestream-receive")

    async def _first_message(self) -> FrontendState:
        assert self._process is not None and self._channel is not None
        message = asyncio.ensure_future(self._channel.receive())
        connected = asyncio.ensure_future(self._channel.connected())
        ended = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait((message, ended), return_when=asyncio.FIRST_COMPLETED)
            if not message.done():
                await asyncio.wait((message,), timeout=ENDED_SECONDS)
            if not message.done():
                raise EngineDead(how_it_ended(ended.result()))
            first = message.result()
            await asyncio.wait((connected, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (message, connected, ended):
                task.cancel()
        if isinstance(first, EngineFailed):
            raise first.error
        return cast(FrontendState, first)

    async def _receive(self) -> None:
        """Until the engine's process has ended and all that it said was taken."""
        assert self._process is not None and self._channel is not None and self._router is not None
        ended = asyncio.ensure_future(self._process.wait())
        try:
            while True:
                message = asyncio.ensure_future(self._channel.receive())
                await asyncio.wait((message, ended), return_when=asyncio.FIRST_COMPLETED)
                if not message.done():  # it has ended; something may still be on its way
                    await asyncio.wait((message,), timeout=KILLED_SECONDS if ended.result() < 0 else ENDED_SECONDS)
                if not message.done():
                    message.cancel()
                    break
                said = message.result()
                self.heard = time.monotonic()
                if isinstance(said, Ended):
                    await asyncio.wait((ended,))
                    break
                self._router.take(said)
                if self._router.failure is not None:  # the engine says no more; whether its process ends is another matter
                    return
            self._router.fail(EngineDead("the engine is closed" if self._closed else how_it_ended(ended.result())))
        except asyncio.CancelledError:
            self._router.fail(EngineDead("the engine is closed"))
            raise
        except BaseException as error:
            self._router.fail(error)
        finally:
            ended.cancel()

    async def wait(self) -> BaseException | None:
        """Wait until the engine has ended, by itself or by `close`. Returns what went wrong, None if it was closed."""
        if self._receiving is not None:
            await asyncio.wait((self._receiving,))
        return None if self._closed or self._router is None else self._router.failure

    async def close(self) -> None:
        """Abort what is open and end the process. Idempotent."""
        if self._closed or self._channel is None:
            self._closed = True
            return
        self._closed = True
        seconds = 0.0
        if self._router is not None and self._router.failure is None:
            self._channel.send(Stop())
            seconds = CLOSE_SECONDS
        elif self._router is not None:
            seconds = FAILED_SECONDS
        if self._process is not None and self._process.returncode is None:
            try:
                await asyncio.wait_for(self._process.wait(), seconds)
            except asyncio.TimeoutError:
                self._process.kill()
                await self._process.wait()
        if self._receiving is not None:
            await asyncio.wait((self._receiving,))
        if self._frontend is not None:
            await asyncio.to_thread(self._frontend.grammars.close)
        self._channel.close()

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    # What is known of it

    @property
    def frontend(self) -> Frontend:
        if self._frontend is None:
            raise EngineDead("the engine was not started", hint="Use `async with AsyncEngine(...)`, or await its start().")
        return self._frontend

    @property
    def facts(self) -> Facts:
        return self.frontend.facts

    def use_chat_template(self, source: str) -> None:
        """In place of the model's own. Raises ModelError if it does not parse."""
        facts, tokenizer = self.facts, self.frontend.tokenizer
        template = template_of(source, tokenizer, facts.name)
        self._frontend = replace(self.frontend, chat_template=template, reasoning=reasoning_of(source))

    def use_reasoning_parser(self, name: str) -> None:
        """In place of the one that the chat template shows; a name of `text.reasoning.NAMES`."""
        self._frontend = replace(self.frontend, reasoning=reasoning_of(self.frontend.chat_template.source, name))

    @property
    def tokenizer(self) -> Any:
        return self.frontend.tokenizer

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and output together."""
        return self.facts.context

    @property
    def router(self) -> Router:
        if self._router is None:
            raise EngineDead("the engine was not started", hint="Use `async with AsyncEngine(...)`, or await its start().")
        return self._router

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    # Asking

    async def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        rid: str | Sequence[str] | None = None,
        progress: bool | None = False,
        wait: bool = True,
        **outputs: Any,
    ) -> Output | list[Output]:
        """As `Engine.generate`. Without `wait` raises QueueFull if not all prompts have a place now. Cancelling it aborts them."""
        many = not is_one_prompt(prompts)
        listed = list(cast("Sequence[PromptLike]", prompts)) if many else [cast(PromptLike, prompts)]
        ids = [await self.encode(prompt) for prompt in listed]
        answers = await self._answer(ids, sampling_params, rid, progress, wait, outputs)
        return answers if many or len(answers) != 1 else answers[0]

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        rid: str | Sequence[str] | None = None,
        progress: bool | None = False,
        wait: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **outputs: Any,
    ) -> Output | list[Output]:
        """As `Engine.chat`."""
        many = bool(messages) and isinstance(messages[0], (list, tuple))
        listed: Sequence[Any] = messages if many else [messages]
        variables = {**(chat_template_kwargs or {}), **({} if tools is None else {"tools": tools})}
        ids = [self.encode_chat(conversation, **variables) for conversation in listed]
        answers = await self._answer(ids, sampling_params, rid, progress, wait, outputs)
        return answers if many or len(answers) != 1 else answers[0]

    def stream(
        self, prompt: PromptLike, sampling_params: SamplingParams | None = None, *, rid: str | None = None, **outputs: Any
    ) -> AsyncOutputStream:
        """As `Engine.stream`, to be read with `async for`; leaving it early aborts the request."""
        return AsyncOutputStream(self.stream_many([encode(self.frontend, prompt)], sampling_params, rid=rid, **outputs))

    async def compile(self, ids: Sequence[Sequence[int]], sampling_params: SamplingParams | Sequence[SamplingParams] | None) -> None:
        """Compile the grammars of a request to come beside the event loop, where `stream` would wait for them. Raises InvalidRequest."""
        frontend = self.frontend
        given = per_prompt("sampling_params", sampling_params, len(ids))
        if not all(isinstance(sampling, SamplingParams) for sampling in given):  # `prepare` says so
            return
        for grammar in set(frontend.grammars_of(given, ids)):
            if grammar is None:
                continue
            try:
                await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(frontend.grammars.compile(grammar))), MAX_SECONDS)
            except asyncio.TimeoutError:
                raise too_slow(grammar) from None

    def stream_many(
        self,
        ids: list[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        rid: str | Sequence[str] | None = None,
        **outputs: Any,
    ) -> PartStream:
        """Answer several prompts of token ids in parts: `(which prompt, part)`. Queued now: raises InvalidRequest and QueueFull."""
        router = self.router
        mailbox = Mailbox(lambda: router.give_up(prompts))
        prompts = self._prepare(ids, sampling_params, rid, outputs, StreamedChoice, mailbox)
        try:
            router.open(prompts, wait=False)
        except BaseException:
            router.give_up(prompts)
            raise
        return PartStream(prompts, mailbox, router)

    async def abort(self, rid: str) -> None:
        """End a request; what was computed for it is returned with `finish_reason="abort"`. Unknown ids are ignored."""
        self.router.abort(rid)

    async def flush_cache(self) -> int:
        """Drop the cached prefixes that no running request uses. Returns the number of tokens dropped."""
        return cast(int, await self._ask("flush_cache"))

    async def update_weights(self, path: str) -> int:
        """As `Engine.update_weights`."""
        return cast(int, await self._ask("update_weights", path))

    async def stats(self) -> dict[str, Any]:
        """Counters of the engine, taken between two steps (docs/outputs.md, The ledger)."""
        return cast("dict[str, Any]", await self._ask("stats"))

    async def check(self) -> None:
        """Verify that every page is free, cached or owned, exactly once."""
        await self._ask("check")

    async def encode(self, prompt: PromptLike) -> list[int]:
        """Token ids of one prompt, text or ids; a long text beside the event loop. Raises InvalidRequest."""
        if isinstance(prompt, str) and len(prompt) > LONG_TEXT:
            return await asyncio.to_thread(encode, self.frontend, prompt)
        return encode(self.frontend, prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Token ids of a conversation by the model's chat template."""
        return self.frontend.encode_chat(messages, **kwargs)

    # From requests to answers

    def _prepare(
        self, ids: list[list[int]], sampling_params: Any, rid: Any, outputs: Mapping[str, Any], kind: type[Choice], events: Mailbox
    ) -> list[Prompt]:
        most = self.config.max_output_bytes
        return prepare(
            self.frontend, ids, sampling_params, rid, outputs, events=events, kind=kind, keys=self.router.keys, max_output_bytes=most
        )

    async def _answer(
        self, ids: list[list[int]], sampling_params: Any, rid: Any, progress: bool | None, wait: bool, outputs: Mapping[str, Any]
    ) -> list[Output]:
        if not ids:
            return []
        await self.compile(ids, sampling_params)
        mailbox = Mailbox()
        prompts = self._prepare(ids, sampling_params, rid, outputs, Choice, mailbox)
        answers: dict[int, Output] = {}
        total = sum(len(prompt.choices) for prompt in prompts)
        try:
            self.router.open(prompts, wait=wait)
            with open_progress(progress, total) as bar:
                while len(answers) < total:
                    choice, output = finished(await mailbox.get())
                    answers[choice.key] = output
                    bar.advance(output.completion_tokens)
        except BaseException:
            self.router.give_up(prompts)
            raise
        return [answers[choice.key] for prompt in prompts for choice in prompt.choices]

    async def _ask(self, what: str, argument: str | None = None) -> Any:
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def reply(value: Any, error: BaseException | None) -> None:
            if answered.done():  # nobody waits any more
                return
            if error is None:
                answered.set_result(value)
            else:
                answered.set_exception(dead(error) if self.router.failure is not None else error)

        self.router.ask(what, argument, reply)
        return await answered


def how_it_ended(status: int) -> str:
    """In words, from a process's return code."""
    if status < 0:
        return f"the engine's process was ended by signal {-status}"
    return f"the engine's process ended with status {status}"
