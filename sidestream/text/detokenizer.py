"""Output tokens to text, as they come: whole characters only, and nothing that may become part of a stop string.

`tokenizers.decoders.DecodeStream` is not used. It decodes its window anew for every token and holds it while the text ends in
U+FFFD: bytes that are no UTF-8 give no text at all, at a cost that grows with their number (0.4 ms a token after 3000, measured);
what it holds cannot be flushed, and on some tokenizers it raises "Invalid prefix". For the two kinds of vocabulary that causal
models have, a token is a string of bytes: an incremental UTF-8 decoder is exact for any sequence of tokens, at 2 to 3 µs a token.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from sidestream.text.stop_scanner import StopScanner

if TYPE_CHECKING:
    from sidestream.text.tokenizer import Tokenizer

CONTEXT_TOKENS = 4  # tokens before the new ones that `_WholeText` decodes again
HELD_TOKENS = 8  # it waits for the end of a character at most so many tokens; UTF-8 needs four

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class _Stream(Protocol):
    def step(self, id: int) -> str: ...
    def flush(self) -> str: ...
    @property
    def pending(self) -> bool: ...


class _ByteText:
    """Tokens are bytes. The prompt matters only to SentencePiece, which drops the first space of a text, not of its continuation.

    A prompt that ends inside a character (only ids can) does not reach into the output, whose text is that of its own tokens.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skipped: frozenset[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = skipped
        self._decoder = _utf8_decoder("replace")
        self._at_start = tokenizer.strips_first_space and not any(tokenizer.token_bytes(id) for id in prompt_ids if id not in skipped)

    def step(self, id: int) -> str:
        if id in self._skipped:
            return ""
        data = self._token_bytes(id)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    @property
    def pending(self) -> bool:
        return self._decoder.getstate()[0] != b""


class _WholeText:
    """Any other decoder: decode the new tokens together with the few before them, and take what was added."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skipped: frozenset[int]) -> None:
        self._decode = tokenizer.backend.decode
        self._skipped = skipped
        tail = prompt_ids[-8 * CONTEXT_TOKENS :]
        self._context = [id for id in tail if id not in skipped][-CONTEXT_TOKENS:]
        self._new: list[int] = []

    def step(self, id: int) -> str:
        if id in self._skipped:
            return ""
        self._new.append(id)
        text = self._added()
        if text.endswith("\ufffd") and len(self._new) < HELD_TOKENS:
            return ""
        self._context = [*self._context, *self._new][-CONTEXT_TOKENS:]
        self._new = []
        return text

    def flush(self) -> str:
        text = self._added()
        self._new = []
        return text

    @property
    def pending(self) -> bool:
        return bool(self._new)

    def _added(self) -> str:
        before = self._decode(self._context, skip_special_tokens=False)
        return self._decode([*self._context, *self._new], skip_special_tokens=False)[len(before) :]


class Detokenizer:
    """Text of one output: what `feed` returned, then `flush`, is that of all tokens, whatever they are and however they came."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        kind = _WholeText if tokenizer.decoding == "whole" else _ByteText
        self._stream: _Stream = kind(tokenizer, prompt_ids, skipped)

    def feed(self, token_ids: Iterable[int]) -> str:
        """The new text that is final: it never ends inside a character, and U+FFFD means bytes that no token can complete."""
        return "".join(map(self._stream.step, token_ids))

    def flush(self) -> str:
        """What is left at the end: a character that never became complete, as U+FFFD."""
        return self._stream.flush()

    @property
    def pending(self) -> bool:
        """Whether the last tokens end inside a character, whose text will come later as at least one character."""
        return self._stream.pending


class OutputText:
    """The text of one output that may be shown. While the request runs, it never ends in a proper prefix of a stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        stop: tuple[str, ...] = (),
        regexes: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)
        self._scanner = StopScanner(stop, regexes)
        self._shown: list[str] = []
        self._shown_length = 0
        self._held = ""
        self._ends: deque[int] = deque()  # where the text of each token ends that has not been shown completely

    @property
    def text(self) -> str:
        """Everything shown so far."""
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""

    @property
    def held_tokens(self) -> int:
        """How many of the tokens fed have text that is not shown yet; their logprobs and rows wait for it."""
        return len(self._ends)

    def feed(self, token_ids: Iterable[int]) -> str:
        """The new text that may be shown. An EOS or stop token that ends the request must not be fed.

        A stop string that the last token completed is held too: only the engine knows whether it ends the request (`finish`) or
        is passed over because of `min_new_tokens` (the next `feed` releases it).
        """
        pieces = [self._held]
        for id in token_ids:
            piece = self._detokenizer.feed((id,))
            with suppress(TimeoutError):  # an expression that takes too long: the engine ends the request
                self._scanner.feed(piece)
            pieces.append(piece)
            self._ends.append(self._scanner.length + self._detokenizer.pending)
        self._held = "".join(pieces)
        return self._show(self._scanner.showable - self._shown_length)

    def finish(self, *, stop_offset: int | None = None) -> str:
        """The rest of the text; if a stop string ended the request, up to `stop_offset`, its start in the whole output text."""
        if stop_offset is None:
            self._held += self._detokenizer.flush()
            text = self._show(len(self._held))
        else:
            assert self._shown_length <= stop_offset, "text of a stop string was shown: matcher and output disagree"
            text = self._show(stop_offset - self._shown_length)
        self._held = ""
        self._ends.clear()
        return text

    def _show(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        if text:
            self._shown.append(text)
            self._shown_length += len(text)
        while self._ends and self._ends[0] <= self._shown_length:
            self._ends.popleft()
        return text
