"""Reasoning, content and calls of one answer; and how many of its tokens are reasoning."""

from __future__ import annotations

import pytest

from sidestream.text.answer_parser import AnswerParser, ReasoningCounter
from sidestream.text.reasoning import FORMATS
from sidestream.text.tokenizer import Tokenizer
from sidestream.text.tools.events import Arguments, CallBegun, Content, Event, Reasoning
from sidestream.text.tools.format import HERMES

THINK = FORMATS["think"]
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def events_of(text: str, *, reasons: bool = True, calls: bool = True, verbatim: bool = False) -> list[Event]:
    parser = AnswerParser(THINK if reasons else None, HERMES.parser(["f"]) if calls else None, inside=False, verbatim=verbatim)
    return parser.feed(text) + parser.finish()


def shown(events: list[Event]) -> list[tuple[str, str]]:
    return [(type(event).__name__, event.name if isinstance(event, CallBegun) else event.text) for event in events]


def test_a_call_in_the_reasoning_is_none() -> None:
    text = f"<think>{CALL}</think>So: {CALL}"
    assert shown(events_of(text)) == [("Reasoning", CALL), ("Content", "So:"), ("CallBegun", "f"), ("Arguments", "{}")]
    verbatim = events_of(text, verbatim=True)
    assert isinstance(verbatim[0], Content) and verbatim[0].text == f"<think>{CALL}</think>"
    assert [type(event) for event in verbatim[1:]] == [Content, CallBegun, Arguments]


def test_without_a_format_text_stays_as_it_is() -> None:
    assert events_of(f"<think>a</think>{CALL}", reasons=False, calls=False) == [Content(f"<think>a</think>{CALL}")]
    assert events_of("<think>a</think>b ", calls=False) == [Reasoning("a"), Content("b ")]
    assert events_of("", calls=False) == []


@pytest.mark.parametrize(
    ("text", "inside", "of"),
    [
        ("<think>One two.</think>\n\nThree four", False, "<think>One two.</think>"),
        ("One two.</think>Three", True, "One two.</think>"),
        ("One two", True, "One two"),
        ("Three four", False, ""),
    ],
)
def test_tokens_of_reasoning(tokenizer: Tokenizer, text: str, inside: bool, of: str) -> None:
    """Token by token, or all at once; a token may belong to the marker and to what follows it."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    counts = set()
    for pieces in ([ids], [[token] for token in ids]):
        counter = ReasoningCounter(tokenizer, [1], THINK, inside=inside)
        for piece in pieces:
            counter.feed(piece)
        counts.add(counter.tokens)
    (count,) = counts
    assert tokenizer.decode(ids[:count]).startswith(of) and (not count or not tokenizer.decode(ids[: count - 1]).startswith(of))
