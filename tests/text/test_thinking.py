"""The budget of reasoning."""

from __future__ import annotations

import numpy as np

from sidestream.messages import Budget, Thinking
from sidestream.text.thinking import ThinkingBudget
from sidestream.text.tokenizer import Tokenizer


def only(budget: ThinkingBudget, vocab_size: int) -> int | None:
    """The token that is forced."""
    mask = np.zeros(-(-vocab_size // 32), np.uint32)
    budget.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return int(bits.argmax()) if bits.sum() == 1 else None


def test_the_end_is_not_forced_within_a_character(tokenizer: Tokenizer) -> None:
    horse = tokenizer.encode("🐎", add_special_tokens=False)
    end = tokenizer.encode("</think>", add_special_tokens=False)
    assert len(horse) > 2
    budget = ThinkingBudget(Budget(1, Thinking("<think>", "</think>", inside=True)), None, tokenizer)
    for token in horse:
        assert only(budget, tokenizer.vocab_size) is None
        budget.advance(token)
    for token in end:
        assert only(budget, tokenizer.vocab_size) == token
        budget.advance(token)
    assert only(budget, tokenizer.vocab_size) is None
