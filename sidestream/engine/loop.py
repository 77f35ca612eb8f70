"""The engine loop: the step, with and without overlap, and the processing of its results.

The path of a request: `ingest` queues it, `scheduler.next_batch` plans its spans, `run_batch` launches forward, sampling and the
conditional copy, `process_batch_result` appends the token, matches stops, collects rows and frees what has ended.
"""

from __future__ import annotations

import queue
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sidestream.engine.batch import Batch
from sidestream.engine.collect import StepRows, collect_rows, hidden_rows
from sidestream.engine.copies import Copies, GenerationBatchResult, host_array
from sidestream.engine.questions import Questions, stats
from sidestream.engine.request import MAX_JUMP, Constraint, FinishReason, Request, StopMatcher
from sidestream.engine.rows import NOTHING_ADMITTED
from sidestream.engine.runner import Masks, Runner
from sidestream.engine.scheduler import Scheduler
from sidestream.engine.streams import Launched
from sidestream.errors import NoToken
from sidestream.messages import Abort, Ask, EngineFailed, Finish, GrammarReady, Inbound, Outbound, Report, Rows, StepOutputs, Stop, Submit
from sidestream.models.interpreter import Interpreter

Pending = tuple[Batch, Launched[GenerationBatchResult]]
REPORT_SECONDS = 0.25  # between two reports while there is work; one more when it ends


@dataclass(frozen=True)
class Limits:
    context: int  # tokens of prompt and output together
    vocab_size: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True)
class Factories:
    """How the engine gets what it knows only by protocol."""

    stop_matcher: Callable[[Submit], StopMatcher | None]
    constraint: Callable[[Submit], Constraint | Future[Constraint] | None]  # a future: the request waits, and nobody else
    fill_masks: Callable[[Mapping[int, Constraint], Masks], Mapping[int, Exception]]  # by row of the masks: what went wrong
    load: Callable[[str], Interpreter]  # other weights of the same model; runs on the compute stream, raises ModelError


