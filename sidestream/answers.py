"""The asking side of a request: messages of the engine become text, logprobs and rows of an `Output`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np

from sidestream.errors import EngineDead
from sidestream.messages import Finish, Grammar, HiddenRows, LogprobRows, Rows, StepOutputs
from sidestream.output import HiddenStates, Logprobs, Output, Timing
from sidestream.params import OutputPlan, SamplingParams
from sidestream.text.detokenizer import OutputText

if TYPE_CHECKING:
    from sidestream.text.tokenizer import Tokenizer


class Delta(NamedTuple):
    """What one step brought for one choice."""

    tokens: tuple[int, ...]
    rows: Rows | None
    finish: Finish | None


NOTHING = Delta((), None, None)


class Mailbox(Protocol):
    """Where a call finds the events of its prompts."""

    def put(self, event: Event | None) -> None: ...


@dataclass(eq=False)
class Prompt:
    """One prompt of a call; its choices share the prompt's rows and logprobs, which the first choice brings."""

    rid: str
    ids: Sequence[int]
    sampling: SamplingParams
    plan: OutputPlan
    max_tokens: int  # new tokens at most: the context bounds them too
    hidden_size: int
    compute_dtype: str
    tokenizer: Tokenizer
    events: Mailbox  # of the call; None in it: its stream was closed
    choices: list[Choice] = field(default_factory=list)
    grammar: Grammar | None = None
    cached_tokens: int = 0
    asked_at: float = field(default_factory=time.monotonic)
    admitted_at: float | None = None


Event: TypeAlias = "tuple[Choice, Delta] | BaseException"  # what a call waits for


class Choice:
    """One output of a prompt while it grows."""

    def __init__(self, prompt: Prompt, index: int, key: int) -> None:
        self.prompt = prompt
        self.index = index
        self.key = key
        self.token_ids: list[int] = []
        self.rows: list[Rows] = []
        self.finish: Finish | None = None
        self.started = False  # a part of it was sent
        self._first_token_at: float | None = None

    def take(self, delta: Delta) -> None:
        if delta.tokens and self._first_token_at is None:
            self._first_token_at = time.monotonic()
        self.token_ids += delta.tokens
        if delta.rows is not None:
            self.rows.append(delta.rows)
        self.finish = delta.finish

    def output(self) -> Output:
        """The finished answer."""
        assert self.finish is not None
        text = self._open_text()
        shown = text.feed(self.token_ids[:-1] if self.finish.stop_token else self.token_ids)
        shown += text.finish(stop_offset=self.finish.stop_offset)
        return self._build(shown, self.token_ids, self.prompt_rows() + self.rows, self.finish, first=True)

    def prompt_rows(self) -> list[Rows]:
        """The prompt's rows, where the first choice computed them for this one."""
        plan = self.prompt.plan
        if self.index == 0:
            return []
        shared = [part for rows in self.prompt.choices[0].rows if (part := _of_prompt(rows, len(self.prompt.ids))) is not None]
        if plan.return_hidden_states == "last" and self.prompt.max_tokens > 1:
            shared = [rows._replace(hidden=None) for rows in shared]  # this choice has a last row of its own
        return shared

    def _open_text(self) -> OutputText:
        sampling = self.prompt.sampling
        return OutputText(
            self.prompt.tokenizer,
            self.prompt.ids,
            stop=tuple(sampling.stop),
            regexes=tuple(sampling.stop_regex),
            skip_special_tokens=sampling.skip_special_tokens,
        )

    def _build(self, text: str, tokens: Sequence[int], rows: Sequence[Rows], finish: Finish | None, *, first: bool) -> Output:
        prompt = self.prompt
        return Output(
            text=text,
            token_ids=list(tokens),
            finish_reason=finish.reason if finish else None,
            matched_stop=finish.matched_stop if finish else None,
            prompt_tokens=len(prompt.ids),
            completion_tokens=len(self.token_ids),
            cached_tokens=prompt.cached_tokens,
            rid=prompt.rid,
            index=self.index,
            logprobs=_logprobs(prompt.plan, rows, first) if prompt.plan.return_logprob else None,
            hidden_states=_hidden_states(prompt, rows) if prompt.plan.return_hidden_states else None,
            copied_bytes=finish.copied_bytes if finish else None,
            timing=self._timing() if finish else None,
        )

    def _timing(self) -> Timing:
        def since(moment: float | None) -> float | None:
            return None if moment is None else moment - self.prompt.asked_at

        return Timing(since(self.prompt.admitted_at), since(self._first_token_at), time.monotonic() - self.prompt.asked_at)


