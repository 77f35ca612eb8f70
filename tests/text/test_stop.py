"""Stop strings in the engine: which one, where, and after which token."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.errors import InvalidRequest
from sidestream.text.stop import StopMatch, StopStringMatcher
from sidestream.text.stop_scanner import StopScanner
from sidestream.text.tokenizer import Tokenizer


def run(tokenizer: Tokenizer, text: str | list[int], stop: tuple[str, ...], *, min_new_tokens: int = 0) -> tuple[int, StopMatch] | None:
    """After how many tokens it stopped, and the match."""
    matcher = StopStringMatcher(tokenizer, [1], stop, skip_special_tokens=True, min_new_tokens=min_new_tokens)
    ids = tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else text
    for count, id in enumerate(ids, 1):
        match = matcher.feed(id)
        if match is not None:
            return count, match
    return None


def test_ends_inside_a_token_and_spans_several(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_text(id) for id in tokenizer.encode("one two three four")] == ["one", " two", " three", " four"]
    assert run(tokenizer, "one two three four", ("wo th",)) == (3, StopMatch("wo th", 5))
    assert run(tokenizer, "one two three four", ("two three f",)) == (4, StopMatch("two three f", 4))
    assert run(tokenizer, "one two three four", ("five", "three", "thr")) == (3, StopMatch("three", 8))
    assert run(tokenizer, "one two three four", ()) is None
    assert run(tokenizer, "one two three four", ("One", "twoo")) is None


def test_earliest_start_then_list_order(tokenizer: Tokenizer) -> None:
    assert run(tokenizer, " three", ("ree", "hre", "hr")) == (1, StopMatch("hre", 2))
    assert run(tokenizer, " three", ("hr", "hre")) == (1, StopMatch("hr", 2))
    # Prefixes of each other: the short one is complete first.
    assert run(tokenizer, "one two three", ("one two three", "one two")) == (2, StopMatch("one two", 0))


def test_characters_split_over_tokens(tokenizer: Tokenizer) -> None:
    text = "x 안녕 y"
    ids = tokenizer.encode(text)
    assert len(ids) > len(text)
    found = run(tokenizer, text, ("녕",))
    assert found is not None
    assert found[1] == StopMatch("녕", 3)
    assert tokenizer.decode(ids[: found[0]]) == "x 안녕"
    assert run(tokenizer, tokenizer.encode("👩\u200d👧!"), ("👧!",)) == (
        len(tokenizer.encode("👩\u200d👧!")),
        StopMatch("👧!", 2),
    )


def test_min_new_tokens_passes_over_for_good(tokenizer: Tokenizer) -> None:
    assert run(tokenizer, "one two three four", ("two",), min_new_tokens=2) == (2, StopMatch("two", 4))
    assert run(tokenizer, "one two three four", ("two",), min_new_tokens=3) is None
    assert run(tokenizer, "one two three two", ("two",), min_new_tokens=3) == (4, StopMatch("two", 14))
    # Begun before, complete in time.
    assert run(tokenizer, "one two three four", ("two three",), min_new_tokens=3) == (3, StopMatch("two three", 4))


def test_special_tokens_in_stop_strings(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("one"), 2]
    assert run(tokenizer, ids, ("<|im_end|>",)) is None  # skipped, so it is not in the text
    matcher = StopStringMatcher(tokenizer, [], ("<|im_end|>",), skip_special_tokens=False)
    assert [matcher.feed(id) for id in ids] == [None, StopMatch("<|im_end|>", 3)]


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        StopScanner(["a", ""])
    assert caught.value.param == "stop"


@settings(max_examples=500, deadline=None)
@given(st.lists(st.text("ab", max_size=5), max_size=12), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_scanner_against_plain_search(texts: list[str], stop: list[str]) -> None:
    scanner = StopScanner(stop)
    whole = ""
    for text in texts:
        before, whole = len(whole), whole + text
        found = [
            (offset, index)
            for index, each in enumerate(stop)
            for offset in range(len(whole))
            if whole.startswith(each, offset) and offset + len(each) > before
        ]
        expected = StopMatch(stop[min(found)[1]], min(found)[0]) if found else None
        assert scanner.feed(text) == expected
        assert scanner.length == len(whole)
        clear = len(whole) if expected is None else expected.offset
        while any(whole[:clear].endswith(each[:size]) for each in stop for size in range(1, len(each))):
            clear -= 1
        assert scanner.showable == clear


def test_cost_does_not_grow_with_length() -> None:
    """Not even for the text that is worst for a search that begins anew at each character."""

    def seconds(count: int) -> float:
        scanner = StopScanner(["a" * 1000 + "b"])
        begin = time.perf_counter()
        for _ in range(count):
            assert scanner.feed("a") is None
        return time.perf_counter() - begin

    assert min(seconds(16000) for _ in range(3)) < 8 * 4 * min(seconds(2000) for _ in range(3))
