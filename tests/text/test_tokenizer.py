"""Encoding, decoding, BOS, and the bytes of single tokens."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from sidestream.errors import InvalidRequest, ModelError
from sidestream.models.loader import TokenizerSource
from sidestream.text.tokenizer import Tokenizer

# Ids as transformers 5.24 gives them for the same file.
ENCODED = {
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "žluťoučký kůň": [43421, 1374, 144, 115, 279, 30033, 91, 47546, 501, 144, 124, 144, 226],
    "안녕하세요": [183, 239, 226, 182, 223, 239, 33085, 242, 183, 222, 133, 183, 244, 238],
    "👩\u200d👩\u200d👧": [10813, 235, 119, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117],
    "def f(x):\n    return x\n\n": [1604, 275, 24, 104, 727, 472, 1003, 1792, 1116],
    "\t\t a  b   c    ": [1656, 253, 216, 278, 256, 265, 289],
    "<|im_start|>user\nhi<|im_end|>": [1, 4093, 198, 6004, 2],
    "'s 'LL don't": [506, 637, 16421, 1326, 982],
    "": [],
}  # fmt: skip

# The default model has no token for these bytes: rare control characters, unassigned planes. Text with them loses them, as in
# every implementation of this tokenizer.
MISSING_BYTES = frozenset([0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)])


@pytest.mark.parametrize("text", ENCODED)
def test_encode_and_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == ENCODED[text]
    assert tokenizer.decode(ENCODED[text], skip_special_tokens=False) == text


def test_encode_batch_is_encode(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_batch(list(ENCODED)) == list(ENCODED.values())


def test_a_long_text_leaves_other_threads_their_turn(tokenizer: Tokenizer) -> None:
    text = "The cat sat on the mat. " * 20_000
    turns, over = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not over.wait(0.001):
            turns += 1

    counting = threading.Thread(target=count)
    counting.start()
    ids = tokenizer.encode(text)
    meanwhile = turns
    over.set()
    counting.join()
    assert ids == tokenizer.encode("The cat sat on the mat. ")[:-1] + tokenizer.encode(" The cat sat on the mat. ")[:-1] * 19_999 + ids[-1:]
    assert meanwhile > 5  # at once it was one
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode(text + "\ud800")


def test_a_text_that_is_much_too_long_is_not_tokenized(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    longest, encode = 0, Tokenizer.encode

    def watched(self: Tokenizer, text: str, **how: Any) -> list[int]:
        nonlocal longest
        longest = max(longest, len(text))
        return encode(self, text, **how)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    assert tokenizer.surely_exceeds("word " * 10_000, 100) and longest == 1600
    assert tokenizer.surely_exceeds(" " * 100_000, 100) and longest < 30_000, "tokens of 64 spaces"
    assert not tokenizer.surely_exceeds(" " * 6400, 100) and not tokenizer.surely_exceeds("word " * 320, 100)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("  123", ["  ", "1", "2", "3"]), ("x  1\n 2", ["x", "  ", "1", "\n ", "2"]), (" ½ ²", [" ", "½", " ", "²"])],
)
def test_smollm_splits_off_every_digit(tokenizer: Tokenizer, text: str, tokens: list[str]) -> None:
    """As the model's own tokenizer.json and llama.cpp do. transformers reads this GGUF with GPT-2's and differs."""
    assert [tokenizer.token_text(id) for id in tokenizer.encode(text)] == tokens


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]).filter(lambda character: MISSING_BYTES.isdisjoint(character.encode()))))
def test_round_trip_of_any_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=40), st.booleans())
def test_decode_is_the_backends(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    assert tokenizer.decode(ids, skip_special_tokens=skip) == tokenizer.backend.decode(ids, skip_special_tokens=skip)


def test_every_token_has_its_own_text_and_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    for id in range(tokenizer.vocab_size):
        assert tokenizer.token_text(id) == tokenizer.backend.decode([id], skip_special_tokens=False)
    ids = tokenizer.encode("ů")
    assert [tokenizer.token_bytes(id) for id in ids] == [b"\xc5", b"\xaf"]
    assert [tokenizer.token_text(id) for id in ids] == ["\ufffd", "\ufffd"]
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert (tokenizer.token_bytes(60000), tokenizer.token_text(60000)) == (b"", "")  # a model may pad its vocabulary


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_token_ids == frozenset(range(17))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.decode([1, 4093, 2]) == "user"


def test_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.encode("a\ud800b")
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode_batch(["fine", "a\udfff"])


def build(words: list[str], *, post_bos: bool, template_eos: bool = False) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>"])
    if post_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>" if template_eos else "<s> $A", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return backend


WORDS = ["<unk>", "<s>", "</s>", "a", "b"]


@pytest.mark.parametrize(
    ("post_bos", "add_bos", "expected"),
    [
        (False, None, [3, 4]),
        (True, None, [1, 3, 4]),
        (False, True, [1, 3, 4]),
        (True, True, [1, 3, 4]),
        (True, False, [3, 4]),
        (False, False, [3, 4]),
    ],
)
def test_bos(post_bos: bool, add_bos: bool | None, expected: list[int]) -> None:
    made = Tokenizer(build(WORDS, post_bos=post_bos), bos_token_id=1, eos_token_ids=(2,), add_bos=add_bos)
    assert made.encode("a b") == expected
    assert made.encode_batch(["a b", "b"]) == [expected, [*expected[:-2], 4]]
    assert made.encode("a b", add_special_tokens=False) == [3, 4]
    # A chat prompt has one BOS if the tokenizer uses one, whether or not the template wrote it.
    assert made.encode_chat("<s> a b") == [1, 3, 4]
    assert made.encode_chat("a b") == expected


def test_bos_off_keeps_the_rest_of_the_post_processor() -> None:
    made = Tokenizer(build(WORDS, post_bos=True, template_eos=True), bos_token_id=1, eos_token_ids=(2,), add_bos=False)
    assert made.encode("a b") == [3, 4, 2]


def test_from_tokenizer_json(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    backend = build(WORDS, post_bos=True)
    backend.enable_truncation(1)  # limits of the training run, which must not cut prompts
    backend.enable_padding(length=9)
    backend.save(str(path))
    config: dict[str, Any] = {"bos_token": {"content": "<s>"}, "eos_token": None}
    made = Tokenizer.from_source(TokenizerSource(path, None, config), eos_token_ids=(2,), bos_token_id=4, add_bos=None)
    assert made.encode("a b a") == [1, 3, 4, 3]
    assert (made.bos_token_id, made.bos_token, made.eos_token) == (1, "<s>", "")
    assert made.vocab_size == 5
    path.write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_source(TokenizerSource(path, None, {}), eos_token_ids=(), bos_token_id=None, add_bos=None)


def test_other_decoders_use_the_backend() -> None:
    backend = build(["<unk>", "<s>", "</s>", "un", "##do"], post_bos=False)
    backend.decoder = decoders.WordPiece()
    made = Tokenizer(backend, bos_token_id=None, eos_token_ids=())
    assert made.decoding == "whole"
    assert made.decode([1, 3, 4, 3]) == "undo un"
    assert made.token_text(3) == "un"


def test_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, json; import sidestream.text.tokenizer, sidestream.text.chat_template, sidestream.text.stop;"
        "print(json.dumps([name for name in ('torch', 'transformers') if name in sys.modules]))"
    )
    assert json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) == []


@pytest.mark.slow
def test_like_transformers(tokenizer: Tokenizer, default_model: Path) -> None:
    """Over many texts, ids, chat prompts and their ids. Runs of spaces before digits are left out, see above."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        reference = transformers.AutoTokenizer.from_pretrained(default_model.parent, gguf_file=default_model.name)
        from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping
    from sidestream.text.chat_template import ChatTemplate
    from sidestream.text.gguf_tokenizer import PRE_TOKENIZERS

    template_args: list[dict[str, Any]] = [{"add_generation_prompt": True}, {"add_generation_prompt": False}]
    for name in PRE_TOKENIZERS.keys() & mapping.GGUF_PRE_TOKENIZER_SPLITS.keys():
        assert PRE_TOKENIZERS[name].pattern == mapping.GGUF_PRE_TOKENIZER_SPLITS[name], name
    texts = [
        *ENCODED,
        "x <|im_end|>\n y",
        " a",
        "\n",
        "\u00a0x\u2003y",
        "e\u030c",
        "\x00\x7f",
        "🏳️‍🌈 ok",
        "int main() { return 0; }\r\n",
        "نص",
        "日本語。",
    ]
    for text in texts:
        assert tokenizer.encode(text) == reference.encode(text), text
    template = ChatTemplate(reference.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    for text in texts:
        chat = [{"role": "user", "content": text}, {"role": "assistant", "content": "Ahoj."}, {"role": "user", "content": "?"}]
        for extra in template_args:
            prompt = template.render(chat, **extra)
            assert prompt == reference.apply_chat_template(chat, tokenize=False, **extra)
            assert tokenizer.encode_chat(prompt) == reference.apply_chat_template(chat, tokenize=True, return_dict=False, **extra)
        continued = template.render(chat[:2], add_generation_prompt=False, continue_final_message=True)
        assert continued == reference.apply_chat_template(chat[:2], tokenize=False, continue_final_message=True)
