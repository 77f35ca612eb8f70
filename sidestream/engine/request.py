"""A request as the engine sees it: one prompt, one choice, and how far it has come."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from sidestream.engine.radix import RadixNode
    from sidestream.messages import Admission
from sidestream.params import OutputPlan, SamplingParams

MAX_JUMP = 64  # tokens appended at once without being sampled

FinishReason = Literal["stop", "length", "abort"]


class RowBytes(NamedTuple):
    """What one row of each kind weighs for one request."""

    hidden: int
    logprob: int


class StopMatch(Protocol):
    """What a matcher found: the stop, and where it starts in the output text (characters)."""

    @property
    def stop(self) -> str: ...

    @property
    def offset(self) -> int: ...


class StopMatcher(Protocol):
    """Watches the output tokens of one request for stop strings. Fed each token once, in order."""

    def feed(self, token_id: int) -> StopMatch | None: ...


class Constraint(Protocol):
    """A grammar over the output tokens of one request. Its methods may raise: the request then ends with that error."""

    def fill_mask(self, mask: npt.NDArray[np.uint32]) -> None:
        """Write the bits of the token ids admitted next: id `i` is bit `i % 32` of word `i // 32`. mask: [ceil(vocabulary/32)]."""

    def advance(self, token_id: int) -> bool:
        """Take one output token; True when the grammar is complete and the request must end."""


class Feature:
    """Bits: what the sampler has to do for a request; a batch needs the union over its rows.

    Plain integers: `&` with a member of `enum.IntFlag` makes an object, 1 µs for each request of each step.
    """

    RANDOM = 1
    FILTER = 2  # top-k, top-p, min-p
    PENALTY = 4
    EDIT = 8  # logit bias, allowed and bad ids, min_new_tokens
    CONSTRAINT = 16
    LOGPROB = 32
    INPUT_LOGPROB = 64
    HIDDEN = 128
    OUTPUT = LOGPROB | INPUT_LOGPROB | HIDDEN


class KeptRow(NamedTuple):
    """The candidate for a `"last"` row, on the device: `tensor[row]` is [layers, hidden]. The request holds it until the next one."""

    result: Any  # of the step that computed it: its ledger entry changes if the row is fetched
    tensor: Any
    row: int
    position: int


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    RETRACTED = "retracted"  # back in the queue as soon as no step in flight holds it
    FINISHED = "finished"


class Request:
    """One choice of one prompt. Positions and counts:

    `num_tokens` counts prompt and output tokens including those sampled in steps still in flight; `num_computed` the positions whose
    forward has been launched. A request catches up: its next span is `num_computed..num_tokens`, and the span that reaches `num_tokens`
    samples the next token. `in_flight` counts launched steps whose results have not been processed: while it is not 0 its pages and
    its slot stay.
    """

    __slots__ = (
        "aborting",
        "admission",
        "ahead",
        "ahead_completes",
        "borrowed",
        "cached_tokens",
        "cannot_surprise",
        "compiling",
        "constraint",
        "error",
        "features",
        "finish_reason",
        "hidden_next",
        "in_flight",
        "index",
        "kept",
        "key",
        "logprob_next",
        "matched_stop",
        "matcher",
        "max_tokens",
        "next_mask",
        "node",
        "num_computed",
        "num_tokens",
        "output_ids",
        "output_next",
        "pages",
        "plan",
        "primary",
        "prompt",
        "rid",
        "row",
        "sampling",
        "shares_prompt",
        "slot",
        "state",
        "stop_ids",
        "stop_offset",
        "unsent",
        "waits_for",
    )

    def __init__(
        self,
        *,
        key: int,
        rid: str,
        index: int,
        prompt: npt.NDArray[np.int32],
        sampling: SamplingParams,
        plan: OutputPlan,
        max_tokens: int,
        eos_token_ids: frozenset[int],
        matcher: StopMatcher | None,
        constraint: Constraint | None,
        primary: Request | None,
        shares_prompt: bool = False,
        compiling: bool = False,
    ) -> None:
        self.key = key
        self.rid = rid
        self.index = index
        self.prompt = prompt
        self.sampling = sampling
        self.plan = plan
        self.max_tokens = max_tokens  # never past the context
        self.stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_token_ids)
        self.matcher = matcher
        self.constraint = constraint
        self.compiling = compiling  # its grammar: until then it waits
        constrained = constraint is not None or compiling
        self.shares_prompt = shares_prompt  # the prompt's rows of all choices come from the first one,
        self.primary = primary  # which is this, unless it has ended already
        self.cannot_surprise = not self.stop_ids and matcher is None and not constrained
        self.features = request_features(sampling, plan, constrained)

        self.state = State.WAITING
        self.output_ids: list[int] = []
        self.num_tokens = len(prompt)
        self.num_computed = 0
        # Tokens that the grammar has taken already, because it admits nothing else, and that have not been processed yet: the first is
        # sampled like any other, those behind it are appended without being sampled.
        self.ahead: deque[int] = deque()
        self.ahead_completes = False  # the grammar, with the last of them
        self.next_mask: npt.NDArray[np.uint32] | None = None  # of the first token behind them, once it was asked for
        self.unsent: tuple[int, npt.NDArray[np.int32]] | None = None  # appended tokens from a position on, not in the token table yet
        self.in_flight = 0
        self.aborting = False
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None  # raised by its matcher or constraint: it ends, its neighbours go on
        self.matched_stop: int | str | None = None
        self.stop_offset: int | None = None
        self.cached_tokens: int | None = None  # set when first admitted
        self.admission: Admission | None = None  # not told yet

        self.slot = -1
        self.pages: list[int] = []
        self.borrowed = 0  # leading pages that belong to the radix cache, locked through `node`
        self.node: RadixNode | None = None
        self.row = RowBytes(0, 0)  # what one row of its outputs weighs, known when it is queued
        self.waits_for: tuple[Request, int] | None = None  # a neighbour computing a shared prefix, and the pages it must reach

        # Positions of the next rows to return. Prompt rows of further choices come from the primary one.
        shared = len(prompt) if shares_prompt else 0
        self.hidden_next = max(plan.hidden_start, shared)
        self.logprob_next = max((plan.logprob_start or 0) - 1, 0)  # the row at p-1 holds the logprob of token p
        if shares_prompt or plan.logprob_start is None:
            self.logprob_next = len(prompt)
        self.kept: KeptRow | None = None
        self.output_next = len(prompt)  # position of the first output token that no step returns yet

    @property
    def prompt_len(self) -> int:
        return len(self.prompt)

    @property
    def samples_launched(self) -> int:
        return self.num_tokens - len(self.prompt)

    @property
    def launched_all(self) -> bool:
        """No further step is needed: known by arithmetic, before any result is."""
        return self.num_tokens - len(self.prompt) >= self.max_tokens and (self.max_tokens > 0 or self.num_computed >= len(self.prompt))

    @property
    def may_jump(self) -> bool:
        """Whether tokens may be appended unseen: no mask but the grammar's, no end among them, no logprobs of a masked distribution."""
        processed = self.plan.return_logprob and self.plan.logprobs_mode == "processed"
        return self.matcher is None and not self.features & Feature.EDIT and not processed

    def known(self, position: int, count: int = 1) -> list[int]:
        """Of the tokens taken ahead, `count` from an absolute position on; fewer where they end."""
        first = position - len(self.prompt) - len(self.output_ids)
        return list(islice(self.ahead, first, first + count)) if count > 0 else []

    @property
    def next_position(self) -> int:
        """Of the first token that is not known: it is the one that the grammar's next mask is for."""
        return len(self.prompt) + len(self.output_ids) + len(self.ahead)

    @property
    def room(self) -> int:
        """Tokens that may be appended: the last one is sampled."""
        return max(0, self.max_tokens - self.samples_launched - 1)

    def to_append(self) -> list[int]:
        """Known tokens behind all that was launched. One that completes the grammar is sampled: it needs no row."""
        if self.num_computed < len(self.prompt) or self.unsent is not None or self.state is not State.RUNNING:
            return []
        if self.aborting or not self.may_jump:
            return []
        return self.known(self.num_tokens, min(self.room, self.next_position - self.ahead_completes - self.num_tokens))

    def append(self, tokens: Sequence[int]) -> None:
        """Tokens that follow the last one that was launched, without sampling them: the next span is longer by so many."""
        self.unsent = self.num_tokens, np.array(tokens, np.int32)
        self.num_tokens += len(tokens)

    @property
    def cache_limit(self) -> int:
        """Tokens that may come from the cache: up to the first row that is wanted, and never the last token."""
        limit = self.num_tokens - 1
        if self.plan.return_hidden_states is True:
            limit = min(limit, self.hidden_next)
        if self.logprob_next < len(self.prompt) - 1:
            limit = min(limit, self.logprob_next)
        return limit

    def token_ids(self) -> npt.NDArray[np.int32]:
        """Prompt and processed output tokens. [P + G] int32, host."""
        if not self.output_ids:
            return self.prompt
        return np.concatenate([self.prompt, np.asarray(self.output_ids, np.int32)])


def request_features(sampling: SamplingParams, plan: OutputPlan, constrained: bool) -> int:
    features = 0
    if sampling.temperature > 0:
        features |= Feature.RANDOM
        if sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0:
            features |= Feature.FILTER
    if sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1:
        features |= Feature.PENALTY
    if sampling.logit_bias or sampling.allowed_token_ids is not None or sampling.bad_token_ids or sampling.min_new_tokens > 0:
        features |= Feature.EDIT
    if constrained:
        features |= Feature.CONSTRAINT
    if plan.return_logprob:
        features |= Feature.LOGPROB
    if plan.logprob_start is not None:
        features |= Feature.INPUT_LOGPROB
    if plan.return_hidden_states:
        features |= Feature.HIDDEN
    return features
