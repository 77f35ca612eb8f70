"""Tokenizers built from GGUF metadata."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from sidestream.errors import ModelError
from sidestream.text.gguf_tokenizer import PRE_TOKENIZERS, build, merges_from_scores
from sidestream.text.tokenizer import BYTE_OF_CHARACTER, Tokenizer


def piece_id(tokenizer: Tokenizer, piece: str) -> int:
    id = tokenizer.backend.token_to_id(piece)
    assert id is not None
    return id


def byte_level(pre: str, extra: list[str], merges: list[str], **fields: Any) -> Backend:
    tokens = [*BYTE_OF_CHARACTER, *extra]
    metadata = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges, **fields}
    return build({f"tokenizer.ggml.{key}": value for key, value in metadata.items()}).backend


def words(pre: str, text: str) -> list[str]:
    backend = byte_level(pre, [], [])
    assert backend.pre_tokenizer is not None
    alphabet = {character: bytes([byte]) for character, byte in BYTE_OF_CHARACTER.items()}
    return [b"".join(alphabet[c] for c in word).decode() for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["It", "'s", " 12345", "  ", " x", " IT", "'", "S", " 9", "...", "\n"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", "  ", " x", " IT", "'", "S", " ", "9", "...", "\n"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", "  ", " x", " IT", "'S", " ", "9", "...\n"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", "  ", " x", " IT", "'S", " ", "9", "...\n"]),
        ("gpt-4o", ["It's", " ", "123", "45", "  ", " x", " IT'S", " ", "9", "...\n"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", "5", "  ", " x", " IT", "'S", " ", "9", "...\n"]),
    ],
)
def test_pre_tokenizers(pre: str, expected: list[str]) -> None:
    assert words(pre, "It's 12345   x IT'S 9...\n") == expected


def test_every_known_name_builds() -> None:
    for name in PRE_TOKENIZERS:
        assert "".join(words(name, "Žluťoučký kůň 42")) == "Žluťoučký kůň 42", name


def test_unknown_pre_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="'brand-new'") as caught:
        byte_level("brand-new", [], [])
    assert "smollm" in str(caught.value.hint)


def test_unknown_kind_and_broken_files_are_refused() -> None:
    with pytest.raises(ModelError, match="'bert'"):
        build({"tokenizer.ggml.model": "bert"})
    with pytest.raises(ModelError, match=r"no tokenizer\.ggml\.tokens"):
        build({"tokenizer.ggml.model": "gpt2"})
    with pytest.raises(ModelError, match="broken"):
        byte_level("gpt-2", [], ["x yz"])  # `yz` is no token
    with pytest.raises(ModelError, match="not a pair"):
        byte_level("gpt-2", [], ["xyz"])
    with pytest.raises(ModelError, match="3 entries"):
        byte_level("gpt-2", [], [], token_type=[1, 1, 1])


def test_ignore_merges_takes_a_whole_word() -> None:
    # `abc` cannot be reached by merges; tiktoken's vocabularies take it anyway.
    extra, merges = ["bc", "abc"], ["b c"]
    assert byte_level("llama-bpe", extra, merges).encode("abc").tokens == ["abc"]
    assert byte_level("gpt-2", extra, merges).encode("abc").tokens == ["a", "bc"]


def test_qwen2_composes_characters() -> None:
    assert byte_level("qwen2", [], []).encode("e\u030c").ids == byte_level("qwen2", [], []).encode("ě").ids
    assert len(byte_level("gpt-2", [], []).encode("e\u030c").ids) == 3


def test_added_tokens_by_type() -> None:
    """Control tokens are special, user-defined ones are whole but visible; an end token is special even if typed as normal."""
    extra = ["<ctl>", "<think>", "<end▁of▁text>", "<unused>"]
    kinds = [1] * 256 + [3, 4, 1, 5]
    backend = byte_level("gpt-2", extra, [], token_type=kinds, eos_token_id=258)
    assert backend.get_vocab_size() == 260
    assert backend.encode("<ctl><think><end▁of▁text>").ids == [256, 257, 258]
    assert len(backend.encode("<unused>").ids) == 8
    made = Tokenizer(backend, bos_token_id=None, eos_token_ids=(258,))
    assert made.special_token_ids == {256, 258}
    assert made.decode([256, 257, 258]) == "<think>" == backend.decode([256, 257, 258])
    assert made.decode([258], skip_special_tokens=False) == "<end▁of▁text>"


def test_merges_from_scores() -> None:
    tokens = ["<s>", "a", "b", "ab", "ba", "aba", "s>"]
    scores = [0.0, -9.0, -9.0, -1.0, -2.0, -3.0, -9.0]
    # `aba` has two cuts: the longer left half goes first. `<s>` is a control token and no merge.
    expected = [("a", "b"), ("b", "a"), ("ab", "a"), ("a", "ba")]
    assert merges_from_scores(tokens, scores, [3, 1, 1, 1, 1, 1, 1]) == expected


def test_sentencepiece(pieces: Tokenizer) -> None:
    hello, world = piece_id(pieces, "▁hello"), piece_id(pieces, "▁world")
    assert pieces.encode("hello world") == [1, hello, world]  # the space prefix, and BOS as llama.cpp's default
    assert pieces.decode([1, hello, world]) == "hello world"
    assert pieces.encode("hello", add_special_tokens=False) == [hello]
    assert pieces.token_text(world) == " world"
    euro = pieces.encode("€", add_special_tokens=False)[1:]
    assert [pieces.token_bytes(id) for id in euro] == [b"\xe2", b"\x82", b"\xac"]
    assert pieces.decode(euro) == "€"
    assert pieces.special_token_ids == {0, 1, 2}
    tool = piece_id(pieces, "<tool>")
    assert pieces.decode(pieces.encode("hello<tool>")) == "hello<tool>"
    assert tool in pieces.encode("hello<tool>")


def test_sentencepiece_without_space_prefix(pieces_metadata: dict[str, Any]) -> None:
    backend, add_bos = build({**pieces_metadata, "tokenizer.ggml.add_space_prefix": False})
    assert add_bos
    made = Tokenizer(backend, bos_token_id=1, eos_token_ids=(2,), add_bos=False)
    assert [made.token_text(id) for id in made.encode("hello hello")] == ["h", "el", "lo", " hello"]
    assert made.decode(made.encode(" hello")) == " hello"


def test_building_is_fast(metadata: dict[str, Any]) -> None:
    """49152 tokens and 48900 merges: 0.07 to 0.15 s on a shared core."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        build(metadata)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.4


@pytest.mark.slow
def test_sentencepiece_like_transformers(pieces: Tokenizer, pieces_metadata: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    from transformers.tokenization_utils_base import generate_merges

    tokens, scores = pieces_metadata["tokenizer.ggml.tokens"], pieces_metadata["tokenizer.ggml.scores"]
    theirs = generate_merges({token: id for id, token in enumerate(tokens)}, dict(zip(tokens, scores, strict=True)))
    assert merges_from_scores(tokens, scores, pieces_metadata["tokenizer.ggml.token_type"]) == theirs
