from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule, run_state_machine_as_test

from sidestream.engine.pages import OutOfPages, PagePool
from sidestream.engine.radix import Inserted, RadixCache, RadixNode, Tokens

A, B, C, D, E = range(5)


def tokens_of(symbols: list[int], page_size: int, tail: int = 0) -> Tokens:
    """One page per symbol, then `tail` tokens of a page. Symbols 0 and 1 differ in the first token, 0 and 2 in the others."""
    page = {s: [s % 2] + [s // 2] * (page_size - 1) if page_size > 1 else [s] for s in range(8)}
    return np.array([token for s in symbols for token in page[s]] + [0] * tail, dtype=np.int32)


def make(num_pages: int = 32, page_size: int = 2) -> tuple[PagePool, RadixCache]:
    pool = PagePool(num_pages, page_size)
    return pool, RadixCache(pool)


def put(cache: RadixCache, symbols: list[int]) -> tuple[list[int], Inserted]:
    pages = cache.pool.allocate(len(symbols))
    inserted = cache.insert(tokens_of(symbols, cache.pool.page_size), pages)
    cache.pool.free(inserted.duplicates)
    return pages, inserted


def cached(cache: RadixCache, symbols: list[int]) -> int:
    """Pages of `symbols` in the tree, changing nothing."""
    return cache.match_length(tokens_of(symbols, cache.pool.page_size)) // cache.pool.page_size


def path_pages(node: RadixNode | None) -> list[int]:
    pages: list[int] = []
    while node is not None:
        pages = node.pages + pages
        node = node.parent
    return pages


def shape(node: RadixNode) -> object:
    """Everything a read must not change, as one comparable value."""
    children = sorted((key, shape(child)) for key, child in node.children.items())
    return (id(node), node.key.tobytes(), tuple(node.pages), node.lock, node.last_used, children)


# Matching and inserting.


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_match_gives_the_pages_of_the_longest_prefix_of_whole_pages(page_size: int) -> None:
    _, cache = make(page_size=page_size)
    pages, inserted = put(cache, [A, B, C])
    assert path_pages(inserted.node) == pages
    match = cache.match(tokens_of([A, B, C, D], page_size, tail=page_size - 1))
    assert match == (inserted.node, pages, 3 * page_size)
    assert cache.match(tokens_of([A, B, C], page_size)[:-1]).pages == pages[:2]
    assert cache.match(tokens_of([A, C], page_size)).pages == pages[:1]
    assert cache.match(tokens_of([B, A], page_size)) == (cache.root, [], 0)
    assert cache.match(tokens_of([], page_size)) == (cache.root, [], 0)
    cache.check()


@pytest.mark.parametrize(
    ("limit", "num_pages"), [(None, 3), (100, 3), (12, 3), (11, 2), (8, 2), (7, 1), (4, 1), (3, 0), (0, 0), (-1, 0), (-100, 0)]
)
def test_limit_is_rounded_down_to_pages(limit: int | None, num_pages: int) -> None:
    _, cache = make(page_size=4)
    pages, _ = put(cache, [A, B, C])
    tokens = tokens_of([A, B, C, D], 4)
    assert cache.match_length(tokens, limit=limit) == 4 * num_pages
    match = cache.match(tokens, limit=limit)
    assert (match.pages, match.num_tokens) == (pages[:num_pages], 4 * num_pages)
    assert path_pages(match.node) == pages[:num_pages]
    cache.check()


def test_match_length_changes_nothing() -> None:
    _, cache = make()
    put(cache, [A, B, C])
    put(cache, [A, C])
    before = shape(cache.root)
    assert cache.match_length(tokens_of([A, B, D], 2)) == 4
    assert cache.match_length(tokens_of([A, C, D], 2), limit=3) == 2
    assert shape(cache.root) == before
    cache.match(tokens_of([A, B, D], 2))
    assert shape(cache.root) != before


def test_a_match_does_not_alias_the_tree() -> None:
    _, cache = make()
    pages, _ = put(cache, [A, B])
    cache.match(tokens_of([A, B], 2)).pages.append(99)
    assert cache.match(tokens_of([A, B], 2)).pages == pages
    cache.check()


def test_the_caller_may_write_over_the_tokens_and_pages_it_inserted() -> None:
    pool, cache = make()
    buffer = tokens_of([A, B, C], 2)
    pages = pool.allocate(3)
    cache.insert(buffer, pages)
    buffer[:] = 9
    pages.clear()
    assert cached(cache, [A, B, C]) == 3
    cache.check()


def test_tokens_of_another_integer_type_or_stride_are_found() -> None:
    _, cache = make()
    put(cache, [A, B])
    wide = np.repeat(tokens_of([A, B], 2), 2)[::2]
    assert cache.match_length(wide) == 4
    assert cache.match_length(wide.astype(np.int64)) == 4
    assert cache.match(wide.astype(np.int64)).num_tokens == 4


def test_duplicates_are_the_given_pages_that_the_tree_has_already() -> None:
    pool, cache = make()
    pages, _ = put(cache, [A, B])
    given = pool.allocate(3)
    inserted = cache.insert(tokens_of([A, B, C], 2), given)
    assert inserted.duplicates == given[:2]
    assert path_pages(inserted.node) == [*pages, given[2]]
    assert cache.cached_pages == 3
    cache.check(given[:2])


def test_the_trees_own_pages_are_no_duplicates() -> None:
    pool, cache = make()
    pages, first = put(cache, [A, B])
    (other,) = pool.allocate(1)
    assert cache.insert(tokens_of([A, B], 2), pages) == (first.node, [])
    assert cache.insert(tokens_of([A, B], 2), [pages[0], other]).duplicates == [other]
    pool.free([other])
    (new,) = pool.allocate(1)
    assert cache.insert(tokens_of([A, B, C], 2), [*pages, new]).duplicates == []
    cache.check()


def test_insert_of_a_prefix_covers_exactly_that_prefix() -> None:
    pool, cache = make()
    pages, long = put(cache, [A, B, C])
    given = pool.allocate(2)
    node, duplicates = cache.insert(tokens_of([A, B], 2), given)
    assert duplicates == given
    assert path_pages(node) == pages[:2]
    assert path_pages(long.node) == pages
    assert cache.insert(tokens_of([], 2), []) == (cache.root, [])
    cache.check(given)


def test_insert_refuses_tokens_that_do_not_fill_the_pages() -> None:
    pool, cache = make()
    pages = pool.allocate(2)
    with pytest.raises(AssertionError, match="5 tokens, 2 pages"):
        cache.insert(tokens_of([A, B], 2, tail=1), pages)
    cache.check(pages)


def test_disabled_finds_nothing_and_takes_nothing() -> None:
    pool = PagePool(4, 2)
    cache = RadixCache(pool, enabled=False)
    pages = pool.allocate(2)
    tokens = tokens_of([A, B], 2)
    assert cache.insert(tokens, pages) == (cache.root, pages)
    assert cache.match(tokens) == (cache.root, [], 0)
    assert cache.match_length(tokens) == 0
    cache.lock(cache.root)
    cache.unlock(cache.root)
    assert (cache.cached_pages, cache.evictable_pages, cache.evict(4), cache.flush()) == (0, 0, 0, 0)
    cache.check(pages)


# Splits.


@pytest.mark.parametrize("split", ["match", "limit", "insert", "insert a prefix"])
def test_a_split_keeps_the_identity_and_locks_of_the_lower_part(split: str) -> None:
    _, cache = make()
    pages, (node, _) = put(cache, [A, B, C, D])
    cache.lock(node)
    cache.lock(node)
    if split == "match":
        upper = cache.match(tokens_of([A, B, D], 2)).node
    elif split == "limit":
        upper = cache.match(tokens_of([A, B, C, D], 2), limit=5).node
    elif split == "insert":
        new = put(cache, [A, B, E])[1].node
        assert new.parent is not None
        upper = new.parent
        assert (new.lock, cache.evictable_pages) == (0, 1)
    else:
        upper = put(cache, [A, B])[1].node
    assert upper is not node
    assert node.parent is upper
    assert (upper.pages, node.pages) == (pages[:2], pages[2:])
    assert (upper.lock, node.lock, cache.root.lock) == (2, 2, 2)
    cache.check()
    cache.unlock(node)
    cache.flush()
    assert cache.match(tokens_of([A, B, C, D], 2)) == (node, pages, 8)
    cache.unlock(node)
    assert cache.evictable_pages == 4
    assert cache.flush() == 4
    cache.check()


# Locks and eviction.


def test_eviction_takes_the_least_recently_used_leaf_first() -> None:
    _, cache = make()
    for first in (A, B, C, D):
        put(cache, [first, E])
    cache.match(tokens_of([A, E], 2))
    put(cache, [C, E])
    order = []
    for _ in range(4):
        assert cache.evict(2) == 2
        order.append([first for first in (A, B, C, D) if cached(cache, [first, E])])
        cache.check()
    assert order == [[A, C, D], [A, C], [C], []]


def test_reading_the_length_is_no_use() -> None:
    _, cache = make()
    put(cache, [A])
    put(cache, [B])
    cache.match_length(tokens_of([A], 2))
    cache.evict(1)
    assert (cached(cache, [A]), cached(cache, [B])) == (0, 1)


def test_a_parent_goes_after_its_leaves_but_before_what_was_used_later() -> None:
    _, cache = make()
    put(cache, [A, B])
    put(cache, [A, C])
    put(cache, [D])
    assert cache.evict(1) == 1
    assert [cached(cache, s) for s in ([A, B], [A, C], [D])] == [1, 2, 1]
    assert cache.evict(1) == 1
    assert [cached(cache, s) for s in ([A, B], [A, C], [D])] == [1, 1, 1]
    assert cache.evict(1) == 1
    assert [cached(cache, s) for s in ([A], [D])] == [0, 1]
    cache.check()


def test_eviction_takes_no_more_pages_than_needed_from_the_tail() -> None:
    pool, cache = make()
    pages, _ = put(cache, [A, B, C, D])
    put(cache, [B])
    freed: list[int] = []
    pool.on_free = freed.extend
    assert cache.evict(1) == 1
    assert freed == pages[3:]
    assert cache.match(tokens_of([A, B, C, D], 2), limit=1).pages == []
    assert cache.evict(2) == 2
    assert freed[1:] == pages[1:3]
    assert (cache.cached_pages, cache.evictable_pages, pool.free_pages) == (2, 2, 30)
    assert cached(cache, [A, B]) == 1
    cache.check()
    put(cache, [A, B, C])
    assert cached(cache, [A, B, C, D]) == 3
    cache.check()


@pytest.mark.parametrize("n", [0, -1])
def test_evicting_nothing(n: int) -> None:
    _, cache = make()
    put(cache, [A, B])
    assert cache.evict(n) == 0
    assert cache.cached_pages == 2


def test_what_is_locked_is_never_evicted() -> None:
    _, cache = make()
    put(cache, [A, B, C])
    pages, _ = put(cache, [D, E])
    node = cache.match(tokens_of([A, B], 2)).node
    cache.lock(node)
    assert (cache.cached_pages, cache.evictable_pages) == (5, 3)
    assert cache.evict(100) == 3
    assert (cached(cache, [A, B, C]), cached(cache, [D])) == (2, 0)
    assert (cache.evict(1), cache.flush(), cache.evictable_pages) == (0, 0, 0)
    cache.lock(node)
    cache.unlock(node)
    assert cache.evict(1) == 0
    cache.unlock(node)
    assert cache.evictable_pages == 2
    assert cache.evict(1) == 1
    assert cached(cache, [A, B, C]) == 1
    cache.check()
    assert sorted(pages) == [4, 5]


def test_flush_keeps_the_path_of_a_lock_and_counts_the_rest() -> None:
    pool, cache = make()
    put(cache, [A, B])
    put(cache, [A, C])
    put(cache, [D])
    node = cache.match(tokens_of([A, B], 2)).node
    cache.lock(node)
    assert cache.flush() == 2
    assert [cached(cache, s) for s in ([A, B], [A, C], [D])] == [2, 1, 0]
    cache.unlock(node)
    assert cache.flush() == 2
    assert (pool.free_pages, cache.cached_pages, cache.root.children) == (32, 0, {})
    cache.check()


def test_a_miss_can_be_locked_like_a_hit() -> None:
    _, cache = make()
    put(cache, [A])
    cache.lock(cache.match(tokens_of([B], 2)).node)
    assert cache.evictable_pages == 1
    cache.unlock(cache.root)
    with pytest.raises(AssertionError, match="not locked"):
        cache.unlock(cache.root)
    cache.check()


def test_more_unlocks_than_locks_are_refused() -> None:
    _, cache = make()
    _, (node, _) = put(cache, [A, B])
    cache.lock(node)
    cache.unlock(node)
    with pytest.raises(AssertionError, match="not locked"):
        cache.unlock(node)
    cache.check()


def test_an_evicted_node_cannot_be_locked() -> None:
    _, cache = make()
    _, (node, _) = put(cache, [A, B])
    cache.flush()
    with pytest.raises(AssertionError, match="evicted node"):
        cache.lock(node)
    assert cache.evictable_pages == 0
    cache.check()


def test_the_eviction_heap_does_not_grow_with_use() -> None:
    _, cache = make()
    put(cache, [A, B])
    put(cache, [A, C])
    for _ in range(100):
        match = cache.match(tokens_of([A, B], 2))
        cache.lock(match.node)
        cache.evict(0)
        cache.unlock(match.node)
    assert len(cache._queue) <= 3
    cache.check()


# `check` itself: it must see damage, or the tests above prove little.


def drop_page(cache: RadixCache, node: RadixNode) -> None:
    node.pages.pop()


def drop_page_and_key(cache: RadixCache, node: RadixNode) -> None:
    node.pages.pop()
    node.key = node.key[:-2]


def page_twice(cache: RadixCache, node: RadixNode) -> None:
    node.pages[1] = node.pages[0]


def free_cached_page(cache: RadixCache, node: RadixNode) -> None:
    cache.pool.free(node.pages[:1])


def wrong_first_token(cache: RadixCache, node: RadixNode) -> None:
    node.key[0] = 7


def child_locked_more(cache: RadixCache, node: RadixNode) -> None:
    node.lock += 1


def negative_lock(cache: RadixCache, node: RadixNode) -> None:
    node.lock = -1


def wrong_parent(cache: RadixCache, node: RadixNode) -> None:
    node.parent = RadixNode(None, node.key[:0], [], 0, 10**6)


def count_off(cache: RadixCache, node: RadixNode) -> None:
    cache.evictable_pages -= 1


def cached_off(cache: RadixCache, node: RadixNode) -> None:
    cache.cached_pages += 1


def leaf_forgotten(cache: RadixCache, node: RadixNode) -> None:
    cache._queue.clear()
    node.queued = False


def queue_flag_wrong(cache: RadixCache, node: RadixNode) -> None:
    cache._queue.clear()


def evicted_node_queued(cache: RadixCache, node: RadixNode) -> None:
    cache._queue.append((0, RadixNode(None, node.key, [], 0, 0)))


def stamp_in_the_future(cache: RadixCache, node: RadixNode) -> None:
    cache._queue[0] = (10**6, node)


def child_used_after_parent(cache: RadixCache, node: RadixNode) -> None:
    node.last_used = 10**6


def empty_edge(cache: RadixCache, node: RadixNode) -> None:
    node.children[b""] = RadixNode(node, node.key[:0], [], 0, 0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_page, "1 pages for 4 tokens"),
        (drop_page_and_key, "page 2 is lost"),
        (page_twice, "page 1 is cached and cached"),
        (free_cached_page, "page 1 is free and cached"),
        (wrong_first_token, r"pages \[1, 2\].* another key"),
        (child_locked_more, "lock 0, but 1"),
        (negative_lock, "lock 0, but -1"),
        (wrong_parent, "another parent"),
        (count_off, "2 evictable; counted 2 and 1"),
        (cached_off, "2 pages cached.*counted 3"),
        (leaf_forgotten, "eviction cannot find"),
        (queue_flag_wrong, "queued is True"),
        (evicted_node_queued, "not in the tree"),
        (stamp_in_the_future, "queued as used at 1000000"),
        (child_used_after_parent, "used at 1000000"),
        (empty_edge, "0 pages"),
    ],
)
def test_check_sees_damage(damage: Callable[[RadixCache, RadixNode], None], message: str) -> None:
    _, cache = make()
    _, (node, _) = put(cache, [A, B])
    cache.check()
    damage(cache, node)
    with pytest.raises(AssertionError, match=message):
        cache.check()


