"""Incremental text: exact for any tokens, never half a character, never a begun stop string."""

from __future__ import annotations

import codecs
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from sidestream.text.detokenizer import Detokenizer, OutputText
from sidestream.text.stop import StopStringMatcher
from sidestream.text.tokenizer import BYTE_OF_CHARACTER, Tokenizer

TEXTS = ["Ahoj, světe! Žluťoučký kůň.", "안녕하세요 세계", "👩\u200d👩\u200d👧 🏳️‍🌈!", "日本語\n\n  x", "plain"]
IDS = st.lists(st.one_of(st.integers(0, 49151), st.integers(17, 250)), max_size=40)  # 17..250: mostly single bytes


def piece_id(tokenizer: Tokenizer, piece: str) -> int:
    id = tokenizer.backend.token_to_id(piece)
    assert id is not None
    return id


def token_id(tokenizer: Tokenizer, data: bytes) -> int:
    """The token that is these bytes."""
    spelling = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
    id = tokenizer.backend.token_to_id("".join(spelling[byte] for byte in data))
    assert id is not None, data
    return id


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token per byte."""
    return [token_id(tokenizer, bytes([byte])) for byte in data]


@settings(max_examples=200, deadline=None)
@given(IDS, st.booleans(), st.integers(1, 5))
def test_any_tokens_in_any_chunks(tokenizer: Tokenizer, ids: list[int], skip: bool, size: int) -> None:
    made = Detokenizer(tokenizer, [504, 3575], skip_special_tokens=skip)
    pieces = [made.feed(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "".join(pieces) + made.flush() == tokenizer.backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", TEXTS)
def test_only_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    """Byte by byte, every character comes with its last byte, and none is U+FFFD."""
    made = Detokenizer(tokenizer, [])
    pieces = [made.feed([id]) for id in byte_ids(tokenizer, text.encode())]
    assert pieces == [part for character in text for part in [*[""] * (len(character.encode()) - 1), character]]
    assert made.flush() == ""


def test_broken_bytes_are_shown_when_nothing_can_complete_them(tokenizer: Tokenizer) -> None:
    made = Detokenizer(tokenizer, [])
    assert [made.feed([id]) for id in byte_ids(tokenizer, b"\x80\xf0\x9fA\xe2\x82")] == ["\ufffd", "", "", "\ufffdA", "", ""]
    assert made.pending
    assert made.flush() == "\ufffd"
    # U+FFFD as a character that the model wrote is text like any other.
    made = Detokenizer(tokenizer, [])
    assert made.feed(byte_ids(tokenizer, "\ufffd".encode())) == "\ufffd"
    assert not made.pending


def test_cost_does_not_grow_with_length(tokenizer: Tokenizer) -> None:
    """Also for bytes that are never text, which `DecodeStream` holds and decodes again and again."""
    bad = byte_ids(tokenizer, b"\x9f")
    assert tokenizer.backend.decode(bad) == "\ufffd"

    def seconds(count: int) -> float:
        made = OutputText(tokenizer, [], stop=("\n\nUser:",))
        begin = time.perf_counter()
        assert sum(len(made.feed(bad)) for _ in range(count)) == count
        return time.perf_counter() - begin

    assert min(seconds(8000) for _ in range(3)) < 8 * 4 * min(seconds(1000) for _ in range(3))


def test_space_at_the_start_belongs_to_the_prompt_it_continues(pieces: Tokenizer) -> None:
    hello, world = piece_id(pieces, "▁hello"), piece_id(pieces, "▁world")
    assert Detokenizer(pieces, [1, hello]).feed([world]) == " world"
    assert Detokenizer(pieces, [1]).feed([hello, world]) == "hello world"  # nothing before it: as `decode`
    assert Detokenizer(pieces, [1], skip_special_tokens=False).feed([hello]) == " hello"  # after the text "<s>"
    made = Detokenizer(pieces, [])
    assert made.feed([2]) + made.feed([hello]) == "hello"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 285), max_size=30))
def test_sentencepiece_any_tokens(pieces: Tokenizer, ids: list[int]) -> None:
    made = Detokenizer(pieces, [])
    assert "".join(made.feed([id]) for id in ids) + made.flush() == pieces.decode(ids)


def test_other_decoders() -> None:
    """A decoder whose tokens depend on their neighbours: what comes out is what a look at the whole would add."""
    backend = tokenizers.Tokenizer(models.WordLevel({"[PAD]": 0, "un": 1, "##do": 2, "x": 3, "\ufffd": 4}, unk_token="[PAD]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[PAD]"])
    made = Tokenizer(backend, bos_token_id=None, eos_token_ids=())
    stream = Detokenizer(made, [3])
    assert [stream.feed([id]) for id in [1, 2, 0, 3]] == [" un", "do", "", " x"]
    stream = Detokenizer(made, [])
    pieces = [stream.feed([4]) for _ in range(20)]
    assert pieces[:8] == [""] * 7 + [" ".join("\ufffd" * 8)]  # held, but not for ever
    assert stream.pending
    assert "".join(pieces) + stream.flush() == made.decode([4] * 20)
    assert not stream.pending


def feed_all(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...]) -> tuple[OutputText, list[str]]:
    output = OutputText(tokenizer, [], stop=stop, skip_special_tokens=True)
    return output, [output.feed([id]) for id in ids]


def test_stop_string_is_held_back_then_cut(tokenizer: Tokenizer) -> None:
    output, pieces = feed_all(tokenizer, byte_ids(tokenizer, b"ABC DEFGHIJ"), ("DEFGHIJ",))
    assert pieces == ["A", "B", "C", " ", *[""] * 7]
    assert output.held_tokens == 7
    assert output.finish(stop_offset=4) == ""
    assert (output.text, output.held_tokens) == ("ABC ", 0)


def test_false_alarm_is_released(tokenizer: Tokenizer) -> None:
    output, pieces = feed_all(tokenizer, byte_ids(tokenizer, b"AB!AAB-AAB"), ("ABC", "AAA"))
    assert pieces == ["", "", "AB!", "", "", "", "AAB-", "", "", ""]
    assert output.held_tokens == 3  # "A" alone ends in a beginning of a stop string, although it cannot become one any more
    assert output.finish(stop_offset=None) == "AAB"
    assert output.text == "AB!AAB-AAB"


def test_stop_string_that_ends_inside_a_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three", add_special_tokens=False)
    assert len(ids) == 3
    output = OutputText(tokenizer, [], stop=("e tw",), skip_special_tokens=True)
    assert output.feed(ids[:1]) == "on"
    assert output.held_tokens == 1
    assert output.feed(ids[1:2]) == ""  # complete: only the engine knows what it means
    assert output.feed([]) == ""
    assert output.finish(stop_offset=2) == ""
    assert output.text == "on"
    # The same, passed over by `min_new_tokens`: the next token proves it.
    output = OutputText(tokenizer, [], stop=("e tw",), skip_special_tokens=True)
    assert [output.feed([id]) for id in ids] == ["on", "", "e two thr"]
    assert output.held_tokens == 1  # "ee": the last may begin another one, the first would end what is shown in a beginning
    assert output.finish() == "ee"


def test_held_tokens_count_bytes_of_a_character(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer, [], stop=(), skip_special_tokens=True)
    held = []
    for id in [*byte_ids(tokenizer, "x👧".encode()), 2, *byte_ids(tokenizer, b"\xf0A")]:
        output.feed([id])
        held.append(output.held_tokens)
    assert held == [0, 1, 2, 3, 0, 0, 1, 0]  # a skipped special token has no text to wait for
    assert output.feed(byte_ids(tokenizer, b"\xf0\x9f")) == ""
    assert output.held_tokens == 2
    assert output.finish(stop_offset=None) == "\ufffd"
    assert (output.text, output.held_tokens) == ("x👧\ufffdA\ufffd", 0)


def expected_end(data: list[bytes], stop: tuple[str, ...], min_new_tokens: int) -> tuple[int, int, str] | None:
    """By plain search over the whole text after every token: (tokens, offset, stop) of the match."""
    before = 0
    for count in range(1, len(data) + 1):
        text = codecs.utf_8_decode(b"".join(data[:count]), "replace", False)[0]
        if count >= min_new_tokens:
            found = [
                (offset, index)
                for index, each in enumerate(stop)
                for offset in range(len(text))
                if text.startswith(each, offset) and offset + len(each) > before
            ]
            if found:
                offset, index = min(found)
                return count, offset, stop[index]
        before = len(text)
    return None


ALPHABET = "absů"


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_engine_and_api_agree(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Tokens of one byte and of several, in chunks: the text is that of a plain search, and nothing shown is taken back."""
    spellings = [b"a", b"b", b"aa", b"ab", b"ba", b"aba", b"bb", b"abs", b"\xc5", b"\xaf"]
    ids = data.draw(st.lists(st.sampled_from([token_id(tokenizer, each) for each in spellings]), max_size=25))
    stop = tuple(data.draw(st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=3)))
    min_new_tokens = data.draw(st.integers(0, 6))
    match = None
    matcher = StopStringMatcher(tokenizer, [], stop, skip_special_tokens=True, min_new_tokens=min_new_tokens)
    output = OutputText(tokenizer, [], stop=stop, skip_special_tokens=True)
    waiting: list[int] = []
    fed = shown = 0
    for id in ids:
        match = matcher.feed(id)
        waiting.append(id)
        fed += 1
        if match is not None:
            break
        if data.draw(st.booleans()):
            shown += len(output.feed(waiting))
            waiting = []
            assert not any(output.text.endswith(each[:size]) for each in stop for size in range(1, len(each)))
            assert len(output.text) == shown
    output.feed(waiting)
    output.finish(stop_offset=None if match is None else match.offset)
    texts = [tokenizer.token_bytes(id) for id in ids]
    end = expected_end(texts, stop, min_new_tokens)
    whole = b"".join(texts).decode("utf-8", "replace")
    assert (None if match is None else (fed, match.offset, match.stop)) == end
    assert output.text == (whole if end is None else whole[: end[1]])
    assert output.held_tokens == 0
