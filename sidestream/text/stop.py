"""Stop strings on the engine's side: a matcher that is fed each output token and says when the request must end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sidestream.text.detokenizer import Detokenizer
from sidestream.text.stop_regex import too_slow
from sidestream.text.stop_scanner import StopMatch, StopScanner

if TYPE_CHECKING:
    from sidestream.text.tokenizer import Tokenizer

__all__ = ["StopMatch", "StopStringMatcher"]


class StopStringMatcher:
    """The engine's `StopMatcher`. A retracted request keeps it: tokens are never fed twice.

    Offsets are characters of the text that a `Detokenizer` gives for the same tokens, so they are valid for `OutputText` too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stop: tuple[str, ...],
        *,
        regexes: tuple[str, ...] = (),
        skip_special_tokens: bool,
        min_new_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)
        self._scanner = StopScanner(stop, regexes)
        self._regexes = regexes
        self._min_new_tokens = min_new_tokens
        self._tokens = 0

    def feed(self, token_id: int) -> StopMatch | None:
        """The stop string that this token completed. One completed before `min_new_tokens` tokens is passed over for good.

        Raises InvalidRequest for a regular expression that takes too long.
        """
        self._tokens += 1
        try:
            match = self._scanner.feed(self._detokenizer.feed((token_id,)))
        except TimeoutError:
            raise too_slow(self._regexes) from None
        return match if self._tokens >= self._min_new_tokens else None
