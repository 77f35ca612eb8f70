from __future__ import annotations

import pytest

from sidestream.engine.pages import OutOfPages, PagePool


def test_hands_out_every_page_but_the_null_page_once() -> None:
    pool = PagePool(5, 16)
    assert pool.free_pages == pool.num_pages == 5
    assert sorted(pool.allocate(2) + pool.allocate(3)) == [1, 2, 3, 4, 5]
    assert pool.free_pages == 0
    pool.check({page: ["owned"] for page in range(1, 6)})


def test_exhaustion_takes_nothing() -> None:
    pool = PagePool(4, 16)
    held = pool.allocate(1)
    with pytest.raises(OutOfPages) as raised:
        pool.allocate(4)
    assert (raised.value.wanted, raised.value.free) == (4, 3)
    assert pool.free_pages == 3
    assert len(pool.allocate(3)) == 3
    assert pool.allocate(0) == []
    with pytest.raises(OutOfPages):
        pool.allocate(1)
    assert held == [1]


def test_the_page_freed_last_is_reused_first() -> None:
    pool = PagePool(6, 1)
    pool.allocate(6)
    pool.free([2, 5])
    pool.free([3])
    assert pool.allocate(2) == [3, 5]
    assert pool.allocate(1) == [2]


@pytest.mark.parametrize("bad", [0, -1, 7, 10**9], ids=str)
def test_foreign_page(bad: int) -> None:
    pool = PagePool(6, 16)
    pool.allocate(6)
    with pytest.raises(AssertionError, match=f"page {bad} "):
        pool.free([bad])
    assert pool.free_pages == 0


@pytest.mark.parametrize("pages", [[4], [1, 4], [1, 1], [1, 2, 3, 2], [1, 2, 0], [1, -3]], ids=str)
def test_a_free_that_is_refused_changes_nothing(pages: list[int]) -> None:
    """Page 4 is free already; -3 would be page 4 counted from the end."""
    pool = PagePool(6, 16)
    assert pool.allocate(4) == [1, 2, 3, 4]
    pool.free([4])
    calls: list[list[int]] = []
    pool.on_free = calls.append
    with pytest.raises(AssertionError, match="freed, but it is"):
        pool.free(pages)
    assert calls == []
    pool.check({1: ["owned"], 2: ["owned"], 3: ["owned"]})
    pool.free([3, 1, 2])
    assert pool.free_pages == 6


def test_double_free_is_found_after_the_page_was_used_again() -> None:
    pool = PagePool(2, 16)
    (page,) = pool.allocate(1)
    pool.free([page])
    assert pool.allocate(1) == [page]
    pool.free([page])
    with pytest.raises(AssertionError, match=f"page {page} freed, but it is already free"):
        pool.free(iter([page]))


def test_on_free_is_called_with_the_pages_before_they_are_reused() -> None:
    pool = PagePool(4, 16)
    calls: list[tuple[list[int], int]] = []
    pool.allocate(4)
    pool.free([4])
    pool.on_free = lambda pages: calls.append((pages, pool.free_pages))
    pool.free(page for page in (3, 1))
    pool.free([])
    assert calls == [([3, 1], 3)]


@pytest.mark.parametrize("page_size", [0, 3, 48, 512, -16])
def test_page_size_is_a_power_of_two_up_to_256(page_size: int) -> None:
    with pytest.raises(AssertionError, match="page_size"):
        PagePool(4, page_size)


@pytest.mark.parametrize("page_size", [1, 2, 16, 256])
def test_page_sizes(page_size: int) -> None:
    assert PagePool(4, page_size).page_size == page_size


@pytest.mark.parametrize(
    ("holders", "message"),
    [
        ({1: ["owned"]}, "page 2 is lost"),
        ({1: ["owned"], 2: ["owned", "cached"]}, "page 2 is owned and cached"),
        ({1: ["owned"], 2: ["owned"], 3: ["cached"]}, "page 3 is free and cached"),
        ({1: ["owned"], 2: ["owned"], 0: ["owned"]}, "page 0 is owned"),
        ({1: ["owned"], 2: ["owned"], 9: ["owned"]}, "page 9 is owned"),
    ],
)
def test_check_names_the_page(holders: dict[int, list[str]], message: str) -> None:
    pool = PagePool(3, 16)
    pool.allocate(2)
    pool.check()
    with pytest.raises(AssertionError, match=message):
        pool.check(holders)


@pytest.mark.parametrize(
    ("free_list", "message"),
    [([3, 3], "page 3 is twice"), ([3, 9], "page 9"), ([3, 1], "page 1 has state"), ([], "page 3 has state")],
)
def test_check_finds_a_damaged_free_list(free_list: list[int], message: str) -> None:
    pool = PagePool(3, 16)
    pool.allocate(2)
    pool._free[:] = free_list
    with pytest.raises(AssertionError, match=message):
        pool.check()