class EngineLoop:
    """Owns all requests. One thread runs `run`; others talk to it through `inbox` and get `Outbound` messages through `emit`."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        copies: Copies,
        limits: Limits,
        factories: Factories,
        *,
        emit: Callable[[Outbound], None],
        overlap: bool,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.copies = copies
        self.limits = limits
        self.factories = factories
        self.emit = emit
        self.overlap = overlap
        self.inbox: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
        self.requests: dict[int, Request] = {}  # open ones, by key
        self.copied_bytes: dict[int, dict[str, int]] = defaultdict(lambda: {"logprob": 0, "hidden": 0})  # by key
        self.questions = Questions()
        self.totals: Counter[str] = Counter()  # of tokens and requests
        self.seconds: dict[str, float] = dict.fromkeys(("plan", "launch", "process", "mask"), 0.0)
        self.weight_version = 0
        self.max_jump = MAX_JUMP
        self._mask_words = -(-limits.vocab_size // 32)
        self._reported = 0.0  # when
        self._stopping = False

    def run(self) -> BaseException | None:
        """Run until told to stop. An error ends the engine: it is sent to whoever waits, and returned."""
        try:
            if self.overlap:
                self.overlap_loop()
            else:
                self.normal_loop()
        except BaseException as error:
            self.emit(EngineFailed(error))
            self.runner.close()
            return error
        return None

    # The step

    def overlap_loop(self) -> None:
        """Launch step k+1 before the results of step k are processed."""
        pending: Pending | None = None
        while self.ingest(wait=pending is None and not self.scheduler.has_work):
            if self.questions and pending:  # answers are about whole steps: a rare question costs one overlap
                self.process_batch_result(*pending)
                pending = None
            self.answer_questions()
            batch = self.plan()
            launched = self.launch(batch) if batch else None
            if pending:
                self.process_batch_result(*pending)
            pending = None
            if batch and launched:
                pending = batch, self.runner.launch_batch_sample_if_needed(launched, batch, self.fill_masks)
        if pending:
            self.process_batch_result(*pending)
        self.close()

    def normal_loop(self) -> None:
        """The same calls, each step processed straight after it was launched: matchers are up to date, no sampling is ever delayed."""
        while self.ingest(wait=not self.scheduler.has_work):
            self.answer_questions()
            batch = self.plan()
            if batch:
                launched = self.launch(batch, self.fill_masks(batch) if batch.has_constraint else None)
                self.process_batch_result(batch, launched)
        self.close()

    def plan(self) -> Batch | None:
        """The next step: host arithmetic only, never waits for the device."""
        started = time.perf_counter()
        batch = self.scheduler.next_batch()
        if batch is not None:
            self.seconds["plan"] += time.perf_counter() - started
        return batch

    def launch(self, batch: Batch, masks: Masks | None = None) -> Launched[GenerationBatchResult]:
        started = time.perf_counter()
        launched = self.runner.run_batch(batch, masks)
        self.seconds["launch"] += time.perf_counter() - started
        return launched

    def ingest(self, *, wait: bool) -> bool:
        """Take what has arrived: new requests, aborts, questions. `wait` for something when there is no work. False: stop."""
        wait = wait and not self.questions  # one that waited for the requests before it can be answered now
        while wait or not self.inbox.empty():
            message = self.inbox.get()
            wait = False
            if isinstance(message, Ask):
                self.questions.take(message)
            elif isinstance(message, Stop):
                self._stopping = True
            elif isinstance(message, GrammarReady):
                self.take_grammar(message)
            else:
                self.take(message)
        return not self._stopping

    def take(self, message: Submit | Abort) -> None:
        if isinstance(message, Abort):
            self.abort(message.rid, message.keys)
        if not self.questions.hold(message) and isinstance(message, Submit):
            self.submit(message)

    def answer_questions(self) -> None:
        if not self.questions:
            return
        for message in self.questions.answer(self):
            self.take(message)
        if not self.requests:  # the cache may have changed
            self._report(time.perf_counter())

    def submit(self, message: Submit) -> None:
        limits, sampling = self.limits, message.sampling
        matcher = constraint = error = None
        try:
            matcher, constraint = self.factories.stop_matcher(message), self.factories.constraint(message)
        except Exception as raised:  # this request ends at once; nobody else notices
            error = raised
        compiling = constraint if isinstance(constraint, Future) else None
        request = Request(
            key=message.key,
            rid=message.rid,
            index=message.index,
            prompt=message.prompt,
            sampling=sampling,
            plan=message.plan,
            max_tokens=min(sampling.max_new_tokens, limits.context - len(message.prompt)),
            eos_token_ids=limits.eos_token_ids,
            matcher=matcher,
            constraint=None if isinstance(constraint, Future) else constraint,
            compiling=compiling is not None,
            primary=None if message.primary is None else self.requests.get(message.primary),
            shares_prompt=message.primary is not None,
        )
        request.error = error
        self.requests[request.key] = request
        self.scheduler.add(request)
        self.totals["requests"] += 1
        self.totals["prompt_tokens"] += 0 if request.shares_prompt else len(message.prompt)
        if error is not None:
            self.abort(request.rid)
        elif compiling is not None:
            compiling.add_done_callback(lambda done: self.inbox.put(GrammarReady(message.key, done)))

    def take_grammar(self, message: GrammarReady) -> None:
        """The grammar that a request waited for, or what is wrong with it."""
        request = self.requests.get(message.key)
        if request is None:  # it has ended meanwhile
            return
        request.compiling = False
        try:
            request.constraint = message.done.result()
        except Exception as error:
            request.error = error
            self.abort(request.rid, frozenset({request.key}))

    def abort(self, rid: str, keys: frozenset[int] | None = None) -> None:
        """End a request's choices: at once where no step is in flight, else with the step in flight, whose token still counts."""
        step = StepOutputs([], [], {}, {}, {})
        for request in [r for r in self.requests.values() if r.rid == rid and (keys is None or r.key in keys)]:
            if request.in_flight:  # in the one step not processed yet: none is launched after it
                request.aborting = True
            else:
                self._finish(request, "abort", step)
        self._emit(step)
        if step.finished and not self.requests:  # no step comes that would tell
            self._report(time.perf_counter())

    def fill_masks(self, batch: Batch) -> Masks:
        """Packed grammar masks of the sampled rows; all ones where a row has no grammar. [sampled, ceil(vocabulary/32)]."""
        masks = np.full((len(batch.sampled), self._mask_words), 0xFFFFFFFF, np.uint32)
        rows = {row: request for row, span in enumerate(batch.sampled) if _is_constrained(request := batch.requests[span])}
        self._foresee(list(rows.values()))
        for row, request in rows.items():
            if known := request.known(int(batch.sampling.lengths[row])):
                _admit_only(known[0], masks[row])
            elif request.next_mask is not None:  # else its grammar failed: the request ends with this step, sampled like one without
                masks[row] = request.next_mask
        return masks

    def _foresee(self, requests: Sequence[Request]) -> None:
        """Find the mask of each request's next token that is not known. Where it leaves no choice the token is known, too."""
        started = time.perf_counter()
        asked = [request for request in requests if request.next_mask is None and not request.ahead_completes]
        masks = np.empty((len(asked), self._mask_words), np.uint32)
        constraints = {row: request.constraint for row, request in enumerate(asked) if request.constraint is not None}
        failed = self.factories.fill_masks(constraints, masks)
        for row, request in enumerate(asked):
            request.error = failed.get(row)
            request.next_mask = None if row in failed else masks[row]
        for request in requests:
            if request.may_jump and request.next_mask is not None:
                self._look_ahead(request, request.next_mask)
            if following := request.to_append():
                request.append(following)
        self.seconds["mask"] += time.perf_counter() - started

    def _look_ahead(self, request: Request, mask: npt.NDArray[np.uint32]) -> None:
        """Take the tokens that the grammar leaves no choice of, and find the mask of the one behind them."""
        assert request.constraint is not None
        end = request.num_tokens + min(self.max_jump, request.room)
        try:
            while request.next_position < end and (only := _only(mask)) is not None and only not in request.stop_ids:
                request.ahead_completes = request.constraint.advance(only)
                request.ahead.append(only)
                if request.ahead_completes:
                    request.next_mask = None
                    return
                request.constraint.fill_mask(mask)
        except Exception as error:  # the request ends with its next step
            request.error, request.next_mask = error, None

    # Results

    def process_batch_result(self, batch: Batch, launched: Launched[GenerationBatchResult]) -> None:
        """Append the tokens of one step, match stops, collect rows, free what has ended, and emit one message."""
        started = time.perf_counter()
        result = launched.result()
        assert result.copy_done is not None
        self.copies.wait(result.copy_done)
        result.sources.clear()
        rows = collect_rows(batch, result) if batch.features else None
        tokens = [] if result.next_token_ids is None else host_array(result.next_token_ids).tolist()
        step = StepOutputs([], [], {}, {}, {})
        token_of = dict(zip(batch.sampled, tokens, strict=True)) if len(tokens) != len(batch.requests) else None
        for span, request in enumerate(batch.requests):
            token = tokens[span] if token_of is None else token_of.get(span)
            appended = batch.appended.get(span, 0)
            if request.finish_reason is not None:  # it ended while this step was in flight: nothing of it is appended or emitted
                self._discard(request, rows, span, token is not None)
            else:
                self._take(request, token, appended, rows, span, step)
            self.scheduler.step_processed(request)
        self._emit(step)
        self.totals["generation_tokens"] += len(step.tokens)
        now = time.perf_counter()
        self.seconds["process"] += now - started
        if batch.has_constraint and not self.overlap:  # else a step is under way already that samples the next token
            self._foresee([request for request in batch.requests if _is_constrained(request)])
        if now - self._reported >= REPORT_SECONDS or not self.requests:
            self._report(now)

    def _report(self, now: float) -> None:
        self._reported = now
        self.emit(Report(stats(self)))

    def _take(self, request: Request, token: int | None, appended: int, rows: StepRows | None, span: int, step: StepOutputs) -> None:
        """Give a live request what the step computed for it. `appended` of its tokens were not sampled."""
        if request.admission is not None:
            step.admitted[request.key], request.admission = request.admission, None
            self.totals["cached_tokens"] += 0 if request.shares_prompt else step.admitted[request.key].cached_tokens
        if rows is not None:
            self._take_rows(request, rows, span, step)
        for _ in range(appended):
            self._take_token(request, request.ahead.popleft(), step)
        if token is None:
            if request.max_tokens == 0 and request.launched_all and request.in_flight == 1:
                self._finish(request, "length", step)
            elif request.aborting:
                self._finish(request, "abort", step)
            return
        if token < 0 and request.error is None:
            request.error = NoToken(_why_no_token(request, token))
        if request.error is not None:  # there is no token, or its mask failed and it was chosen without
            self._finish(request, "abort", step)
            return
        self._take_token(request, token, step)
        reason = self._end_of(request, token)
        if reason is not None:
            self._finish(request, reason, step)

    @staticmethod
    def _take_token(request: Request, token: int, step: StepOutputs) -> None:
        request.output_ids.append(token)
        step.keys.append(request.key)
        step.tokens.append(token)

    def _end_of(self, request: Request, token: int) -> FinishReason | None:
        """Why the request ends with this token, if it does."""
        count = len(request.output_ids)
        try:
            match = request.matcher.feed(token) if request.matcher is not None else None
            complete = self._advance(request, token)
        except Exception as error:
            request.error = error
            return "abort"
        if token in request.stop_ids and count >= request.sampling.min_new_tokens:
            request.matched_stop = token
            return "stop"
        if match is not None:
            request.matched_stop, request.stop_offset = match.stop, match.offset
            return "stop"
        if complete:
            return "stop"
        if count >= request.max_tokens:
            return "length"
        return "abort" if request.aborting else None

    @staticmethod
    def _advance(request: Request, token: int) -> bool:
        """Whether the grammar is complete with this token."""
        if request.constraint is None:
            return False
        if not request.ahead:
            request.next_mask = None
            return request.constraint.advance(token)
        known = request.ahead.popleft()  # it has taken it already
        assert token == known, "the mask admitted one token alone"
        return request.ahead_completes and not request.ahead

    def _take_rows(self, request: Request, rows: StepRows, span: int, step: StepOutputs) -> None:
        kept = rows.kept.get(span)
        if kept is not None:
            request.kept = kept
        own = rows.rows.get(span)
        if own is not None:
            step.rows[request.key] = own
            self._count(self.copied_bytes[request.key], request, own)

    @staticmethod
    def _count(total: dict[str, int], request: Request, own: Rows) -> None:
        """Add the bytes that these rows were in the copy."""
        for logprobs in (own.input_logprobs, own.output_logprobs):
            if logprobs is not None:
                total["logprob"] += len(logprobs.chosen) * request.row.logprob
        if own.hidden is not None:
            total["hidden"] += own.hidden.shape[0] * request.row.hidden

    def _discard(self, request: Request, rows: StepRows | None, span: int, has_token: bool) -> None:
        discarded = self.copies.ledger.discarded
        discarded["token"] += 4 * has_token
        own = None if rows is None else rows.rows.get(span)
        if own is not None:
            self._count(discarded, request, own)

    def _finish(self, request: Request, reason: FinishReason, step: StepOutputs) -> None:
        """The one place where a request ends. It is checked before anything else of it is emitted; finishing twice does nothing."""
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        self.totals["aborted"] += reason == "abort"
        self._fetch_last_row(request, step)
        step.finished[request.key] = Finish(
            reason,
            request.matched_stop,
            request.stop_offset,
            isinstance(request.matched_stop, int),
            {"token": 4 * len(request.output_ids), **self.copied_bytes[request.key]},
            request.error,
        )
        del self.requests[request.key], self.copied_bytes[request.key]
        self.scheduler.finish(request)

    def _fetch_last_row(self, request: Request, step: StepOutputs) -> None:
        """A `"last"` row whose request ended by surprise is still on the device."""
        kept, request.kept = request.kept, None
        own = step.rows.get(request.key)
        if kept is None or (own is not None and own.hidden is not None):
            return
        host = self.copies.copy_late(kept.tensor, kept.row)
        kept.result.count_late(host[:, :1].nbytes * request.plan.layers.count(self.runner.decoder.spec.num_layers))
        self.copied_bytes[request.key]["hidden"] += host.nbytes
        step.rows[request.key] = (own or Rows())._replace(hidden=hidden_rows(host, kept.position))

    def _emit(self, step: StepOutputs) -> None:
        if step.keys or step.rows or step.finished or step.admitted:
            self.emit(step)

    # The end

    def close(self) -> None:
        """Abort what is open, then end the runner. Nothing is in flight any more."""
        step = StepOutputs([], [], {}, {}, {})
        for request in list(self.requests.values()):
            self._finish(request, "abort", step)
        self._emit(step)
        self.answer_questions()
        self.runner.close()


