"""The pool of KV pages: which page ids are free. The memory behind the ids belongs to the runner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

NULL_PAGE = 0
MAX_PAGE_SIZE = 256

_NULL, _FREE, _USED = 0, 1, 2  # states of a page; the null page's never changes


class OutOfPages(Exception):
    """More pages were asked for than are free. Internal: the scheduler evicts or retracts, a user never sees it."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} KV pages wanted, {free} free")
        self.wanted = wanted
        self.free = free


class PagePool:
    """A fixed number of KV pages, ids `1..num_pages`, of `page_size` token positions each.

    Page 0 is the null page: never handed out, always zero on the device, the target of every padded read.
    Every page is free or held by exactly one holder. Reuse is last in, first out: the page freed last is the one most likely
    still in a processor cache. A call that raises has changed nothing.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages >= 0, f"num_pages is {num_pages}"
        assert 1 <= page_size <= MAX_PAGE_SIZE and page_size & (page_size - 1) == 0, f"page_size is {page_size}"
        self.num_pages = num_pages
        self.page_size = page_size
        self.on_free: Callable[[list[int]], None] | None = None
        """Called with the pages just freed, before any of them can be handed out again. The race amplifier poisons them."""
        self._free = list(range(num_pages, 0, -1))  # a stack, its top at the end
        self._states = bytearray([_NULL]) + bytearray([_FREE]) * num_pages

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Take `n` pages, all or none. Raises `OutOfPages`."""
        assert n >= 0, f"{n} pages wanted"
        if n > len(self._free):
            raise OutOfPages(n, len(self._free))
        first = len(self._free) - n
        taken = self._free[first:]
        del self._free[first:]
        taken.reverse()
        for page in taken:
            self._states[page] = _USED
        return taken

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back, all or none. A page that is not in use raises `AssertionError`, under `python -O` too: a page with two
        holders would mix the tokens of two requests without a sign."""
        freed = list(pages)
        for done, page in enumerate(freed):
            if not 0 < page <= self.num_pages or self._states[page] != _USED:
                for earlier in freed[:done]:
                    self._states[earlier] = _USED
                reason = "is already free" if 0 < page <= self.num_pages else f"is not one of 1..{self.num_pages}"
                raise AssertionError(f"page {page} freed, but it {reason}")
            self._states[page] = _FREE
        self._free.extend(freed)
        if freed and self.on_free is not None:
            self.on_free(freed)

    def check(self, holders: Mapping[int, Sequence[str]] | None = None) -> None:
        """Raise `AssertionError` unless the free list is sound and, given the names of who holds which page, every page is
        free or held, exactly once. O(num_pages): for tests and debugging."""
        if self._states[NULL_PAGE] != _NULL:
            raise AssertionError("page 0, the null page, has become a page to hand out")
        listed = set(self._free)
        if len(listed) != len(self._free):
            raise AssertionError(f"page {next(p for p in self._free if self._free.count(p) > 1)} is twice in the free list")
        foreign = listed - set(range(1, self.num_pages + 1))
        if foreign:
            raise AssertionError(f"page {min(foreign)} in the free list is no page of this pool")
        for page, state in enumerate(self._states):
            if (state == _FREE) != (page in listed):
                raise AssertionError(f"page {page} has state {state} but {'is' if page in listed else 'is not'} listed free")
        if holders is None:
            return
        for page in range(1, self.num_pages + 1):
            places = [*(["free"] if page in listed else []), *holders.get(page, ())]
            if len(places) != 1:
                raise AssertionError(f"page {page} is {' and '.join(places) or 'lost: neither free nor held'}")
        for page, names in holders.items():
            if not 0 < page <= self.num_pages:
                raise AssertionError(f"page {page} is {' and '.join(names)}, but is no page of this pool")
