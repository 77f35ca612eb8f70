"""What crosses the boundary between those who ask (tokenizing, detokenizing, HTTP) and the engine loop. Plain data, no device tensors."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from sidestream.params import OutputPlan, SamplingParams


class Thinking(NamedTuple):
    """How a model reasons before it answers: between two texts."""

    begin: str
    end: str
    inside: bool  # the prompt has begun it


class Budget(NamedTuple):
    """Most tokens of reasoning: then the text that ends it is forced."""

    tokens: int
    thinking: Thinking


class Grammar(NamedTuple):
    """What the text of a request may be. Equal ones are compiled once."""

    field: str  # of SamplingParams
    source: str | tuple[str, ...] | None  # its value; None: any text
    reasoning: Thinking | None = None  # behind which it begins
    budget: Budget | None = None  # of the reasoning


@dataclass(frozen=True)
class Submit:
    """One choice of one prompt. `key` is unique in the engine's life; choices of a prompt share the rid, and follow their primary."""

    key: int
    rid: str
    index: int
    prompt: npt.NDArray[np.int32]
    sampling: SamplingParams
    plan: OutputPlan
    primary: int | None = None  # key of the prompt's first choice
    grammar: Grammar | None = None


class Abort(NamedTuple):
    """End all choices with this rid, or of them those with `keys`; unknown ones are ignored."""

    rid: str
    keys: frozenset[int] | None = None  # of a caller that gives up: the rid may belong to somebody else by now


class Ask(NamedTuple):
    """A question to the engine, answered between two steps: one of `engine.questions.ANSWERS`."""

    id: int
    what: str
    argument: str | None = None


class Stop(NamedTuple):
    """End the loop: requests still open are aborted."""


class GrammarReady(NamedTuple):
    """From the engine's own compiler of grammars: the one of the request `key` is ready, or wrong. Crosses no process boundary."""

    key: int
    done: Future[Any]


Inbound = Submit | Abort | Ask | Stop | GrammarReady


class LogprobRows(NamedTuple):
    """Logprobs of consecutive tokens. chosen [n] f32; top_values, top_ids [n, k]; id_values [n, ids]."""

    position: int  # absolute position of the first token
    chosen: npt.NDArray[np.float32]
    top_values: npt.NDArray[np.float32] | None
    top_ids: npt.NDArray[np.int32] | None
    id_values: npt.NDArray[np.float32] | None


class HiddenRows(NamedTuple):
    """Hidden rows of consecutive positions, as raw bytes: `data` [rows, layers, hidden] of `dtype`, in the request's own buffer."""

    position: int
    dtype: str
    shape: tuple[int, int, int]
    data: npt.NDArray[np.uint8]


class Rows(NamedTuple):
    """What one step returns to one request besides the token."""

    input_logprobs: LogprobRows | None = None
    output_logprobs: LogprobRows | None = None
    hidden: HiddenRows | None = None


class Finish(NamedTuple):
    reason: Literal["stop", "length", "abort"]
    matched_stop: int | str | None
    stop_offset: int | None  # characters of output text before the stop string
    stop_token: bool  # the last token is EOS or a stop token: it has no text
    copied_bytes: dict[str, int]
    error: Exception | None = None  # this request failed, and nobody else did


class Admission(NamedTuple):
    """A request got its place in a batch."""

    cached_tokens: int
    at: float  # time.monotonic(), which the processes of a machine share


class StepOutputs(NamedTuple):
    """One message per step for all requests. keys[i] got tokens[i]; the rest is sparse, by key."""

    keys: list[int]
    tokens: list[int]
    rows: dict[int, Rows]
    admitted: dict[int, Admission]  # those whose first step this was
    finished: dict[int, Finish]


class Answer(NamedTuple):
    """To the question `id`: a plain value, or what went wrong."""

    id: int
    value: Any
    error: Exception | None = None


class Report(NamedTuple):
    """The engine's counters, a few times a second while it works: a sign of life, and what metrics are made of."""

    stats: dict[str, Any]


class EngineFailed(NamedTuple):
    """The loop ended with this error: no open request will get another answer."""

    error: BaseException


class Ended(NamedTuple):
    """The loop ended as it was told to: this is the last message."""


Outbound = StepOutputs | Answer | Report | EngineFailed | Ended