def _only(mask: npt.NDArray[np.uint32]) -> int | None:
    """The token id that a mask admits, if it is one alone."""
    if np.count_nonzero(mask) != 1:
        return None
    word = int(mask.argmax())
    bits = int(mask[word])
    return None if bits & (bits - 1) else 32 * word + bits.bit_length() - 1


def _is_constrained(request: Request) -> bool:
    return request.constraint is not None and request.finish_reason is None and request.error is None


def _admit_only(token: int, mask: npt.NDArray[np.uint32]) -> None:
    mask[:] = 0
    mask[token // 32] = np.uint32(1 << token % 32)


def _why_no_token(request: Request, failure: int) -> str:
    place = f"no token can be chosen at position {request.prompt_len + len(request.output_ids)}"
    if failure != NOTHING_ADMITTED:
        return f"{place}: the model's logits are not finite"
    sampling = request.sampling
    masks = {
        "grammar": request.constraint is not None,
        "allowed_token_ids": sampling.allowed_token_ids is not None,
        "bad_token_ids": bool(sampling.bad_token_ids),
        "min_new_tokens": len(request.output_ids) < sampling.min_new_tokens,
    }
    used = [name for name, is_used in masks.items() if is_used]
    return f"{place}: {', '.join(used) or 'the model'} admits none"
