"""The radix cache: a prefix tree over KV pages, so that a prompt whose beginning was seen before need not be computed again.

The method is RadixAttention (Zheng et al., "SGLang", 2024), on whole pages. Memory comes back by evicting the leaves that were
used least recently; a running request locks the path it reads.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sidestream.engine.pages import PagePool

Tokens = npt.NDArray[np.int32]


class RadixNode:
    """A run of whole pages on the way from the root.

    `key` holds the `len(pages) * page_size` token ids of the edge into this node; only the root's is empty. `lock` counts the
    holders of this node and of everything below it, so it never grows downward, and 0 means that the whole subtree may be
    evicted. A split takes pages off the *front* of a node: while it is locked, the prefix that ends with it stays the same.
    """

    __slots__ = ("children", "key", "last_used", "lock", "pages", "parent", "queued")

    def __init__(self, parent: RadixNode | None, key: Tokens, pages: list[int], lock: int, last_used: int) -> None:
        self.parent = parent  # None: the root, or a node that was evicted
        self.key = key  # [len(pages) * page_size] int32
        self.pages = pages
        self.lock = lock
        self.last_used = last_used
        self.children: dict[bytes, RadixNode] = {}  # by the bytes of the first page of the child's key
        self.queued = False  # has an entry in the cache's eviction heap


class Match(NamedTuple):
    """The cached prefix of some tokens: the path to `node` holds exactly `pages`.

    Good until the next `evict` or `flush`, which may cut `node` short; for longer, lock it first.
    """

    node: RadixNode
    pages: list[int]
    num_tokens: int  # len(pages) * page_size


class Inserted(NamedTuple):
    """The path to `node` covers exactly the tokens inserted, or is the root of a disabled cache.

    `duplicates` are the pages given that the tree did not take, in order: still the caller's, to keep or to free.
    """

    node: RadixNode
    duplicates: list[int]


class _Descent(NamedTuple):
    path: list[RadixNode]  # below the root, downward
    num_pages: int  # pages of the prefix found
    rest: int  # pages of the last node beyond it


class RadixCache:
    """Prefix tree over the pages of `pool`, path-compressed, evicting the least recently used unlocked leaf.

    The tree owns the pages in it. Time is a counter that ticks once per node touched, deepest first: stamps are unique and a
    parent's is later than its children's. Tokens must be int32, one dimension; a key is a copy, so the caller may go on writing.

    Disabled, it stays empty: a match finds nothing and an insert takes nothing.
    """

    def __init__(self, pool: PagePool, *, enabled: bool = True) -> None:
        self.pool = pool
        self.enabled = enabled
        self.root = RadixNode(None, np.empty(0, np.int32), [], 0, 0)
        self.cached_pages = 0  # all pages in the tree
        self.evictable_pages = 0  # pages of nodes whose lock is 0
        self._clock = 0
        # A heap with every unlocked leaf once. Its stamp may be older than `last_used`, and the node may meanwhile be locked or
        # have children: `evict` sorts that out when it meets the entry, so a match or lock costs no heap operation. A node that
        # is dropped there comes back when it is unlocked or loses its last child.
        self._queue: list[tuple[int, RadixNode]] = []

    def match(self, tokens: Tokens, *, limit: int | None = None) -> Match:
        """The longest cached prefix of whole pages, of at most `limit` tokens (rounded down to pages), which becomes the most
        recently used. A node in whose middle it ends is split. Nothing cached: the root, no pages."""
        tokens = np.ascontiguousarray(tokens, np.int32)
        found = self._descend(tokens, limit)
        pages = list(chain.from_iterable(node.pages for node in found.path))[: found.num_pages]
        return Match(self._settle(found), pages, found.num_pages * self.pool.page_size)

    def match_length(self, tokens: Tokens, *, limit: int | None = None) -> int:
        """`match(...).num_tokens`, changing nothing: no split, no use recorded."""
        return self._descend(np.ascontiguousarray(tokens, np.int32), limit).num_pages * self.pool.page_size

    def lock(self, node: RadixNode) -> None:
        """Keep `node` and the path to it from eviction until as many `unlock`s."""
        for step in self._upward(node):
            if step.lock == 0:
                self.evictable_pages -= len(step.pages)
            step.lock += 1

    def unlock(self, node: RadixNode) -> None:
        if node.lock < 1:
            raise AssertionError(f"unlock of a node that is not locked (pages {node.pages[:4]}...)")
        for step in self._upward(node):
            step.lock -= 1
            if step.lock == 0:
                self.evictable_pages += len(step.pages)
        self._queue_if_unlocked_leaf(node)

    def insert(self, tokens: Tokens, pages: Sequence[int]) -> Inserted:
        """Put `pages`, which hold the KV of `tokens`, into the tree, and make that prefix the most recently used.

        `len(tokens) == len(pages) * page_size`. The tree takes the pages of the part it does not have. Where it has the prefix
        already it keeps its own page, and a different one given comes back in `duplicates`; the tree's own page is no duplicate.
        """
        tokens = np.ascontiguousarray(tokens, np.int32)
        assert len(tokens) == len(pages) * self.pool.page_size, f"{len(tokens)} tokens, {len(pages)} pages"
        if not self.enabled:
            return Inserted(self.root, list(pages))
        found = self._descend(tokens, None)
        cached = chain.from_iterable(node.pages for node in found.path)
        duplicates = [given for given, own in zip(pages[: found.num_pages], cached, strict=False) if given != own]
        node = self._settle(found)
        if found.num_pages < len(pages):
            node = self._grow(node, tokens[found.num_pages * self.pool.page_size :].copy(), list(pages[found.num_pages :]))
        return Inserted(node, duplicates)

    def evict(self, n: int) -> int:
        """Free exactly `min(n, evictable_pages)` pages and return that number: least recently used unlocked leaves first, and of
        the last one only as many as needed, from its tail, so that the rest still serves as a prefix. O(log nodes) per leaf."""
        freed: list[int] = []
        while len(freed) < n and self._queue:
            stamp, leaf = heapq.heappop(self._queue)
            leaf.queued = False
            if stamp == leaf.last_used and not leaf.lock:  # a leaf still: the insert that gave it a child would have touched it
                freed += self._cut_tail(leaf, n - len(freed))
            self._queue_if_unlocked_leaf(leaf)
        self.pool.free(freed)
        return len(freed)

    def flush(self) -> int:
        """Drop every node that is not locked; returns the number of pages freed."""
        return self.evict(self.evictable_pages)

    def _descend(self, tokens: Tokens, limit: int | None) -> _Descent:
        size = self.pool.page_size
        end = len(tokens) if limit is None else min(len(tokens), limit)
        end -= end % size  # below 0 with a limit below 0, which finds as little as 0 does
        path: list[RadixNode] = []
        node, position, rest = self.root, 0, 0
        while position < end and not rest:
            child = node.children.get(tokens[position : position + size].tobytes())
            if child is None:
                break
            span = min(len(child.key), end - position)
            same = _common_prefix(child.key[:span], tokens[position : position + span]) // size
            path.append(child)
            position += same * size
            rest = len(child.pages) - same
            node = child
        return _Descent(path, position // size, rest)

    def _settle(self, found: _Descent) -> RadixNode:
        """The node that covers exactly what was found, split off if need be and touched."""
        node = found.path[-1] if found.path else self.root
        if found.rest:
            node = self._split(node, len(node.pages) - found.rest)
        self._touch(node)
        return node

    def _split(self, node: RadixNode, above: int) -> RadixNode:
        """Move the first `above` pages of `node` into a new parent. Every holder of `node` reads those too: same lock count."""
        assert node.parent is not None and 0 < above < len(node.pages)
        cut = above * self.pool.page_size
        upper = RadixNode(node.parent, node.key[:cut].copy(), node.pages[:above], node.lock, node.last_used)
        node.parent.children[self._first_page(upper.key)] = upper
        node.parent, node.key, node.pages = upper, node.key[cut:].copy(), node.pages[above:]
        upper.children[self._first_page(node.key)] = node
        return upper

    def _grow(self, parent: RadixNode, key: Tokens, pages: list[int]) -> RadixNode:
        leaf = RadixNode(parent, key, pages, 0, 0)
        parent.children[self._first_page(key)] = leaf
        self.cached_pages += len(pages)
        self.evictable_pages += len(pages)
        self._touch(leaf)
        self._queue_if_unlocked_leaf(leaf)
        return leaf

    def _cut_tail(self, leaf: RadixNode, n: int) -> list[int]:
        """Take the last `n` pages off `leaf`, and the leaf off the tree if none is left."""
        assert leaf.parent is not None and not leaf.children
        keep = max(0, len(leaf.pages) - n)
        cut = leaf.pages[keep:]
        self.cached_pages -= len(cut)
        self.evictable_pages -= len(cut)
        if keep:
            del leaf.pages[keep:]
            leaf.key = leaf.key[: keep * self.pool.page_size]  # a view: a long leaf eaten page by page is not copied each time
        else:
            parent = leaf.parent
            del parent.children[self._first_page(leaf.key)]
            leaf.parent = None
            self._queue_if_unlocked_leaf(parent)
        return cut

    def _queue_if_unlocked_leaf(self, node: RadixNode) -> None:
        if not (node.lock or node.children or node.queued or node.parent is None):
            node.queued = True
            heapq.heappush(self._queue, (node.last_used, node))

    def _touch(self, node: RadixNode) -> None:
        for step in self._upward(node):
            self._clock += 1
            step.last_used = self._clock

    def _upward(self, node: RadixNode) -> Iterator[RadixNode]:
        """`node` and its ancestors up to the root."""
        if node.parent is None and node is not self.root:
            raise AssertionError(f"use of an evicted node (pages {node.pages[:4]}...): it was not locked")
        step: RadixNode | None = node
        while step is not None:
            yield step
            step = step.parent

    def _first_page(self, key: Tokens) -> bytes:
        return key[: self.pool.page_size].tobytes()

    def check(self, owned: Iterable[int] = ()) -> None:
        """Raise `AssertionError`, naming the page, unless every page is free, cached or in `owned` (also a `Counter`),
        exactly once, and the tree keeps its invariants. O(all pages): for tests and debugging."""
        holders: defaultdict[int, list[str]] = defaultdict(list)
        for page, count in Counter(owned).items():
            holders[page] += ["owned"] * count
        nodes = [self.root]
        unlocked = 0
        for node in nodes:  # grows while it is walked
            _check_node(node, self.root, self.pool.page_size)
            nodes += node.children.values()
            for page in node.pages:
                holders[page].append("cached")
            unlocked += 0 if node.lock else len(node.pages)
        self.pool.check(holders)
        cached = sum(len(node.pages) for node in nodes)
        counted = (self.cached_pages, self.evictable_pages)
        if (cached, unlocked) != counted:
            raise AssertionError(f"{cached} pages cached, {unlocked} evictable; counted {counted[0]} and {counted[1]}")
        self._check_queue(nodes)

    def _check_queue(self, nodes: list[RadixNode]) -> None:
        entries = Counter(id(node) for _, node in self._queue)
        for node in nodes:
            where = f"node with pages {node.pages[:4]}..."
            if entries.pop(id(node), 0) != int(node.queued):
                raise AssertionError(f"{where}: queued is {node.queued}, which the heap does not show")
            if node is not self.root and not (node.lock or node.children or node.queued):
                raise AssertionError(f"{where}: an unlocked leaf that eviction cannot find")
        if entries:
            raise AssertionError(f"{len(entries)} nodes in the eviction heap are not in the tree")
        for stamp, node in self._queue:
            if stamp > node.last_used:
                raise AssertionError(f"node with pages {node.pages[:4]}...: queued as used at {stamp}, was at {node.last_used}")


def _check_node(node: RadixNode, root: RadixNode, page_size: int) -> None:
    where = "the root" if node is root else f"node with pages {node.pages[:4]}..."
    if (node is root) != (node.parent is None) or (node is root) != (not node.pages):
        raise AssertionError(f"{where}: parent is {node.parent}, {len(node.pages)} pages")
    if len(node.key) != len(node.pages) * page_size:
        raise AssertionError(f"{where}: {len(node.pages)} pages for {len(node.key)} tokens")
    below = sum(child.lock for child in node.children.values())
    if not 0 <= below <= node.lock:
        raise AssertionError(f"{where}: lock {node.lock}, but {below} in its children")
    for first_page, child in node.children.items():
        if child.parent is not node:
            raise AssertionError(f"child with pages {child.pages[:4]}... of {where} has another parent")
        if first_page != child.key[:page_size].tobytes():
            raise AssertionError(f"child with pages {child.pages[:4]}... of {where} is filed under another key")
        if child.last_used >= node.last_used:
            raise AssertionError(f"child with pages {child.pages[:4]}... used at {child.last_used}, {where} at {node.last_used}")


def _common_prefix(a: Tokens, b: Tokens) -> int:
    differ = a != b
    first = int(differ.argmax())
    return first if differ[first] else len(a)