def test_check_wants_every_page_owned_once() -> None:
    pool, cache = make()
    put(cache, [A, B])
    pages = pool.allocate(2)
    cache.check(pages)
    cache.check(Counter(pages))
    for owned, message in [
        (pages[:1], "page 4 is lost"),
        ([*pages, 4], "page 4 is owned and owned"),
        (Counter({3: 1, 4: 2}), "page 4 is owned and owned"),
        ([*pages, 1], "page 1 is owned and cached"),
        ([*pages, 5], "page 5 is free and owned"),
        ([*pages, 0], "page 0 is owned"),
    ]:
        with pytest.raises(AssertionError, match=message):
            cache.check(owned)


# Against a model that knows nothing of nodes.

Prefix = tuple[int, ...]  # symbols of whole pages

PROMPTS = st.lists(st.integers(0, 2), max_size=6)


class AgainstDictionary(RuleBasedStateMachine):
    """`self.cached` maps each cached prefix, of whole pages, to its last page and the time it was used last.

    Eviction page by page from the least recently used unlocked prefix that no longer one extends is the very order the tree must
    show: one match or insert uses one path, so two such prefixes are never equally old.
    """

    page_size: int
    locks = Bundle("locks")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(14, self.page_size)
        self.cache = RadixCache(self.pool)
        self.freed: list[int] = []
        self.pool.on_free = self.freed.extend
        self.cached: dict[Prefix, tuple[int, int]] = {}
        self.locked: Counter[Prefix] = Counter()
        self.owned: list[int] = []
        self.now = 0

    def tokens(self, symbols: list[int] | Prefix, tail: int = 0) -> Tokens:
        return tokens_of(list(symbols), self.page_size, tail % self.page_size)

    def expected(self, symbols: list[int]) -> Prefix:
        prefix: Prefix = ()
        for symbol in symbols:
            if (*prefix, symbol) not in self.cached:
                break
            prefix = (*prefix, symbol)
        return prefix

    def pages(self, prefix: Prefix) -> list[int]:
        return [self.cached[prefix[: n + 1]][0] for n in range(len(prefix))]

    def use(self, prefix: Prefix) -> None:
        self.now += 1
        for n in range(len(prefix)):
            self.cached[prefix[: n + 1]] = (self.cached[prefix[: n + 1]][0], self.now)

    def held(self, prefix: Prefix) -> bool:
        return any(count and lock[: len(prefix)] == prefix for lock, count in self.locked.items())

    def evictable(self) -> list[Prefix]:
        return [prefix for prefix in self.cached if not self.held(prefix)]

    def evicted(self, n: int) -> list[int]:
        """Evict from the model; the pages in order."""
        pages = []
        for _ in range(n):
            inner = {prefix[:-1] for prefix in self.cached}
            leaves = [prefix for prefix in self.evictable() if prefix not in inner]
            if not leaves:
                break
            oldest = min(leaves, key=lambda prefix: self.cached[prefix][1])
            pages.append(self.cached.pop(oldest)[0])
        return pages

    def allocate(self, n: int) -> list[int]:
        """As the scheduler does: free pages first, then evict what is missing. Empty if that is not enough."""
        missing = n - self.pool.free_pages
        if missing > 0:
            with pytest.raises(OutOfPages):
                self.pool.allocate(n)
            self.evict(missing)
        return self.pool.allocate(n) if n <= self.pool.free_pages else []

    def insert(self, symbols: list[int], pages: list[int], own: int) -> tuple[RadixNode, list[int]]:
        """Insert in tree and model, where the first `own` of `pages` are the tree's."""
        present = len(self.expected(symbols))
        inserted = self.cache.insert(self.tokens(symbols), pages)
        assert inserted.duplicates == pages[own:present]
        for n in range(present, len(pages)):
            self.cached[tuple(symbols[: n + 1])] = (pages[n], 0)
        self.use(tuple(symbols))
        assert path_pages(inserted.node) == self.pages(tuple(symbols))
        return inserted

    @rule(symbols=PROMPTS, keep=st.booleans())
    def finish_without_a_match(self, symbols: list[int], keep: bool) -> None:
        pages = self.allocate(len(symbols))
        if len(pages) == len(symbols):
            _, duplicates = self.insert(symbols, pages, own=0)
            if keep:
                self.owned += duplicates
            else:
                self.pool.free(duplicates)

    @rule(target=locks, symbols=PROMPTS, more=PROMPTS, start=st.integers(0, 6))
    def match_then_compute_the_rest(self, symbols: list[int], more: list[int], start: int) -> tuple[RadixNode, Prefix]:
        """A request: match, lock, allocate, insert, move the lock down."""
        match = self.cache.match(self.tokens(symbols), limit=start * self.page_size)
        own = self.expected(symbols[:start])
        assert match.pages == self.pages(own)
        self.use(own)
        self.cache.lock(match.node)
        self.locked[own] += 1
        whole = list(own) + more
        pages = self.allocate(len(more))
        if len(pages) < len(more):
            return match.node, own
        node, duplicates = self.insert(whole, match.pages + pages, own=len(own))
        self.owned += duplicates
        self.cache.lock(node)
        self.cache.unlock(match.node)
        self.locked[own] -= 1
        self.locked[tuple(whole)] += 1
        return node, tuple(whole)

    @rule(target=locks, symbols=PROMPTS, tail=st.integers(0, 15), limit=st.none() | st.integers(-3, 100))
    def match_and_lock(self, symbols: list[int], tail: int, limit: int | None) -> tuple[RadixNode, Prefix]:
        tokens = self.tokens(symbols, tail)
        prefix = self.expected(symbols if limit is None else symbols[: max(0, limit) // self.page_size])
        before = shape(self.cache.root)
        assert self.cache.match_length(tokens, limit=limit) == len(prefix) * self.page_size
        assert shape(self.cache.root) == before
        node, pages, num_tokens = self.cache.match(tokens, limit=limit)
        assert num_tokens == len(prefix) * self.page_size
        assert pages == self.pages(prefix) == path_pages(node)
        self.use(prefix)
        self.cache.lock(node)
        self.locked[prefix] += 1
        return node, prefix

    @rule(held=consumes(locks))
    def unlock(self, held: tuple[RadixNode, Prefix]) -> None:
        node, prefix = held
        assert path_pages(node) == self.pages(prefix)  # still right after every split
        self.cache.unlock(node)
        self.locked[prefix] -= 1

    @rule(held=locks)
    def look_at_a_lock(self, held: tuple[RadixNode, Prefix]) -> None:
        node, prefix = held
        assert path_pages(node) == self.pages(prefix)

    @rule(n=st.integers(0, 8))
    def evict(self, n: int) -> None:
        self.freed.clear()
        possible = len(self.evictable())
        assert self.cache.evict(n) == min(n, possible)
        assert Counter(self.freed) == Counter(self.evicted(n))

    @rule()
    def flush(self) -> None:
        possible = len(self.evictable())
        assert self.cache.flush() == possible
        assert len(self.evicted(possible)) == possible

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        page = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        self.pool.free([page])
        with pytest.raises(AssertionError, match=f"page {page} "):
            self.pool.free([page])

    @invariant()
    def agrees(self) -> None:
        self.cache.check(self.owned)
        assert self.cache.cached_pages == len(self.cached)
        assert self.cache.evictable_pages == len(self.evictable())
        assert self.pool.free_pages == self.pool.num_pages - len(self.cached) - len(self.owned)
        for prefix in self.cached:
            assert self.cache.match_length(self.tokens(prefix)) == len(prefix) * self.page_size


class PagesOf1(AgainstDictionary):
    page_size = 1


class PagesOf2(AgainstDictionary):
    page_size = 2


class PagesOf16(AgainstDictionary):
    page_size = 16


@pytest.mark.parametrize("machine", [PagesOf1, PagesOf2, PagesOf16])
def test_against_a_dictionary(machine: type[AgainstDictionary]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None, database=None))
