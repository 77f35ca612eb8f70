"""The budget of a model's reasoning: after that many tokens of it, the text that ends it is forced."""

from __future__ import annotations

import codecs
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sidestream.messages import Budget

if TYPE_CHECKING:
    from sidestream.text.grammar import Matcher
    from sidestream.text.tokenizer import Tokenizer

Mask = npt.NDArray[np.uint32]


class ThinkingBudget:
    """A `Constraint` that admits what `inner` does, or anything, until the budget is used up."""

    def __init__(self, budget: Budget, inner: Matcher | None, tokenizer: Tokenizer) -> None:
        self._inner = inner
        self._tokenizer = tokenizer
        thinking = budget.thinking
        self._end = thinking.end.encode()
        self._end_tokens = tokenizer.encode(thinking.end, add_special_tokens=False)
        self._awaited = self._end if thinking.inside else thinking.begin.encode()  # the next of the two; none when it is over
        self._seen = b""  # the end of the text, as far as it may belong to what is awaited
        self._left = budget.tokens
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._forced: deque[int] = deque()
        if thinking.inside and not self._left:
            self._forced.extend(self._end_tokens)

    def asked(self) -> Matcher | None:
        """Whose mask is the next one; None where it is known."""
        return None if self._forced else self._inner

    def fill_mask(self, mask: Mask) -> None:
        if self._forced:
            mask[:] = 0
            mask[self._forced[0] // 32] = np.uint32(1 << self._forced[0] % 32)
        elif self._inner is not None:
            self._inner.fill_mask(mask)
        else:
            mask[:] = 0xFFFFFFFF

    def advance(self, token_id: int) -> bool:
        if self._forced:
            self._forced.popleft()
            if not self._forced:
                self._awaited = b""
        elif self._awaited:
            self._follow(token_id)
        return self._inner.advance(token_id) if self._inner is not None else False

    def _follow(self, token_id: int) -> None:
        within = self._awaited == self._end
        data = self._tokenizer.token_bytes(token_id)
        self._seen += data
        self._characters.decode(data)
        found = self._awaited in self._seen
        if found:
            self._awaited, self._seen = (b"" if within else self._end), b""
        else:
            self._seen = self._seen[-len(self._awaited) :]
        if self._awaited == self._end:
            self._left -= within
            if self._left <= 0 and not self._characters.getstate()[0]:  # within a character nothing else can follow
                self._forced.extend(self._end_tokens)
