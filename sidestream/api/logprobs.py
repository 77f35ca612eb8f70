"""Logprobs in OpenAI's shapes: objects with the text and the bytes of each token (chat), and parallel lists (completions)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import islice, repeat
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from sidestream.api.shapes import finite
from sidestream.output import Logprobs
from sidestream.text.detokenizer import Detokenizer

SLICE_TOKENS = 1024  # with their alternatives, encoded at a time: a few milliseconds

Pairs = Sequence[tuple[float, int]]  # (logprob, token id)

_encode = msgspec.json.Encoder().encode


class TokenText(NamedTuple):
    """A token's own text, whatever stands beside it."""

    text: str  # of bytes that are no text: `bytes:` and they in OpenAI's notation, such as \\xe2\\x80
    bytes: list[int]


class TokenTexts:
    """The texts of single tokens, kept for one request."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}

    def __getitem__(self, token: int) -> TokenText:
        found = self._known.get(token)
        if found is None:
            whole = self._tokenizer.decoding == "whole"
            data = self._tokenizer.token_text(token).encode() if whole else self._tokenizer.token_bytes(token)
            found = self._known[token] = TokenText(_written(data), list(data))
        return found


def _written(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(byte) if 0x20 <= byte < 0x7F and byte != 0x5C else f"\\x{byte:02x}" for byte in data)


class Entries(NamedTuple):
    """Tokens with what was asked of each; a list that was not asked for is empty. None is the prompt's first token, which has nothing."""

    tokens: Sequence[int]
    values: Sequence[float | None]
    top: Sequence[Pairs | None]
    asked: Sequence[Pairs | None]  # token_ids_logprob

    def then(self, other: Entries) -> Entries:
        """These, and then those of `other`, of which the same was asked."""
        return Entries([*self.tokens, *other.tokens], [*self.values, *other.values], [*self.top, *other.top], [*self.asked, *other.asked])

    @classmethod
    def of_prompt(cls, logprobs: Logprobs, prompt: Sequence[int]) -> Entries:
        """Of those positions of the prompt that were asked for: its last ones."""
        tokens = prompt[len(prompt) - len(logprobs.input) :]
        return cls(tokens, logprobs.input, logprobs.input_top, logprobs.input_ids)

    @classmethod
    def of_output(cls, logprobs: Logprobs, tokens: Sequence[int]) -> Entries:
        return cls(tokens, logprobs.output, logprobs.output_top, logprobs.output_ids)


