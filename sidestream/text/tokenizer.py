"""The tokenizer: text to ids and back, and the bytes of every single token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import tokenizers

from sidestream.errors import InvalidRequest, ModelError
from sidestream.text import gguf_tokenizer

if TYPE_CHECKING:
    from sidestream.models.loader import TokenizerSource

LONG_TEXT = 10_000  # characters: to tokenize a longer one takes so long that other threads must go on meanwhile
LONG_TOKEN = 16  # characters; few texts have as many per token

# How a token becomes text. "bytes": byte-level BPE, a token is a string of bytes written in GPT-2's alphabet. "pieces":
# SentencePiece, "▁" is a space and "<0x0A>" a byte. "whole": any other decoder, a token's text may depend on its neighbours.
Decoding = Literal["bytes", "pieces", "whole"]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable characters of Latin-1 stand for their own byte, the other bytes for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(rest)}


BYTE_OF_CHARACTER = _byte_alphabet()


class TokenizerState(NamedTuple):
    """A tokenizer as plain data, to send to another process."""

    backend: str  # what tokenizer.json would hold
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    adds_bos: bool
    bos_token: str
    eos_token: str


class Tokenizer:
    """Wraps the fast `tokenizers` backend.

    `add_bos` says whether `encode` puts BOS first: True and False force it, None leaves it to the backend's post-processor.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
        add_bos: bool | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
    ) -> None:
        backend.no_truncation()  # files may carry the limits of the training run
        backend.no_padding()
        self.backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(index for index, token in added.items() if token.special)
        self.bos_token = self._string(bos_token_id) if bos_token is None else bos_token
        self.eos_token = self._string(eos_token_ids[0] if eos_token_ids else None) if eos_token is None else eos_token
        first = backend.encode("", add_special_tokens=True).ids[:1]
        self._backend_adds_bos = bos_token_id is not None and first == [bos_token_id]
        self.adds_bos = self._backend_adds_bos if add_bos is None else add_bos and bos_token_id is not None
        self.decoding: Decoding
        self.decoding, self.strips_first_space = _decoding(backend)
        self._bytes: dict[int, bytes] = {}  # filled as tokens are met: building all of it would cost every start

    @classmethod
    def from_source(
        cls, source: TokenizerSource, *, eos_token_ids: tuple[int, ...], bos_token_id: int | None, add_bos: bool | None
    ) -> Tokenizer:
        """Raises `ModelError` if the files do not give a tokenizer that is supported."""
        if source.tokenizer_json is None:
            assert source.gguf is not None
            backend, default_add_bos = gguf_tokenizer.build(source.gguf)
            add_bos = default_add_bos if add_bos is None else add_bos
        else:
            try:
                backend = tokenizers.Tokenizer.from_file(str(source.tokenizer_json))
            except Exception as error:  # `tokenizers` raises bare Exception
                raise ModelError(f"{source.tokenizer_json} cannot be read: {error}", hint="Is the file complete?") from error
        bos_token, eos_token = (_configured_token(source.tokenizer_config, name) for name in ("bos_token", "eos_token"))
        if bos_token:  # the tokenizer's own word goes before config.json, which is often wrong about it
            own = backend.token_to_id(bos_token)
            bos_token_id = bos_token_id if own is None else own
        return cls(
            backend,
            bos_token_id=bos_token_id,
            eos_token_ids=eos_token_ids,
            add_bos=add_bos,
            bos_token=bos_token,
            eos_token=eos_token,
        )

    def state(self) -> TokenizerState:
        return TokenizerState(self.backend.to_str(), self.bos_token_id, self.eos_token_ids, self.adds_bos, self.bos_token, self.eos_token)

    @classmethod
    def from_state(cls, state: TokenizerState) -> Tokenizer:
        return cls(
            tokenizers.Tokenizer.from_str(state.backend),
            bos_token_id=state.bos_token_id,
            eos_token_ids=state.eos_token_ids,
            add_bos=state.adds_bos,
            bos_token=state.bos_token,
            eos_token=state.eos_token,
        )

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids, by their texts, of the tokens that no other tokens may stand for: the special ones, and all added ones like `<this>`.

        So llguidance sees it, for which such a token is no text.
        """
        added = sorted(self.backend.get_added_tokens_decoder().items())
        return {token.content: id for id, token in added if token.special or re.fullmatch(r"<.*>", token.content, re.DOTALL)}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises `InvalidRequest` for text that is not Unicode (lone surrogates). A long text leaves the GIL to other threads."""
        if isinstance(text, str) and len(text) > LONG_TEXT:
            return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        try:
            ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise _not_unicode(text) from None
        return self._with_bos(ids) if add_special_tokens else ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """As `encode`, for many texts at once; releases the GIL and uses all cores."""
        try:
            batch = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError:
            raise next((_not_unicode(text) for text in texts if not _is_unicode(text)), _not_unicode("")) from None
        return [self._with_bos(each.ids) if add_special_tokens else each.ids for each in batch]

    def surely_exceeds(self, text: str, limit: int) -> bool:
        """Whether a text has far more than `limit` tokens, judged by as much of its beginning as that takes; a short one never does."""
        end = limit * LONG_TOKEN
        while end < len(text):
            if len(self.encode(text[:end])) > 2 * limit:  # twice: where the beginning ends, tokens may differ from those of the whole
                return True
            end *= 2
        return False

    def encode_chat(self, text: str) -> list[int]:
        """Ids of a prompt that a chat template wrote, with exactly one BOS if the tokenizer uses one.

        A template that writes BOS gives what transformers' `apply_chat_template(tokenize=True)` gives. One that leaves BOS to the
        tokenizer gets it here; transformers would send none.
        """
        ids = self.encode(text, add_special_tokens=False)
        if self.adds_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the tokens. Bytes that are no UTF-8 give U+FFFD, one for each maximal part of a character."""
        if self.decoding == "whole":
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(index) for index in ids if index not in skipped)
        if self.strips_first_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_text(self, id: int) -> str:
        """The token's own text, whatever stands beside it; the part of a character that some tokens are shows as U+FFFD."""
        if self.decoding == "whole":
            return self.backend.decode([id], skip_special_tokens=False)
        return self.token_bytes(id).decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        """The bytes that the token adds to a text; none for an id that has no token (models pad their vocabulary)."""
        found = self._bytes.get(id)
        if found is None:
            found = self._bytes[id] = self._bytes_of(self._string(id))
        return found

    def _bytes_of(self, token: str) -> bytes:
        if self.decoding == "bytes":
            try:
                return bytes(map(BYTE_OF_CHARACTER.__getitem__, token))
            except KeyError:  # an added token is plain text
                return token.encode()
        if self.decoding == "pieces":
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                try:
                    return bytes([int(token[3:5], 16)])
                except ValueError:
                    pass
            return token.replace("▁", " ").encode()
        return token.encode()

    def _string(self, id: int | None) -> str:
        return "" if id is None else self.backend.id_to_token(id) or ""

    def _with_bos(self, ids: list[int]) -> list[int]:
        if self.adds_bos == self._backend_adds_bos or self.bos_token_id is None:
            return ids
        return [self.bos_token_id, *ids] if self.adds_bos else ids[1:]


def _decoding(backend: tokenizers.Tokenizer) -> tuple[Decoding, bool]:
    """How the backend's decoder works, and whether it drops the first space of a text."""
    if backend.decoder is None:
        return "whole", False
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return "bytes", False
    spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    rest = [step for step in steps if step["type"] not in ("ByteFallback", "Fuse")]
    if "ByteFallback" in kinds and rest in ([spaces], [spaces, strip]):
        return "pieces", strip in rest
    return "whole", False


def _configured_token(config: Any, name: str) -> str | None:
    """The text of a token that tokenizer_config.json names; "" where it says there is none, None where it says nothing."""
    if name not in config:
        return None
    token = config[name]
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _not_unicode(text: str) -> Exception:
    if _is_unicode(text):
        return TypeError(f"text must be a str, got {type(text).__name__}")
    return InvalidRequest("prompt", "has an unpaired surrogate (\\ud800 to \\udfff), so it is not valid Unicode text")
