"""The process in which grammars are tried before the engine gets them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from sidestream.errors import EngineDead, InvalidRequest
from sidestream.messages import Grammar
from sidestream.text import grammar_guard
from sidestream.text.grammar_guard import GrammarGuard
from sidestream.text.tokenizer import Tokenizer

# The compiler counts remainders of both: 79 million states, for minutes and gigabytes.
ENDLESS = Grammar("json_schema", '{"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 7919}]}')


@pytest.fixture
def guard(tokenizer: Tokenizer) -> Iterator[GrammarGuard]:
    made = GrammarGuard(tokenizer.state(), tokenizer.vocab_size)
    yield made
    made.close()


def test_what_is_right_passes_and_what_is_wrong_is_refused_by_name(guard: GrammarGuard) -> None:
    guard.check(Grammar("regex", "[a-z]+"))
    guard.check(Grammar("choice", ("a", "b")))
    with pytest.raises(InvalidRequest, match='"not" cannot be enforced') as refused:
        guard.check(Grammar("json_schema", '{"not": {}}'))
    assert refused.value.param == "json_schema"
    guard.check(Grammar("regex", "[a-z]+"))


def test_what_has_no_end_is_ended_and_others_go_on(guard: GrammarGuard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_guard, "MAX_SECONDS", 1.0)
    guard.check(Grammar("regex", "a"))
    process = guard._process
    assert process is not None
    with pytest.raises(InvalidRequest, match="must take less"):
        guard.check(ENDLESS)
    assert process.poll() is not None, "its process has ended"
    guard.check(Grammar("regex", "b"))
    assert guard._process is not process


def test_a_process_that_was_killed_is_started_again(guard: GrammarGuard) -> None:
    guard.check(Grammar("regex", "a"))
    process = guard._process
    assert process is not None
    process.kill()
    process.wait()
    guard.check(Grammar("regex", "b"))
    assert guard._process is not process


def test_a_closed_guard_starts_nothing(guard: GrammarGuard) -> None:
    guard.close()
    with pytest.raises(EngineDead):
        guard.check(Grammar("regex", "a"))
    assert guard._process is None


def test_the_process_ends_with_whoever_started_it(guard: GrammarGuard) -> None:
    guard.check(Grammar("regex", "a"))
    process = guard._process
    assert process is not None and process.stdin is not None
    process.stdin.close()
    deadline = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.poll() == 0
