"""The scheduler against a simulated device: every page holds what its reader expects, nothing leaks, every request ends."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sidestream.engine.batch import Batch
from sidestream.engine.copies import Arena, Copies, GenerationBatchResult, Ledger
from sidestream.engine.loop import EngineLoop, Factories, Limits
from sidestream.engine.outputs import LogitsProcessorOutput
from sidestream.engine.pages import PagePool
from sidestream.engine.questions import flush_cache
from sidestream.engine.radix import RadixCache
from sidestream.engine.request import State
from sidestream.engine.scheduler import Scheduler
from sidestream.engine.streams import CpuEvent, Launched
from sidestream.messages import StepOutputs, Submit
from sidestream.params import OutputParams, SamplingParams

CONTEXT, VOCABULARY, EOS = 40, 50, 0
HIDDEN, ITEM = 4, 4  # of a hidden row: values, bytes of each


class SimulatedDevice:
    """Stands for the runner. A position of a page holds the hash of all tokens up to it, or None when it was freed or never written."""

    def __init__(self, slots: int, page_size: int, seed: int, arena_bytes: int) -> None:
        self.page_size = page_size
        self.arena_bytes = arena_bytes
        self.tokens = np.zeros((slots, CONTEXT + 1), np.int64)
        self.table = np.zeros((slots, CONTEXT), np.int64)
        self.content: dict[int, int] = {}
        self.random = np.random.default_rng(seed)
        self.rows: dict[int, list[int]] = defaultdict(list)  # positions returned, by key of the request
        self.largest_prompt_part = 0

    def free(self, pages: list[int]) -> None:
        for page in pages:
            for i in range(self.page_size):
                self.content.pop(page * self.page_size + i, None)

    def run_batch(self, batch: Batch, masks: object = None) -> Launched[GenerationBatchResult]:
        for slot, _, tokens in batch.token_uploads:
            self.tokens[slot, : len(tokens)] = tokens
        for slot, column, page in batch.page_updates.tolist():
            self.table[slot, column] = page
        prompt_part = 0
        for slot, start, length in zip(batch.slots.tolist(), batch.starts.tolist(), batch.lengths.tolist(), strict=True):
            prompt_part += length if length > 1 else 0
            expected = 0
            for position in range(start + length):
                expected = hash((expected, int(self.tokens[slot, position])))
                page = int(self.table[slot, position // self.page_size])
                assert page != 0, "a token would go to the null page"
                where = page * self.page_size + position % self.page_size
                if position < start:
                    assert self.content.get(where) == expected, f"slot {slot} reads page {page} at {position}: it holds something else"
                else:
                    self.content[where] = expected
        self.largest_prompt_part = max(self.largest_prompt_part, prompt_part)
        copied = batch.outputs.taps.copied if batch.outputs.taps else ()
        leaving = 4 * len(batch.sampled) + sum(len(group.rows) * len(group.layers) * HIDDEN * ITEM for group in copied)
        assert leaving <= self.arena_bytes, "the outputs of a step would not fit the arena"
        sampled = [int(self.random.integers(EOS, VOCABULARY)) for _ in batch.sampled]
        for row, span in enumerate(batch.sampled):
            self.tokens[batch.slots[span], batch.starts[span] + batch.lengths[span]] = sampled[row]
        for piece in batch.outputs.hidden_slices:
            count = piece.rows.stop - piece.rows.start
            self.rows[batch.requests[piece.span].key] += range(piece.position, piece.position + count)
        done = CpuEvent()
        done.complete()
        result = GenerationBatchResult(LogitsProcessorOutput(), torch.tensor(sampled, dtype=torch.int32), None, copy_done=done)  # type: ignore[arg-type]
        return Launched[GenerationBatchResult]().run(lambda: result)


class Harness:
    """A real loop and scheduler over a simulated device, driven step by step."""

    def __init__(
        self,
        *,
        pages: int = 10,
        page_size: int = 4,
        slots: int = 4,
        chunk: int = 8,
        overlap: bool = True,
        seed: int = 0,
        arena_bytes: int = 1 << 20,
        radix: bool = True,
    ) -> None:
        context = min(CONTEXT, pages * page_size)
        self.device = SimulatedDevice(slots, page_size, seed, arena_bytes)
        pool = PagePool(pages, page_size)
        pool.on_free = self.device.free
        self.scheduler = Scheduler(
            pool,
            RadixCache(pool, enabled=radix),
            slots=slots,
            chunk=chunk,
            arena_bytes=arena_bytes,
            hidden_size=HIDDEN,
            itemsize=ITEM,
        )
        copies = Copies(None, None, Arena(64, pinned=False), Ledger())  # type: ignore[arg-type]
        self.messages: list[StepOutputs] = []
        self.loop = EngineLoop(
            self.scheduler,
            self.device,  # type: ignore[arg-type]
            copies,
            Limits(context, VOCABULARY, frozenset({EOS})),
            Factories(lambda _: None, lambda _: None, lambda *_: {}, lambda _: None),  # type: ignore[arg-type]
            emit=self._emitted,
            overlap=overlap,
        )
        self.context = context
        self.overlap = overlap
        self.pending: tuple[Batch, Any] | None = None
        self.submitted: dict[int, Submit] = {}

    def _emitted(self, message: Any) -> None:
        if isinstance(message, StepOutputs):
            self.messages.append(message)

    def submit(self, prompt: list[int], *, primary: int | None = None, **options: Any) -> int:
        key = len(self.submitted) + 1
        outputs = {name: options.pop(name) for name in list(options) if "hidden" in name or "logprob" in name}
        plan = OutputParams(**outputs).check(vocab_size=VOCABULARY, num_layers=2, prompt_len=len(prompt))
        message = Submit(
            key, f"r{primary or key}", int(primary is not None), np.array(prompt, np.int32), SamplingParams(**options), plan, primary
        )
        self.submitted[key] = message
        self.loop.submit(message)
        return key

    def step(self) -> Batch | None:
        batch = self.scheduler.next_batch()
        launched = self.device.run_batch(batch) if batch else None
        if not self.overlap and batch:
            self.loop.process_batch_result(batch, launched)  # type: ignore[arg-type]
            return batch
        if self.pending:
            self.loop.process_batch_result(*self.pending)
        self.pending = (batch, launched) if batch else None
        return batch

    def run(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work and not self.pending:
                return
            self.step()
            self.scheduler.check()
        raise AssertionError(f"work is left after {limit} steps: {[r.rid for r in self.scheduler.waiting]} wait")

    def tokens(self, key: int) -> list[int]:
        return [t for m in self.messages for k, t in zip(m.keys, m.tokens, strict=True) if k == key]

    def reason(self, key: int) -> str:
        reasons = [m.finished[key].reason for m in self.messages if key in m.finished]
        assert len(reasons) == 1, f"request {key} ended {len(reasons)} times"
        return reasons[0]

    def check_answers(self) -> None:
        """Every request ended once, with the tokens and rows it must have."""
        for key, message in self.submitted.items():
            reason, tokens, length = self.reason(key), self.tokens(key), len(message.prompt)
            most = min(message.sampling.max_new_tokens, self.context - length)
            if reason == "length":
                assert len(tokens) == most
            if reason == "stop":
                assert tokens[-1] == EOS and EOS not in tokens[:-1] and len(tokens) <= most
            rows = self.device.rows[key]
            assert rows == sorted(set(rows)), "a row was returned twice or out of order"
            if message.plan.return_hidden_states is True and reason != "abort":
                first = max(message.plan.hidden_start, length if message.primary else 0)
                last = max(length - 1, length + len(tokens) - 2)
                assert rows[: max(0, last + 1 - first)] == list(range(first, last + 1))


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        pages=st.integers(3, 24),
        page_size=st.sampled_from([1, 2, 4, 16]),
        slots=st.integers(1, 5),
        chunk=st.integers(1, 24),
        overlap=st.booleans(),
        radix=st.booleans(),
        small_arena=st.booleans(),
        seed=st.integers(0, 99),
    )
    def start(self, pages: int, page_size: int, slots: int, chunk: int, overlap: bool, radix: bool, small_arena: bool, seed: int) -> None:
        self.harness = Harness(
            pages=pages,
            page_size=page_size,
            slots=slots,
            chunk=chunk,
            overlap=overlap,
            radix=radix,
            seed=seed,
            arena_bytes=64 if small_arena else 1 << 20,
        )

    @rule(
        family=st.integers(1, 3),
        length=st.integers(1, 30),
        tail=st.lists(st.integers(1, 5), max_size=3),
        new=st.integers(0, 20),
        ignore_eos=st.booleans(),
        rows=st.sampled_from([False, False, True]),
        start=st.integers(0, 12),
        choices=st.integers(1, 2),
    )
    def submit(self, family: int, length: int, tail: list[int], new: int, ignore_eos: bool, rows: bool, start: int, choices: int) -> None:
        prompt = ([family] * length + tail)[: self.harness.context - 1]
        options = {
            "max_new_tokens": new,
            "temperature": 0.0,
            "ignore_eos": ignore_eos,
            "return_hidden_states": rows,
            "hidden_states_start": start if rows else 0,
        }
        first = self.harness.submit(prompt, **options)
        for _ in range(choices - 1):
            self.harness.submit(prompt, primary=first, **options)

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @precondition(lambda self: getattr(self, "harness", None) and self.harness.submitted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.harness.loop.abort(f"r{data.draw(st.sampled_from(sorted(self.harness.submitted)))}")

    @rule()
    def flush(self) -> None:
        flush_cache(self.harness.loop)

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "harness"):
            self.harness.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        self.harness.check_answers()
        scheduler = self.harness.scheduler
        flush_cache(self.harness.loop)
        assert scheduler.pool.free_pages == scheduler.pool.num_pages


SchedulerMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestScheduler = SchedulerMachine.TestCase


def test_running_request_is_never_delayed_by_more_than_one_chunk() -> None:
    harness = Harness(pages=60, page_size=4, chunk=8, slots=4, overlap=False)
    first = harness.submit([1] * 4, max_new_tokens=30, ignore_eos=True, temperature=0.0)
    harness.step()
    harness.submit([2] * 39, max_new_tokens=1, temperature=0.0)
    harness.submit([3] * 39, max_new_tokens=1, temperature=0.0)
    for _ in range(8):
        before = len(harness.tokens(first))
        batch = harness.step()
        assert batch is not None and batch.num_tokens <= 9
        assert len(harness.tokens(first)) == before + 1
    assert harness.device.largest_prompt_part == 8


@pytest.mark.parametrize("overlap", [False, True])
def test_shared_prefix_that_nobody_has_computed_is_computed_once(overlap: bool) -> None:
    harness = Harness(pages=60, page_size=4, chunk=64, slots=8, overlap=overlap)
    shared = [1] * 16
    for i in range(6):
        harness.submit([*shared, 10 + i, 11, 12], max_new_tokens=1, ignore_eos=True, temperature=0.0)
    harness.run()
    assert harness.scheduler.forward_tokens == 16 + 6 * 3
    assert all(harness.reason(key) == "length" for key in harness.submitted)


def test_end_by_length_runs_no_extra_step() -> None:
    for overlap in (False, True):
        harness = Harness(overlap=overlap)
        harness.submit([1, 2, 3], max_new_tokens=1, temperature=0.0)
        harness.run()
        assert harness.scheduler.steps == 1
        assert harness.scheduler.forward_tokens == 3


def test_retraction_puts_the_youngest_back_and_it_catches_up() -> None:
    harness = Harness(pages=14, page_size=4, chunk=32, slots=4, overlap=True, radix=False)
    keys = [harness.submit([i] * 4, max_new_tokens=36, ignore_eos=True, temperature=0.0) for i in range(1, 4)]
    order = []
    while harness.scheduler.has_work or harness.pending:
        harness.step()
        order += [r.key for r in harness.scheduler.waiting if r.state is State.RETRACTED]
    assert harness.scheduler.retracted > 0
    assert keys[0] not in order, "the oldest request is never the one to give way"
    assert [len(harness.tokens(key)) for key in keys] == [36, 36, 36]


def test_longest_cached_prefix_first() -> None:
    harness = Harness(pages=60, page_size=4, chunk=64, slots=1, overlap=False)
    harness.scheduler.longest_prefix_first = True
    harness.submit([1] * 12, max_new_tokens=1, temperature=0.0)
    harness.run()
    cold = harness.submit([2] * 12, max_new_tokens=1, temperature=0.0)
    warm = harness.submit([1] * 12 + [3], max_new_tokens=1, temperature=0.0)
    harness.step()
    assert harness.tokens(warm) and not harness.tokens(cold)


def test_full_arena_makes_the_batch_smaller_and_nobody_starves() -> None:
    row = HIDDEN * ITEM  # of one layer
    harness = Harness(pages=60, page_size=4, chunk=64, slots=4, overlap=False, arena_bytes=2 * (row + 4))
    keys = [harness.submit([i] * 5, max_new_tokens=4, ignore_eos=True, temperature=0.0, return_hidden_states=True) for i in range(1, 5)]
    harness.run()
    harness.check_answers()
    assert all(harness.device.rows[key] == list(range(8)) for key in keys)
