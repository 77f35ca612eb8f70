"""Who runs next, and on which memory. Host arithmetic only: nothing here waits for the device."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import islice

import numpy as np
import numpy.typing as npt

from sidestream.engine.batch import Batch
from sidestream.engine.memory import TokenUpload
from sidestream.engine.outputs import output_bytes, plan_outputs, returned_unsampled, row_bytes
from sidestream.engine.pages import PagePool
from sidestream.engine.radix import RadixCache
from sidestream.engine.request import MAX_JUMP, Feature, Request, State
from sidestream.engine.sampling import plan_sampling
from sidestream.messages import Admission

HEADROOM_TOKENS = 32  # room each running request should still have when another one is admitted
SORTED_AHEAD = 128  # of the queue, this many are looked at for the longest cached prefix


class Scheduler:
    """Gives every running request the span it can catch up with, then admits waiting ones.

    A step holds one token of every request that decodes, and prompt tokens up to `chunk`: so a running request's next token is never
    delayed by more than one chunk. Pages come from the pool, then from the cache (least recently used), then from the request admitted
    last, which is retracted. Pages and slots go back only when no step in flight holds the request.
    """

    def __init__(
        self,
        pool: PagePool,
        radix: RadixCache,
        *,
        slots: int,
        chunk: int,
        arena_bytes: int,
        hidden_size: int,
        itemsize: int,
        longest_prefix_first: bool = False,
    ) -> None:
        self.pool = pool
        self.radix = radix
        self.chunk = chunk
        self.arena_bytes = arena_bytes
        self.hidden_size = hidden_size
        self.itemsize = itemsize
        self.longest_prefix_first = longest_prefix_first
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self.releasing: list[Request] = []  # ended or retracted, still held by a step in flight
        self.steps = 0
        self.retracted = 0
        self.forward_tokens = 0
        self._free_slots = list(range(slots - 1, -1, -1))
        self._skipped: list[Request] = []  # running ones the arena had no room for: first in the next step

    def add(self, request: Request) -> None:
        request.row = row_bytes(request.plan, self.hidden_size, self.itemsize)
        self.waiting.append(request)

    @property
    def has_work(self) -> bool:
        """Whether a step can be planned, now or when one in flight has been processed."""
        return bool(self.running or self.releasing) or any(not request.compiling for request in self.waiting)

    # One step

    def next_batch(self) -> Batch | None:
        """Plan a step, or None when nothing can run before a step in flight is processed."""
        step = _Step(self.chunk, self.arena_bytes)
        self._continue_running(step)
        self._admit(step)
        if not step.requests:
            return None
        return self._launch(step)

    def _continue_running(self, step: _Step) -> None:
        skipped, self._skipped = self._skipped, []
        order = skipped + [r for r in self.running if r not in skipped] if skipped else list(self.running)
        page_size = self.pool.page_size
        for request in order:
            if request.state is not State.RUNNING or request.aborting or request.launched_all:
                continue
            start = request.num_computed
            if request.num_tokens - start == 1 and start < len(request.pages) * page_size and not request.ahead:
                size = 4 + request.row.logprob + request.row.hidden
                if size <= step.arena_left:  # the common case, one token on a page it has: nothing to decide
                    step.add(request, start, 1)
                    step.arena_left -= size
                    continue
            length, size = self._fit(request, step)
            if length and self._provide_pages(request, start + length, step):
                step.add(request, start, length)
                step.arena_left -= size

    def _fit(self, request: Request, step: _Step) -> tuple[int, int]:
        """How much of what `request` lacks fits the chunk and the arena, and the bytes of its outputs; 0 if nothing does."""
        start = request.num_computed
        lacking = request.num_tokens - start
        decodes = start >= request.num_tokens - 1 - MAX_JUMP and start >= request.prompt_len  # a token, and those appended to it
        length = lacking if decodes or lacking == 1 else min(lacking, step.prompt_left)
        if not length:
            return 0, 0
        size = 4
        if request.features & Feature.OUTPUT:
            sized = partial(output_bytes, request, start, row=request.row)
            size = sized(start + length)
            if size > step.arena_left:
                # The bytes grow with the span: the longest one that fits is where the room left ends.
                length = bisect_right(range(1, length + 1), step.arena_left, key=lambda n: sized(start + n))
                size = sized(start + length)
        if not length or size > step.arena_left:
            if request.state is State.RUNNING:
                self._skipped.append(request)
            return 0, 0
        if lacking > 1 and not decodes:
            step.prompt_left -= length
        return length, size

    def _admit(self, step: _Step) -> None:
        """Move waiting requests into the step while the chunk, the slots and the memory last."""
        if not self.waiting:
            return
        if self.longest_prefix_first:
            self._sort_queue()
        # Whoever runs goes on first: without room for it to grow a newcomer would be retracted at once.
        headroom = sum(self._pages_ahead(running) for running in self.running)
        passed: list[Request] = []
        while self.waiting and step.prompt_left > 0 and self._free_slots:
            request = self.waiting[0]
            if request.in_flight or request.compiling or self._wait_for_prefix(request):
                passed.append(self.waiting.popleft())  # others may go first: it waits for work that is under way
                continue
            if not self._start(request, headroom, step):
                break
            headroom += self._pages_ahead(request)
            self.waiting.popleft()
        self.waiting.extendleft(reversed(passed))

    def _start(self, request: Request, headroom: int, step: _Step) -> bool:
        """Admit one request if memory and arena allow, with `headroom` pages to spare."""
        tokens = request.token_ids()
        match = self.radix.match(tokens, limit=request.cache_limit)
        self.radix.lock(match.node)
        needed = -(-request.num_tokens // self.pool.page_size) - len(match.pages)
        length = size = 0
        if self.pool.free_pages + self.radix.evictable_pages >= needed + headroom:
            request.num_computed = match.num_tokens
            length, size = self._fit(request, step)
        if not length:  # no room in the cache or in the arena
            self.radix.unlock(match.node)
            request.num_computed = 0
            return False
        request.state = State.RUNNING
        request.waits_for = None
        request.node, request.pages, request.borrowed = match.node, list(match.pages), len(match.pages)
        request.slot = self._free_slots.pop()
        if request.cached_tokens is None:
            request.cached_tokens = min(match.num_tokens, request.prompt_len - 1)
            request.admission = Admission(request.cached_tokens, time.monotonic())
        self.running.append(request)
        step.token_uploads.append((request.slot, 0, tokens))
        step.page_updates += [(request.slot, column, page) for column, page in enumerate(request.pages)]
        start = request.num_computed
        provided = self._provide_pages(request, start + length, step)
        assert provided, "pages were counted before the request was admitted"
        step.add(request, start, length)
        step.arena_left -= size
        return True

    def _pages_ahead(self, request: Request) -> int:
        """Pages a running request still needs for its prompt and the next few tokens."""
        remaining = request.max_tokens - request.samples_launched
        ahead = request.num_tokens + min(max(remaining, 0), HEADROOM_TOKENS)
        return max(0, -(-ahead // self.pool.page_size) - len(request.pages))

    def _sort_queue(self) -> None:
        head = list(islice(self.waiting, SORTED_AHEAD))
        for _ in head:
            self.waiting.popleft()
        lengths = {r.key: self.radix.match_length(r.token_ids(), limit=r.cache_limit) for r in head}
        # Retracted requests stay in front: they were running already. The sort is stable, so equals keep their order.
        head.sort(key=lambda r: (r.state is not State.RETRACTED, -lengths[r.key]))
        self.waiting.extendleft(reversed(head))

    # Prefixes that a neighbour is computing

    def _wait_for_prefix(self, request: Request) -> bool:
        """Whether `request` should start later, from pages that a running request is about to compute."""
        if request.primary is not None and request.primary.finish_reason is None and not self._prompt_launched(request.primary):
            return True  # the prompt's rows of all choices come from the primary one, before theirs
        if not self.radix.enabled:
            return False
        if request.waits_for is not None:
            neighbour, pages = request.waits_for
            computing = neighbour.state is State.RUNNING and not neighbour.aborting and neighbour.num_computed < neighbour.prompt_len
            if computing and neighbour.borrowed < pages:
                return True
            request.waits_for = None
        page_size = self.pool.page_size
        usable = request.cache_limit // page_size
        candidates = [r for r in self.running if r.num_computed < r.prompt_len and r.state is State.RUNNING and not r.aborting]
        if not usable or not candidates:
            return False
        tokens = request.token_ids()
        have = self.radix.match_length(tokens, limit=request.cache_limit) // page_size
        for neighbour in candidates:
            shared = min(_common_prefix(tokens, neighbour.prompt) // page_size, usable)
            if shared > max(have, neighbour.borrowed):
                request.waits_for = (neighbour, shared)
                return True
        return False

    @staticmethod
    def _prompt_launched(request: Request) -> bool:
        return request.samples_launched > 0 or request.num_computed >= request.prompt_len

    # Memory

    def _provide_pages(self, request: Request, end: int, step: _Step) -> bool:
        """Give `request` pages up to position `end`; retract others if need be. False: not in this step."""
        needed = -(-end // self.pool.page_size) - len(request.pages)
        if needed <= 0:
            return True
        while self.pool.free_pages < needed:
            if self.radix.evict(needed - self.pool.free_pages):
                continue
            if self._pages_coming() + self.pool.free_pages >= needed:
                return False  # enough is about to come back from steps in flight
            victim = next(r for r in reversed(self.running) if r.state is State.RUNNING and not r.launched_all)
            self._retract(victim, step)
            if victim is request:
                return False
        first = len(request.pages)
        pages = self.pool.allocate(needed)
        request.pages += pages
        step.page_updates += [(request.slot, first + i, page) for i, page in enumerate(pages)]
        return True

    def _pages_coming(self) -> int:
        """Pages that will be free or evictable when the steps in flight have been processed."""
        ending = [r for r in self.running if r.launched_all or r.aborting]
        return sum(len(r.pages) - r.borrowed for r in ending + self.releasing)

    def _retract(self, victim: Request, step: _Step) -> None:
        """Take a running request's pages back; it goes to the head of the queue and catches up again."""
        step.drop(victim)
        self.retracted += 1
        victim.state = State.RETRACTED
        self.running.remove(victim)
        self.waiting.appendleft(victim)
        if victim.in_flight:
            self.releasing.append(victim)
        else:
            self._release(victim)

    def _publish(self, request: Request, num_tokens: int) -> None:
        """Put the computed whole pages of a running request's prompt into the cache, so that others can start from them.

        A step launched later reads them after this one has written them: the compute stream keeps the order. If somebody else's pages
        for the same tokens are there already, the request keeps its own to itself.
        """
        page_size = self.pool.page_size
        count = min(num_tokens, request.prompt_len) // page_size
        if not self.radix.enabled or count <= request.borrowed or request.node is None:
            return
        tokens = request.prompt[: count * page_size]
        if self.radix.match_length(tokens) > request.borrowed * page_size:
            return
        inserted = self.radix.insert(tokens, request.pages[:count])
        assert not inserted.duplicates
        self.radix.lock(inserted.node)
        self.radix.unlock(request.node)
        request.node, request.borrowed = inserted.node, count

    def finish(self, request: Request) -> None:
        """Take an ended request out. Idempotent; its pages go back now or when the last step that holds it has been processed."""
        if request.state is State.RUNNING:
            self.running.remove(request)
            request.state = State.FINISHED
            if request.in_flight:
                self.releasing.append(request)
            else:
                self._release(request)
        elif request.state in (State.WAITING, State.RETRACTED):
            self.waiting.remove(request)
            request.state = State.FINISHED

    def step_processed(self, request: Request) -> None:
        """A step that held `request` has been processed."""
        request.in_flight -= 1
        if not request.in_flight and request in self.releasing:
            self.releasing.remove(request)
            self._release(request)

    def _release(self, request: Request) -> None:
        """Give pages and slot back: whole pages whose tokens are known stay in the cache."""
        if request.slot < 0:
            return
        assert not request.in_flight
        page_size = self.pool.page_size
        known = min(request.num_computed, request.prompt_len + max(len(request.output_ids) - 1, 0))
        count = known // page_size
        inserted = self.radix.insert(request.token_ids()[: count * page_size], request.pages[:count])
        self.pool.free([*inserted.duplicates, *request.pages[count:]])
        if request.node is not None:
            self.radix.unlock(request.node)
        self._free_slots.append(request.slot)
        request.slot, request.node, request.pages, request.borrowed = -1, None, [], 0
        request.num_computed = 0
        request.num_tokens = request.prompt_len + len(request.output_ids)
        request.unsent = None

    # From a step to a batch

    def _launch(self, step: _Step) -> Batch:
        requests, starts, lengths = step.requests, step.starts, step.lengths
        samples = [s + n == r.num_tokens and r.max_tokens > 0 for r, s, n in zip(requests, starts, lengths, strict=True)]
        features = 0
        for request in requests:
            features |= request.features
        slots = np.array([r.slot for r in requests], np.int64)
        starts_array, lengths_array = np.array(starts, np.int64), np.array(lengths, np.int64)
        appended: dict[int, int] = {}
        for span, request in enumerate(requests):
            if request.ahead and (count := returned_unsampled(request, starts[span] + lengths[span], samples[span])):
                appended[span] = count
            if request.unsent is not None:
                step.token_uploads.append((request.slot, *request.unsent))
                request.unsent = None
        outputs = plan_outputs(requests, starts, lengths, samples, features)
        sampled = tuple(i for i, sample in enumerate(samples) if sample)
        rows = np.array(sampled, np.int64)
        sampled_requests = requests if len(sampled) == len(requests) else [requests[i] for i in sampled]
        sampled_features = 0
        for request in sampled_requests:
            sampled_features |= request.features
        sampling = plan_sampling(sampled_requests, slots[rows], (starts_array + lengths_array)[rows], sampled_features)
        for span, (request, start, length, sample) in enumerate(zip(requests, starts, lengths, samples, strict=True)):
            request.num_computed = start + length
            if sample or span in appended:
                request.output_next = start + length + 1
            request.num_tokens += sample
            request.in_flight += 1
            if start < request.prompt_len:
                self._publish(request, start + length)
        batch = Batch(
            step=self.steps,
            requests=tuple(requests),
            slots=slots,
            starts=starts_array,
            lengths=lengths_array,
            sampled=sampled,
            page_updates=np.array(step.page_updates, np.int64).reshape(-1, 3),
            token_uploads=tuple(step.token_uploads),
            appended=appended,
            outputs=outputs,
            sampling=sampling,
            features=features,
        )
        self.steps += 1
        self.forward_tokens += batch.num_tokens
        return batch

    def check(self) -> None:
        """Every page is free, cached or owned, exactly once; every slot is free or held by one request."""
        holders = self.running + self.releasing
        owned: list[int] = []
        for request in holders:
            owned += request.pages[request.borrowed :]
        self.radix.check(owned)
        slots = sorted([r.slot for r in holders] + self._free_slots)
        assert slots == list(range(len(slots))), f"slots lost or held twice: {slots}"
        for request in self.waiting:
            assert request.in_flight or (request.slot < 0 and not request.pages), f"request {request.rid} waits and holds memory"


class _Step:
    """A step while it is being planned."""

    def __init__(self, chunk: int, arena_bytes: int) -> None:
        self.requests: list[Request] = []
        self.starts: list[int] = []
        self.lengths: list[int] = []
        self.page_updates: list[tuple[int, int, int]] = []
        self.token_uploads: list[TokenUpload] = []
        self.prompt_left = chunk
        self.arena_left = arena_bytes

    def add(self, request: Request, start: int, length: int) -> None:
        self.requests.append(request)
        self.starts.append(start)
        self.lengths.append(length)

    def drop(self, request: Request) -> None:
        """Take a request out again that was retracted after it had been planned."""
        if request in self.requests:
            i = self.requests.index(request)
            del self.requests[i], self.starts[i], self.lengths[i]
        self.page_updates = [update for update in self.page_updates if update[0] != request.slot]
        self.token_uploads = [upload for upload in self.token_uploads if upload[0] != request.slot]


def _common_prefix(a: Sequence[int] | npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(np.asarray(a[:n]) != b[:n])
    return int(different[0]) if len(different) else n
