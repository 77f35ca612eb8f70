"""Tokenizers that the text tests share: the default model's, and a small SentencePiece one in the form a GGUF has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sidestream.models.gguf import open_gguf
from sidestream.models.loader import TokenizerSource
from sidestream.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def metadata(default_model: Path) -> dict[str, Any]:
    """The `tokenizer.*` metadata of the default model."""
    return {key: value for key, value in open_gguf(default_model).metadata.items() if key.startswith("tokenizer.")}


@pytest.fixture(scope="session")
def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_source(TokenizerSource(None, metadata, {}), eos_token_ids=(2,), bos_token_id=1, add_bos=False)


@pytest.fixture(scope="session")
def pieces_metadata() -> dict[str, Any]:
    """A SentencePiece vocabulary: 3 special tokens, 256 bytes, then pieces whose scores give the order of the merges."""
    special = ["<unk>", "<s>", "</s>"]
    single = [f"<0x{byte:02X}>" for byte in range(256)]
    merged = ["▁h", "el", "▁hel", "lo", "▁hello", "▁w", "or", "ld", "▁wor", "▁world", "he"]
    letters = ["▁", *"abcdehlorwd"]
    tokens = [*special, *single, *merged, *letters, "<tool>"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(merged) + len(letters)), 4],
        "tokenizer.ggml.scores": [
            *[0.0] * 259,
            *(-float(index) for index in range(len(merged))),
            *(-100.0 - index for index in range(len(letters))),
            0.0,
        ],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture(scope="session")
def pieces(pieces_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_source(TokenizerSource(None, pieces_metadata, {}), eos_token_ids=(2,), bos_token_id=1, add_bos=None)
