"""A `tokenizers.Tokenizer` built from the `tokenizer.*` metadata of a GGUF file.

A GGUF has the vocabulary and the merges, but names its pre-tokenizer only; the table below says what each name means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from sidestream.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # values of tokenizer.ggml.token_type

# Ids that end or begin a text are special whatever their token_type says: converters have written them as normal tokens.
SPECIAL_ID_KEYS = ("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True)
class PreTokenizer:
    """How a byte-level vocabulary cuts text into words before merging, and what goes with that vocabulary."""

    pattern: str | None = None  # None: the one of GPT-2, which `ByteLevel` has built in
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a token is taken whole, as tiktoken does
    add_bos: bool = False  # where the file does not say


_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASED % ("", "") + r"|\p{N}" + _TAIL
_GPT4O = _CASED % ((r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",) * 2) + r"|\p{N}{1,3}" + _TAIL

_GPT2 = PreTokenizer()
_SMOLLM = PreTokenizer(single_digits=True)
_LLAMA_BPE = PreTokenizer(_LLAMA3, ignore_merges=True, add_bos=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), _SMOLLM),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA_BPE),
    **dict.fromkeys(("smaug-bpe", "dbrx"), PreTokenizer(_LLAMA3, ignore_merges=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), PreTokenizer(_QWEN2, nfc=True)),
    "stablelm2": PreTokenizer(_QWEN2),
    "qwen35": PreTokenizer(_QWEN35, nfc=True),
    "tekken": PreTokenizer(_TEKKEN, ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer(_GPT4O, ignore_merges=True)),
}


class GGUFTokenizer(NamedTuple):
    backend: Tokenizer
    add_bos: bool  # what the vocabulary does where the file does not say


def build(metadata: Mapping[str, Any]) -> GGUFTokenizer:
    """The tokenizer that the metadata describes. Raises `ModelError` for a kind or a pre-tokenizer that is not known."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"The GGUF has a tokenizer of kind {kind!r}, which is not supported.",
            hint="Known kinds: gpt2 (byte-level BPE), llama (SentencePiece). Pass --tokenizer with a tokenizer.json.",
        )
    if not metadata.get("tokenizer.ggml.tokens"):
        raise ModelError("The GGUF has no tokenizer.ggml.tokens.", hint="Pass --tokenizer with a tokenizer.json.")
    try:
        result = _byte_level(metadata) if kind == "gpt2" else _sentencepiece(metadata)
        _add_special_tokens(result.backend, metadata)
    except ModelError:
        raise
    except Exception as error:  # `tokenizers` raises bare Exception, e.g. for a merge whose halves are no tokens
        raise ModelError(f"The GGUF's tokenizer is broken: {error}", hint="Pass --tokenizer with a tokenizer.json.") from error
    return result


def _byte_level(metadata: Mapping[str, Any]) -> GGUFTokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelError(
            f"The GGUF names the pre-tokenizer {name!r}, which is not known; a guess would give wrong tokens.",
            hint=f"Known: {known}. Or pass --tokenizer with a tokenizer.json.",
        )
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = _merges(metadata)
    if merges is None:
        raise ModelError("The GGUF has no tokenizer.ggml.merges.", hint="Pass --tokenizer with a tokenizer.json.")
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return GGUFTokenizer(backend, pre.add_bos)


def _sentencepiece(metadata: Mapping[str, Any]) -> GGUFTokenizer:
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = _merges(metadata)
    if merges is None:
        merges = merges_from_scores(tokens, metadata["tokenizer.ggml.scores"], _kinds(metadata))
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first" if space_prefix else "never", split=False)
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return GGUFTokenizer(backend, add_bos=True)  # llama.cpp's default for this kind


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    merges: Sequence[str] | None = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        return None
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for pair in pairs:
        if len(pair) != 2:
            raise ModelError(f"The GGUF's tokenizer.ggml.merges has an entry that is not a pair: {' '.join(pair)!r}")
    return pairs  # type: ignore[return-value]


def _kinds(metadata: Mapping[str, Any]) -> Sequence[int]:
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds: Sequence[int] = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        raise ModelError(f"The GGUF has {len(tokens)} tokens but {len(kinds)} entries in tokenizer.ggml.token_type.")
    return kinds


def merges_from_scores(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """SentencePiece keeps no list of merges: every token of two known halves is one, and the better score goes first.

    The order is the one transformers derives when it converts a SentencePiece model: by score, then the longer left half; a tie
    among the halves of one token goes to the lower ids.
    """
    ids = {token: index for index, token in enumerate(tokens)}
    found: list[tuple[float, str, str]] = []
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        if kind in (UNKNOWN, CONTROL, BYTE):
            continue
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        halves = [(left, right) for left, right in cuts if left in ids and right in ids]
        halves.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found.extend((score, left, right) for left, right in halves)
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _add_special_tokens(backend: Tokenizer, metadata: Mapping[str, Any]) -> None:
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    ends = {metadata.get(f"tokenizer.ggml.{key}") for key in SPECIAL_ID_KEYS}
    special: list[str | AddedToken] = []
    plain: list[str | AddedToken] = []
    for index, kind in enumerate(_kinds(metadata)):
        if kind in (UNKNOWN, CONTROL) or index in ends:
            special.append(AddedToken(tokens[index], normalized=False, special=True))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(tokens[index], normalized=False, special=False))
    # They are in the vocabulary already, so they keep their ids.
    backend.add_special_tokens(special)
    backend.add_tokens(plain)