class StreamedChoice(Choice):
    """A choice whose parts are handed out as they come: text that may be shown, with the tokens, logprobs and rows it belongs to."""

    def __init__(self, prompt: Prompt, index: int, key: int) -> None:
        super().__init__(prompt, index, key)
        self._text = self._open_text()
        self._sent_tokens = 0
        self._unsent_text = ""  # the beginning of a token whose end is held back
        self._unsent: list[Rows] = []

    def take(self, delta: Delta) -> None:
        """Rows are kept until they are sent, the prompt's until all choices have begun: `rows` holds nothing else."""
        super().take(delta._replace(rows=None))
        if delta.rows is not None:
            self._unsent.append(delta.rows)
            if self.index == 0 and self._awaited() and (shared := _of_prompt(delta.rows, len(self.prompt.ids))) is not None:
                self.rows.append(shared)

    def _awaited(self) -> bool:
        """Whether a later choice has yet to begin, with the rows that the first one got for the prompt."""
        return not all(choice.started for choice in self.prompt.choices[1:])

    def part(self, delta: Delta) -> Output | None:
        """Take one step; the new part of the answer if there is anything to show."""
        self.take(delta)
        finish, text = delta.finish, self._unsent_text
        text += self._text.feed(delta.tokens[:-1] if finish and finish.stop_token else delta.tokens)
        if finish:
            text += self._text.finish(stop_offset=finish.stop_offset)
        released = len(self.token_ids) - (0 if finish else self._text.held_tokens)
        if not finish and released <= self._sent_tokens:
            self._unsent_text = text
            return None
        self._unsent_text = ""
        tokens, self._sent_tokens = self.token_ids[self._sent_tokens : released], released
        first, self.started = not self.started, True
        rows = self._release(None if finish else len(self.prompt.ids) + released, first)
        return self._build(text, tokens, rows, finish, first=first)

    def _release(self, before: int | None, first: bool) -> list[Rows]:
        """Rows of the tokens released, those before position `before`; the first part of a later choice brings the prompt's rows."""
        released = self.prompt_rows() if first else []
        if first and not self._awaited():
            self.prompt.choices[0].rows.clear()
        while self._unsent and (before is None or _position_after(self._unsent[0]) <= before):
            released.append(self._unsent.pop(0))
        if self._unsent and before is not None:
            shown, held = _cut(self._unsent[0], before)
            if shown is not None:
                released.append(shown)
                self._unsent[0] = held
        return released


def _position_after(rows: Rows) -> int:
    """The position behind the last token that a step's rows belong to."""
    if rows.output_logprobs is not None:
        return rows.output_logprobs.position + len(rows.output_logprobs.chosen)
    if rows.hidden is not None:
        return rows.hidden.position + rows.hidden.shape[0] + 1  # the row at p came with token p+1
    return 0


def _cut(rows: Rows, before: int) -> tuple[Rows | None, Rows]:
    """A step's rows that belong to tokens before a position, and the others: a step may bring several tokens."""
    logprobs, hidden = rows.output_logprobs, rows.hidden
    shown_logprobs, held_logprobs = (None, None) if logprobs is None else _parts(logprobs, before - logprobs.position)
    shown_hidden, held_hidden = (None, None) if hidden is None else _hidden_parts(hidden, before - 1 - hidden.position)
    if shown_logprobs is None and shown_hidden is None:
        return None, rows
    return Rows(rows.input_logprobs, shown_logprobs, shown_hidden), Rows(None, held_logprobs, held_hidden)


def _parts(rows: LogprobRows, count: int) -> tuple[LogprobRows | None, LogprobRows | None]:
    """The first `count` rows, and the others."""

    def part(chosen: slice, position: int) -> LogprobRows | None:
        made = LogprobRows(position, *(None if values is None else values[chosen] for values in rows[1:]))  # type: ignore[arg-type]
        return made if len(made.chosen) else None

    count = min(max(count, 0), len(rows.chosen))
    return part(slice(0, count), rows.position), part(slice(count, None), rows.position + count)