async def _sliced(items: Iterable[Any], weight: int) -> Any:
    """A JSON array, encoded in slices; each item weighs as much as `weight` tokens."""
    step = max(1, SLICE_TOKENS // weight)
    source, pieces = iter(items), list[bytes]()
    while batch := list(islice(source, step)):
        pieces.append(_encode(batch)[1:-1])
        if len(batch) == step:
            await asyncio.sleep(0)
    return msgspec.Raw(b"[%b]" % b",".join(pieces))


# Chat


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float | None
    bytes: list[int]
    token_id: int


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float | None  # null for the first token of a prompt
    bytes: list[int]
    token_id: int
    top_logprobs: list[TopLogprob]
    token_ids_logprobs: list[TopLogprob] | UnsetType = UNSET


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """One entry for each token. With logprobs_format "flat" the fields are those of the compact form instead."""

    content: list[TokenLogprob] | UnsetType = UNSET
    refusal: None = None
    prompt: list[TokenLogprob] | UnsetType = UNSET  # positions logprob_start_len and later


async def chat_logprobs(texts: TokenTexts, output: Entries, prompt: Entries) -> ChatLogprobs:
    made = ChatLogprobs(content=await _chat_entries(texts, output))
    if prompt.tokens:
        made.prompt = await _chat_entries(texts, prompt)
    return made


async def _chat_entries(texts: TokenTexts, entries: Entries) -> Any:
    rows = zip(entries.tokens, entries.values, entries.top or repeat(()), entries.asked or repeat(None), strict=False)
    return await _sliced((_chat_entry(texts, *row) for row in rows), _weight(entries))


def _chat_entry(texts: TokenTexts, token: int, value: float | None, top: Pairs | None, asked: Pairs | None) -> TokenLogprob:
    text, data = texts[token]
    entry = TokenLogprob(text, finite(value), data, token, [_alternative(texts, *pair) for pair in top or ()])
    if asked is not None:
        entry.token_ids_logprobs = [_alternative(texts, *pair) for pair in asked]
    return entry


def _alternative(texts: TokenTexts, value: float, token: int) -> TopLogprob:
    text, data = texts[token]
    return TopLogprob(text, finite(value), data, token)


def _weight(entries: Entries) -> int:
    """Entries of the same width as the last: the first may be empty."""
    return 1 + sum(len(rows[-1] or ()) for rows in (entries.top, entries.asked) if rows)


# Completions


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Parallel lists with one entry for each token. With logprobs_format "flat" the fields are those of the compact form instead."""

    tokens: list[str] | UnsetType = UNSET
    token_logprobs: list[float | None] | UnsetType = UNSET
    top_logprobs: list[dict[str, float | None] | None] | UnsetType = UNSET  # with the token itself, also where it is one more
    text_offset: list[int] | UnsetType = UNSET  # characters of the choice's text before the token
    token_ids: list[int] | UnsetType = UNSET
    top_logprobs_by_id: list[list[tuple[float | None, int]] | None] | UnsetType = UNSET  # complete where texts are the same
    token_ids_logprobs: list[list[tuple[float | None, int]] | None] | UnsetType = UNSET
    prompt: CompletionLogprobs | UnsetType = UNSET  # without echo: positions logprob_start_len and later


async def completion_logprobs(texts: TokenTexts, entries: Entries, offsets: Sequence[int]) -> CompletionLogprobs:
    weight = _weight(entries)
    tops = zip(entries.tokens, entries.values, entries.top or repeat(()), strict=False)
    made = CompletionLogprobs(
        tokens=await _sliced((texts[token].text for token in entries.tokens), 1),
        token_logprobs=await _sliced(map(finite, entries.values), 1),
        top_logprobs=await _sliced((_by_text(texts, *row) for row in tops), weight),
        text_offset=list(offsets),
        token_ids=list(entries.tokens),
    )
    if entries.top:
        made.top_logprobs_by_id = await _sliced(map(_finite_pairs, entries.top), weight)
    if entries.asked:
        made.token_ids_logprobs = await _sliced(map(_finite_pairs, entries.asked), weight)
    return made


def _by_text(texts: TokenTexts, token: int, value: float | None, top: Pairs | None) -> dict[str, float | None] | None:
    """The alternatives, best first. Of several with the same text the best one counts, but the token's own number always."""
    if value is None:
        return None
    named: dict[str, float | None] = {}
    for other, alternative in top or ():
        named.setdefault(texts[alternative].text, finite(other))
    named[texts[token].text] = finite(value)
    return named


def _finite_pairs(pairs: Pairs | None) -> list[tuple[float | None, int]] | None:
    return None if pairs is None else [(finite(value), token) for value, token in pairs]


class TextOffsets:
    """Where the text of each token begins in a text that grows. Bytes of a character that is not complete yet count for nothing."""

    def __init__(self, tokenizer: Any, before: Sequence[int], *, start: int, skip_special_tokens: bool) -> None:
        self._detokenizer = Detokenizer(tokenizer, before, skip_special_tokens=skip_special_tokens)
        self._length = start

    async def feed(self, tokens: Iterable[int]) -> list[int]:
        offsets = []
        for place, token in enumerate(tokens, 1):
            offsets.append(self._length)
            self._length += len(self._detokenizer.feed((token,)))
            if place % SLICE_TOKENS == 0:
                await asyncio.sleep(0)
        return offsets


class Echo(NamedTuple):
    """A prompt as part of the answer's text."""

    text: str
    offsets: list[int]  # of its tokens


async def echoed(tokenizer: Any, prompt: str | Sequence[int], tokens: Sequence[int], *, skip_special_tokens: bool) -> Echo:
    """A text is echoed as it was given; token ids as the text that they are."""
    detokenizer = Detokenizer(tokenizer, (), skip_special_tokens=skip_special_tokens and not isinstance(prompt, str))
    own_bos = isinstance(prompt, str) and tokenizer.adds_bos and not prompt.startswith(tokenizer.bos_token)  # is not in the text
    pieces, length, offsets = [], 0, []
    for place, token in enumerate(tokens):
        piece = "" if own_bos and not place else detokenizer.feed((token,))
        offsets.append(length)
        pieces.append(piece)
        length += len(piece)
        if len(offsets) % SLICE_TOKENS == 0:
            await asyncio.sleep(0)
    text = prompt if isinstance(prompt, str) else "".join(pieces) + detokenizer.flush()
    return Echo(text, [min(offset, len(text)) for offset in offsets])
