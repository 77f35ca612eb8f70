"""Text to token ids and back, in the shapes that clients of SGLang and of vLLM read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers

START, END = 0, 1  # ids of the tiny model's special tokens


@pytest.fixture(scope="module")
def tokenizer(chat_model: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(chat_model / "tokenizer.json"))


def post(server: Any, path: str, **body: Any) -> Any:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_a_text_becomes_token_ids(server: Any, tokenizer: tokenizers.Tokenizer, path: str) -> None:
    text = "The quick brown fox, příliš 😀"
    encoded = tokenizer.encode(text)
    answer = {"count": len(encoded.ids), "max_model_len": 512, "tokens": encoded.ids, "token_strs": None}
    assert post(server, path, prompt=text) == answer
    assert post(server, path, prompt=text, add_special_tokens=False, model=None) == answer
    assert post(server, path, prompt=text, return_token_strs=True) == {**answer, "token_strs": encoded.tokens}
    assert post(server, path, prompt="") == {"count": 0, "max_model_len": 512, "tokens": [], "token_strs": None}


def test_texts_become_lists(server: Any, tokenizer: tokenizers.Tokenizer) -> None:
    texts = ["one", "", "a longer text " * 1000]
    encoded = [tokenizer.encode(text) for text in texts]
    got = post(server, "/tokenize", prompt=texts, return_token_strs=True)
    assert got["tokens"] == [each.ids for each in encoded]
    assert got["count"] == [len(each.ids) for each in encoded]
    assert got["token_strs"] == [each.tokens for each in encoded]
    assert post(server, "/tokenize", prompt=["one"])["count"] == [len(encoded[0].ids)]
    assert post(server, "/tokenize", prompt=[])["tokens"] == []


def test_messages_are_written_by_the_chat_template(server: Any, tokenizer: tokenizers.Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Well"}]
    begun = "<|start|>user\nHello<|end|>\n<|start|>assistant\nWell"

    def tokens(**more: Any) -> Any:
        return post(server, "/tokenize", messages=messages, **more)["tokens"]

    assert tokens() == tokenizer.encode(f"{begun}<|end|>\n<|start|>assistant\n").ids
    assert tokens(add_generation_prompt=False, add_special_tokens=False, tools=[]) == tokenizer.encode(f"{begun}<|end|>\n").ids
    assert tokens(continue_final_message=True) == tokenizer.encode(begun).ids
    assert tokens(chat_template_kwargs={"enable_thinking": False}) == tokens()
    got = post(server, "/tokenize", messages=messages[:1], return_token_strs=True)
    assert got["count"] == len(got["tokens"]) and got["token_strs"][:2] == ["<|start|>", tokenizer.encode("user").tokens[0]]


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
def test_token_ids_become_text(server: Any, tokenizer: tokenizers.Tokenizer, path: str) -> None:
    text = "příliš 😀"
    ids = tokenizer.encode(text).ids
    assert post(server, path, tokens=ids) == {"text": text, "prompt": text}
    assert post(server, path, tokens=[ids, [], ids[:-1]])["text"] == [text, "", tokenizer.decode(ids[:-1])]
    assert post(server, path, tokens=[START, *ids, END])["prompt"] == text
    assert post(server, path, tokens=[START, *ids, END], skip_special_tokens=False)["prompt"] == f"<|start|>{text}<|end|>"
    assert post(server, path, tokens=[]) == {"text": "", "prompt": ""}


def test_the_tokenizer_is_described(server: Any, chat_model: Path) -> None:
    assert server.http.get("/tokenizer_info").json() == {
        "chat_template": (chat_model / "chat_template.jinja").read_text(),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|end|>",
        "pad_token": None,
        "bos_token_id": None,
        "eos_token_id": END,
        "eos_token_ids": [END],
        "add_bos_token": False,
        "vocab_size": 320,
        "model_max_length": 512,
    }


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/tokenize", {}, "prompt", "got neither of prompt and messages"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt", "got both"),
        ("/tokenize", {"prompt": 5}, "prompt", "got 5"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools.0.type", "is missing"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message", "must be left out with a prompt"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template", "A template is a program"),
        ("/tokenize", {"prompt": "a", "add_special_token": True}, "add_special_token", "Did you mean add_special_tokens?"),
        ("/tokenize", {"messages": []}, "messages", "at least one message"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages.0.content", "is missing"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}, "add_special_tokens", "left out"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tools": []}},
            "chat_template_kwargs",
            "got the key 'tools'",
        ),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "cannot go together",
        ),
        ("/detokenize", {}, "tokens", "is missing"),
        ("/detokenize", {"tokens": "a"}, "tokens", "got 'a'"),
        ("/detokenize", {"tokens": [5, 320]}, "tokens.1", "got token id 320, must be between 0 and 319"),
        ("/detokenize", {"tokens": [[5], [-1]]}, "tokens.1.0", "got token id -1"),
        ("/detokenize", {"tokens": [5, [5]]}, "tokens.1", "must be a token id"),
        ("/detokenize", {"tokens": [[5], 5]}, "tokens.1", "must be a list of token ids"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server: Any, path: str, body: dict[str, Any], param: str, words: str) -> None:
    answer = server.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and words in error["message"]
    assert server.post(path, {"model": "another", "prompt" if path == "/tokenize" else "tokens": []}).status_code == 404
