"""Reasoning told apart from the answer, however its text is cut into pieces."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestream.errors import ConfigError
from sidestream.text.reasoning import FORMATS, ReasoningParser, reasoning_of
from sidestream.text.tools.events import Content, Reasoning

THINK, MISTRAL = FORMATS["think"], FORMATS["mistral"]


def parsed(pieces: Iterable[str], *, format=THINK, **options) -> tuple[str, str]:
    """Reasoning and content."""
    parser = ReasoningParser(format, **{"inside": False, **options})
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    assert all(event.text for event in events)
    kinds = [type(event) for event in events]
    assert kinds == sorted(kinds, key=[Reasoning, Content].index)
    return tuple("".join(event.text for event in events if isinstance(event, kind)) for kind in (Reasoning, Content))  # type: ignore[return-value]


CASES = [
    ("<think>\nIt is 4.\n</think>\n\nFour.", False, ("It is 4.", "Four.")),
    ("  <think>a</think>b ", False, ("a", "b ")),
    ("It is 4.\n</think>\n\nFour.", True, ("It is 4.", "Four.")),
    ("<think>again</think>Four.", True, ("again", "Four.")),
    ("no reasoning <think>x</think>", False, ("", "no reasoning <think>x</think>")),
    (" Four.", False, ("", " Four.")),
    ("<thin", False, ("", "<thin")),
    ("<think>never ends </thin", False, ("never ends </thin", "")),
    ("a </think> b </think> c", True, ("a", "b </think> c")),
    ("<think></think>", False, ("", "")),
    ("</think>x", True, ("", "x")),
    ("", True, ("", "")),
    ("\n", False, ("", "\n")),
]


@pytest.mark.parametrize(("text", "inside", "expected"), CASES)
def test_the_same_however_it_is_cut(text, inside, expected):
    assert parsed([text], inside=inside) == expected
    assert parsed(text, inside=inside) == expected
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            assert parsed([text[:first], text[first:second], text[second:]], inside=inside) == expected


def test_other_markers():
    assert parsed("[THINK]a[/THINK]b", format=MISTRAL) == ("a", "b")


@pytest.mark.parametrize(("text", "inside", "expected"), CASES)
def test_verbatim_loses_nothing(text, inside, expected):
    for pieces in ([text], text):
        reasoning, content = parsed(pieces, inside=inside, verbatim=True)
        assert reasoning + content == text
        assert bool(content.strip()) == bool(expected[1].strip())


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "th", "ink>", " ", "\n", "a", "</"])), st.booleans(), st.randoms())
def test_any_text_gives_the_same_in_any_pieces_and_loses_only_markers_and_space(words, inside, random):
    text = "".join(words)
    whole = parsed([text], inside=inside)
    cuts = sorted(random.randrange(len(text) + 1) for _ in range(3))
    assert parsed([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)], inside=inside) == whole
    left = "".join(whole).replace(" ", "").replace("\n", "")
    assert len(text.replace(" ", "").replace("\n", "")) - len(left) in (0, 7, 8, 15)


def test_nothing_is_held_but_what_may_be_a_marker():
    parser = ReasoningParser(THINK, inside=True)
    assert parser.feed("It is <") == [Reasoning("It is")]
    assert parser.feed("5") == [Reasoning(" <5")]
    assert parser.feed(" </think") == []
    assert parser.feed("> Four") == [Content("Four")]
    assert parser.feed(" <think>") == [Content(" <think>")]


def test_which_format_a_template_has():
    assert reasoning_of("{% if '</think>' in content %}") == THINK
    assert reasoning_of("[THINK]{{ x }}[/THINK]") == MISTRAL
    assert reasoning_of("{{ messages }}") is reasoning_of(None) is None
    assert reasoning_of("'</think>'", "none") is None
    assert reasoning_of(None, "think") == THINK
    with pytest.raises(ConfigError, match=r"reasoning_parser: got 'r1', must be one of auto, none, think, mistral"):
        reasoning_of(None, "r1")


def test_what_a_prompt_says_of_it():
    assert THINK.starts_inside("<|im_start|>assistant\n<think>\n")
    assert not THINK.starts_inside("What is <think>?<|im_end|>\n<|im_start|>assistant\n")
    assert THINK.is_over("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not THINK.is_over("<|im_start|>assistant\n")