def _hidden_parts(rows: HiddenRows, count: int) -> tuple[HiddenRows | None, HiddenRows | None]:
    number, layers, hidden = rows.shape
    count = min(max(count, 0), number)
    size = len(rows.data) // number if number else 0

    def part(first: int, last: int) -> HiddenRows | None:
        data = rows.data[first * size : last * size]
        return HiddenRows(rows.position + first, rows.dtype, (last - first, layers, hidden), data) if last > first else None

    return part(0, count), part(count, number)


def _of_prompt(rows: Rows, prompt_len: int) -> Rows | None:
    """The part of the first choice's rows that belongs to the prompt."""
    hidden = rows.hidden if rows.hidden is not None and rows.hidden.position < prompt_len else None
    if hidden is None and rows.input_logprobs is None:
        return None
    return Rows(input_logprobs=rows.input_logprobs, hidden=hidden)


def _logprobs(plan: OutputPlan, rows: Sequence[Rows], first: bool) -> Logprobs:
    inputs = [part.input_logprobs for part in rows if part.input_logprobs is not None]
    outputs = [part.output_logprobs for part in rows if part.output_logprobs is not None]
    # Position 0 has no logprob: nothing came before it.
    nothing: list[None] = [None] if first and plan.logprob_start == 0 else []
    top, ids = plan.top_logprobs_num, plan.token_ids_logprob
    return Logprobs(
        input=[*nothing, *_chosen(inputs)],
        output=_chosen(outputs),
        input_top=[*nothing, *_top(inputs)] if top else [],
        output_top=_top(outputs) if top else [],
        input_ids=[*nothing, *_asked(inputs, ids)] if ids else [],
        output_ids=_asked(outputs, ids) if ids else [],
    )


def _chosen(parts: Sequence[LogprobRows]) -> list[float]:
    return [value for part in parts for value in part.chosen.tolist()]


def _top(parts: Sequence[LogprobRows]) -> list[list[tuple[float, int]]]:
    rows = []
    for part in parts:
        assert part.top_values is not None and part.top_ids is not None
        rows += [list(zip(v, i, strict=True)) for v, i in zip(part.top_values.tolist(), part.top_ids.tolist(), strict=True)]
    return rows


def _asked(parts: Sequence[LogprobRows], ids: Sequence[int]) -> list[list[tuple[float, int]]]:
    rows = []
    for part in parts:
        assert part.id_values is not None
        rows += [list(zip(values, ids, strict=True)) for values in part.id_values.tolist()]
    return rows


def _hidden_states(prompt: Prompt, rows: Sequence[Rows]) -> HiddenStates:
    parts: list[HiddenRows] = [part.hidden for part in rows if part.hidden is not None]
    plan = prompt.plan
    dtype = plan.hidden_states_dtype if plan.hidden_states_dtype != "model" else prompt.compute_dtype
    shape = (sum(part.shape[0] for part in parts), len(plan.layers), prompt.hidden_size)
    raw = np.concatenate([part.data for part in parts]) if parts else np.empty(0, np.uint8)  # a copy: choices share parts
    positions = [part.position + i for part in parts for i in range(part.shape[0])]
    return HiddenStates(raw, dtype, shape, positions, plan.requested_layers)


def finished(event: Event | None) -> tuple[Choice, Output]:
    """The answer of a choice that is not streamed. Raises what went wrong with it, EngineDead if the engine ended."""
    assert event is not None, "only a stream is closed"
    if isinstance(event, BaseException):
        raise dead(event)
    choice, delta = event
    assert delta.finish is not None, "only a stream gets parts"
    if delta.finish.error is not None:
        raise delta.finish.error
    output = choice.output()
    choice.rows = [] if choice.index else choice.rows  # the first choice's prompt rows serve the others
    return choice, output


def dead(error: BaseException) -> EngineDead:
    """The error of everybody who asks an engine that has ended with `error`."""
    if isinstance(error, EngineDead):
        return EngineDead(error.message)
    made = EngineDead(f"the engine stopped: {type(error).__name__}: {error}")
    made.__cause__ = error
    return made


def deltas(step: StepOutputs) -> dict[int, Delta]:
    """The step's news by key."""
    news: dict[int, Delta] = {}
    for key, token in zip(step.keys, step.tokens, strict=True):
        tokens = (token,)
        news[key] = Delta(news[key].tokens + tokens if key in news else tokens, None, None)
    for key, rows in step.rows.items():
        news[key] = news.get(key, NOTHING)._replace(rows=rows)
    for key, finish in step.finished.items():
        news[key] = news.get(key, NOTHING)._replace(finish=finish)
    return news
