"""Regular expressions that end a request: where they match, and that none takes for ever or all memory."""

from __future__ import annotations

import pytest

from sidestream.errors import InvalidRequest
from sidestream.text import stop_regex
from sidestream.text.stop_regex import RegexMatch, RegexScanner, compiled


def feed(pattern: str, *pieces: str) -> list[RegexMatch | None]:
    scanner = RegexScanner([pattern])
    return [scanner.feed(piece) for piece in pieces]


def test_the_first_match_ends_the_text() -> None:
    assert feed("[0-9]{2}", "a1", "23") == [None, RegexMatch("[0-9]{2}", 1)]
    assert feed("a+", "b", "a", "a") == [None, RegexMatch("a+", 1), RegexMatch("a+", 2)]
    assert feed("x|ab", "a", "b") == [None, RegexMatch("x|ab", 0)]


def test_what_may_be_shown() -> None:
    scanner = RegexScanner(["end[.!]", "<[a-z]>"])
    shown = []
    for piece in ("the ", "en", "d of", " it <", "b", "x"):
        assert scanner.feed(piece) is None
        shown.append(scanner.showable)
    assert shown == [4, 4, 10, 14, 14, 17]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "missing"),
        ("a*", "empty text"),
        ("", "empty text"),
        ("(" * 500 + "a" + ")" * 500, "recursion"),
        ("((a{1000}){1000}){1000}b", "multiply to 1000000000"),
        ("(ab){1000000000}", "at most 10000"),
        ("(?:a?){200}a{200}", "at most 10000"),
        ("a{0,20000}b", "at most 10000"),
        ("a{" + "9" * 900 + "}", "at most 10000"),
        ("(?#[)(a{1000}){1000}(?#])", "at most 10000"),
    ],
)
def test_expressions_that_are_refused(pattern: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"(?i){message}") as raised:
        compiled(pattern)
    assert raised.value.param == "stop_regex"


@pytest.mark.parametrize("pattern", [r"\n{2,}#", "(?:abc){e<=3}x", "[0-9]{4}-[0-9]{2}-[0-9]{2}", "a{10000}", "x{0}y", r"\{5\}", "{"])
def test_expressions_that_are_taken(pattern: str) -> None:
    compiled(pattern)


def test_an_expression_that_takes_exponential_time_fails_at_once() -> None:
    scanner = RegexScanner(["(a|aa)+$c"])
    with pytest.raises(TimeoutError):
        for _ in range(100):
            scanner.feed("a")
    before = scanner.showable
    assert scanner.feed("c") is None and scanner.showable == before, "it has given up"


def test_one_that_is_always_slow_fails_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step just below the limit of one would hold its neighbours for all of its answer."""
    monkeypatch.setattr(stop_regex, "FAST", 0.0)
    monkeypatch.setattr(stop_regex, "ALL_SECONDS", 1e-4)
    scanner = RegexScanner(["(a+)+$b"])
    with pytest.raises(TimeoutError):
        for _ in range(2000):
            scanner.feed("a")
