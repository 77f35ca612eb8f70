"""Faults that users reported on other engines, replayed over HTTP: the cases of shared/cases/README.md, by their numbers."""

from __future__ import annotations

import base64
import json
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, LlamaForCausalLM

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
ALPHABET = "ABCDEFGHIJKLM"
CHARACTERS = "xž각😀y"  # no two of its bytes are the same


def ids(count: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(2, 320) for _ in range(count)]


def ask(server: Any, path: str, body: dict[str, Any]) -> Any:
    """The answer, which must be strictly valid JSON."""
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return json.loads(answer.text, parse_constant=pytest.fail)


def chat(content: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **more}


@pytest.fixture(scope="module")
def scripted(chat_model: Path, tmp_path_factory: pytest.TempPathFactory, made_server: Callable[..., Any]) -> Iterator[Any]:
    """A server whose model knows one successor of each byte: of A it is B, and so on up to M, with which the text ends."""
    directory = shutil.copytree(chat_model, tmp_path_factory.mktemp("scripted") / "scripted")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:  # what comes out is what went in
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        embeddings = torch.nn.functional.normalize(model.model.embed_tokens.weight, dim=1)
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.zero_()
        for text in (ALPHABET, CHARACTERS):
            characters = "".join(piece for piece, _ in ByteLevel(add_prefix_space=False).pre_tokenize_str(text))
            chain = [tokenizer.token_to_id(name) for name in (*characters, "<|end|>")]  # a token for each byte
            for token, after in pairwise(chain):
                model.lm_head.weight[after] += 4 * embeddings[token]
    model.save_pretrained(directory)
    yield from made_server(directory)


@pytest.fixture(scope="module")
def with_bos(chat_model: Path, tmp_path_factory: pytest.TempPathFactory, made_server: Callable[..., Any]) -> Iterator[Any]:
    """A server whose tokenizer puts BOS first, and whose chat template writes it too."""
    directory = shutil.copytree(chat_model, tmp_path_factory.mktemp("bos") / "with-bos")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 0)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|start|>", "eos_token": "<|end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    template = "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"bos_token_id": 0}))
    yield from made_server(directory)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_case_04_no_row_of_a_token_past_the_stop(scripted: Any, path: str) -> None:
    prompt = chat("say A", add_generation_prompt=False, continue_final_message=True) if path == CHAT else {"prompt": "say A"}
    body = {**prompt, "temperature": 0, "return_hidden_states": True, "hidden_states_format": "base64", "max_tokens": 40}
    answer = ask(scripted, path, body | {"stop": "IJ"})
    (choice,) = answer["choices"]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    usage, states = answer["usage"], choice["hidden_states"]
    assert (text, choice["finish_reason"], choice["matched_stop"], choice["stop_reason"]) == ("BCDEFGH", "stop", "IJ", "IJ")
    assert usage["completion_tokens"] == 9
    assert states["positions"] == list(range(usage["prompt_tokens"] + 8))
    free = base64.b64decode(ask(scripted, path, body)["choices"][0]["hidden_states"]["data"])
    assert free.startswith(base64.b64decode(states["data"]))  # the rows of the same tokens without a stop
    for count in (1, 2, 3):
        answer = ask(scripted, path, body | {"max_tokens": count})
        states = answer["choices"][0]["hidden_states"]
        assert states["positions"] == list(range(answer["usage"]["prompt_tokens"] + count - 1))
        assert free.startswith(base64.b64decode(states["data"]))
        last = ask(scripted, path, body | {"max_tokens": count, "return_hidden_states": "last"})["choices"][0]["hidden_states"]
        assert last["positions"] == states["positions"][-1:] and len(base64.b64decode(last["data"])) == 64 * 4


def test_case_05_prompt_logprobs_are_complete_with_a_warm_cache(server: Any) -> None:
    prompt = ids(33)
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "echo": True, "logprobs": 2}
    ask(server, COMPLETIONS, {"prompt": prompt, "max_tokens": 4, "ignore_eos": True})  # everything is cached now
    first, second = (ask(server, COMPLETIONS, body)["choices"][0]["logprobs"] for _ in range(2))
    assert first == second
    assert first["token_ids"][:33] == prompt and len(first["token_logprobs"]) == 37
    assert first["token_logprobs"][0] is None and all(isinstance(value, float) for value in first["token_logprobs"][1:])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_case_06_every_answer_is_strictly_valid_json(server: Any, path: str, mode: str) -> None:
    prompt = chat("Hello") if path == CHAT else {"prompt": "Hello"}
    asked = {
        "cold": {"temperature": 0.01, "seed": 1},
        "top_k": {"top_k": 1, "seed": 1},
        "allowed": {"allowed_token_ids": [8], "temperature": 0},
        "bias": {"logit_bias": dict.fromkeys(map(str, range(300)), -100), "seed": 3},
    }
    for name, sampling in asked.items():
        body = {**prompt, **sampling, "max_tokens": 6, "ignore_eos": True, "top_logprobs_num": 5, "logprobs_mode": mode}
        body |= {"token_ids_logprob": [9, 8]}
        logprobs = ask(server, path, body)["choices"][0]["logprobs"]
        for chunk in server.stream(path, body):  # those are parsed as strictly
            assert chunk["choices"]
        if path == COMPLETIONS:
            rows = list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))
        else:
            rows = [
                (each["token"], each["logprob"], {each["token"]: each["logprob"] for each in each["top_logprobs"]})
                for each in logprobs["content"]
            ]
        assert len(rows) == 6
        for token, value, top in rows:
            assert value > -9999.0, f"{name}: the sampled token cannot be impossible"
            if path == COMPLETIONS or name in ("cold", "top_k") or (name, mode) == ("allowed", "processed"):
                assert top[token] == value
        if mode == "processed" and name == "allowed":
            assert [sorted(top.values()) for _, _, top in rows] == [[-9999.0] * 4 + [0.0]] * 6


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("logprobs", [0, 1, 5])
def test_case_07_an_echo_has_an_entry_for_each_token(server: Any, logprobs: int, count: int, stream: bool) -> None:
    prompt = ids(9, 7)
    body = {"prompt": prompt, "echo": True, "logprobs": logprobs, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    body["skip_special_tokens"] = False
    if stream:
        choices = [choice for event in server.stream(COMPLETIONS, body) for choice in event["choices"]]
        text = "".join(choice["text"] for choice in choices)
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        found = {name: [entry for choice in choices for entry in choice["logprobs"][name]] for name in names}
    else:
        (choice,) = ask(server, COMPLETIONS, body)["choices"]
        text, found = choice["text"], choice["logprobs"]
    assert {len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {9 + count}
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    for token, value, top in zip(found["tokens"][1:], found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True):
        assert top[token] == value  # the very same number, as lm-eval compares it
        assert logprobs <= len(top) <= logprobs + 1
    offsets = found["text_offset"]
    assert offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] <= len(text)
    assert offsets[8] < offsets[-1] or count < 2  # past the prompt they go on, and do not begin again


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_case_08_bad_ids_are_refused_and_nobody_notices(server: Any, path: str) -> None:
    prompt = chat("Hello") if path == CHAT else {"prompt": "Hello"}
    neighbour = {"prompt": ids(9, 1), "max_tokens": 60, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    want = ask(server, COMPLETIONS, neighbour)["choices"]
    beside: list[Any] = []
    thread = threading.Thread(target=lambda: beside.append(ask(server, COMPLETIONS, neighbour)["choices"]))
    thread.start()
    bad = [
        ({"token_ids_logprob": [-1]}, "token_ids_logprob.0", "-1"),
        ({"token_ids_logprob": [10**7]}, "token_ids_logprob", "10000000"),
        ({"logit_bias": {"999999": 5}}, "logit_bias", "999999"),
        ({"logit_bias": {"AI": 1}}, "logit_bias", "AI"),
        ({"stop_token_ids": [10**7]}, "stop_token_ids", "10000000"),
        ({"bad_token_ids": [10**30]}, "bad_token_ids", "1" + "0" * 30),
    ]
    for fields, param, value in bad:
        for stream in (False, True):  # a stream that cannot begin is a status too
            answer = server.post(path, {**prompt, **fields, "stream": stream})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param) and value in error["message"]
    assert ask(server, path, {**prompt, "max_tokens": 3, "ignore_eos": True})["usage"]["completion_tokens"] == 3
    thread.join(timeout=60)
    assert beside == [want]


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("DEFGHIJ", ""),  # it is hit
        ("DEFGHIX", "DEFGHIJKLM"),  # a false alarm, which is flushed
        ("KLMNO", "DEFGHIJKLM"),  # the text ends within it
        (["XYZ", "GHIJK", "HI"], "DEFG"),  # the one that is complete first
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_case_09_a_stop_string_is_never_shown_in_part(scripted: Any, path: str, stop: Any, text: str) -> None:
    prompt = "Here is the English alphabet: ABC"
    more = {"temperature": 0, "stop": stop, "max_tokens": 60, "top_logprobs_num": 1, "return_token_ids": True}
    body = chat(prompt, continue_final_message=True, **more) if path == CHAT else {"prompt": prompt, **more}
    (choice,) = ask(scripted, path, body)["choices"]
    assert (choice["message"]["content"] if path == CHAT else choice["text"]) == text
    shown, tokens, entries, stops = "", 0, 0, [stop] if isinstance(stop, str) else stop
    for event in scripted.stream(path, body):
        (part,) = event["choices"]
        shown += part["delta"].get("content", "") if path == CHAT else part["text"]
        if part["finish_reason"] is None:
            assert not any(shown.endswith(each[:length]) for each in stops for length in range(1, len(each))), shown
        tokens += len(part.get("token_ids", []))
        entries += len((part["logprobs"] or {}).get("content" if path == CHAT else "tokens", []))
    assert shown == text
    assert tokens == entries == len(choice["token_ids"])  # those of the held text came with the part that released it


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_case_10_no_part_of_a_character_is_ever_shown(scripted: Any, path: str) -> None:
    more = {"temperature": 0, "max_tokens": 60, "logprobs": True if path == CHAT else 0}
    body = chat("x", continue_final_message=True, **more) if path == CHAT else {"prompt": "x", **more}

    def parts(body: dict[str, Any]) -> list[Any]:
        return [choice for event in scripted.stream(path, body) for choice in event["choices"]]

    def text(choice: Any) -> str:
        return str(choice["delta"].get("content", "") if path == CHAT else choice["text"])

    streamed = parts(body)
    assert [text(part) for part in streamed if text(part)] == ["ž", "각", "😀", "y"]
    (choice,) = ask(scripted, path, body)["choices"]
    assert (choice["message"]["content"] if path == CHAT else choice["text"]) == "ž각😀y"
    written = [
        entry["token"] if path == CHAT else entry
        for part in streamed
        if part["logprobs"]
        for entry in part["logprobs"]["content" if path == CHAT else "tokens"]
    ]
    assert written[:2] == [r"bytes:\xc5", r"bytes:\xbe"] and written[-2:] == ["y", "<|end|>"]
    # Only what ends inside a character is shown as such.
    cut = [text(part) for part in parts(body | {"max_tokens": 7})]
    assert [each for each in cut if each] == ["ž", "각", "\ufffd"]


def test_case_11_a_seed_repeats_itself_and_another_differs(server: Any) -> None:
    def text(path: str, seed: int | None, stream: bool = False) -> str:
        sampling = {"temperature": 1, "ignore_eos": True, "seed": seed}
        if path == GENERATE:
            params = {name: value for name, value in sampling.items() if value is not None}
            return str(ask(server, path, {"text": "Hello", "sampling_params": params | {"max_new_tokens": 20}})["text"])
        body = {**(chat("Hello") if path == CHAT else {"prompt": "Hello"}), **sampling, "max_tokens": 20}
        if not stream:
            (choice,) = ask(server, path, body)["choices"]
            return str(choice["message"]["content"] if path == CHAT else choice["text"])
        choices = [choice for event in server.stream(path, body) for choice in event["choices"]]
        return "".join(choice["delta"].get("content", "") if path == CHAT else choice["text"] for choice in choices)

    for path in (CHAT, COMPLETIONS, GENERATE):
        assert text(path, 1) == text(path, 1) != text(path, 2)
        assert text(path, None) != text(path, None)
    for path in (CHAT, COMPLETIONS):
        assert text(path, 1, stream=True) == text(path, 1)
    assert text(COMPLETIONS, 1) == text(GENERATE, 1)  # the same request, whatever it is written in


def test_case_13_the_context_is_a_limit_and_never_a_hang(server: Any) -> None:
    limit = 512
    body = {"temperature": 0, "ignore_eos": True}
    almost = ask(server, COMPLETIONS, body | {"prompt": ids(limit - 1), "max_tokens": 5})
    assert (almost["usage"]["completion_tokens"], almost["choices"][0]["finish_reason"]) == (1, "length")
    for length in (limit, limit + 1):
        for prompt in (ids(length), [ids(3), ids(length)]):
            for stream in (False, True):
                answer = server.post(COMPLETIONS, body | {"prompt": prompt, "stream": stream})
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
                assert error["param"] == ("prompt" if len(prompt) > 2 else "prompt.1")
                assert error["message"].startswith(f"This model's maximum context length is {limit} tokens. However, {length} tokens")
    assert ask(server, COMPLETIONS, body | {"prompt": ids(limit), "max_tokens": 0})["choices"][0]["finish_reason"] == "length"
    most = ask(server, COMPLETIONS, body | {"prompt": ids(limit * 9 // 10), "max_tokens": limit // 2})
    assert (most["usage"]["total_tokens"], most["choices"][0]["finish_reason"]) == (limit, "length")
    for path, prompt in ((CHAT, chat("Hello")), (COMPLETIONS, {"prompt": "Hello"})):
        for count in (0, 1, 10**30):
            answer = ask(server, path, {**body, **prompt, "max_tokens": count})
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == min(count, limit - answer["usage"]["prompt_tokens"])
        answer = server.post(path, {**body, **prompt, "max_tokens": -1})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


def test_case_16_there_is_one_bos_on_every_route(with_bos: Any) -> None:
    model = with_bos.http.get("/v1/models").json()["data"][0]["root"]
    reference = AutoTokenizer.from_pretrained(model)
    messages = [{"role": "user", "content": "Hello there"}]
    want = reference.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)["input_ids"]
    answer = ask(with_bos, CHAT, {"messages": messages, "max_tokens": 1, "return_token_ids": True})
    assert answer["prompt_token_ids"] == want and answer["usage"]["prompt_tokens"] == len(want)
    assert want.count(0) == 1 and want[0] == 0
    plain = reference("Hello there")["input_ids"]
    answer = ask(with_bos, COMPLETIONS, {"prompt": "Hello there", "max_tokens": 1, "return_token_ids": True, "echo": True})
    assert answer["choices"][0]["prompt_token_ids"] == plain == [0, *plain[1:]] and plain.count(0) == 1
    assert answer["choices"][0]["text"].startswith("Hello there")
    assert ask(with_bos, GENERATE, {"text": "Hello there"})["meta_info"]["prompt_tokens"] == len(plain)
    # Ids are taken as they are.
    assert ask(with_bos, COMPLETIONS, {"prompt": plain[1:], "max_tokens": 1})["usage"]["prompt_tokens"] == len(plain) - 1


def test_case_20_each_token_string_is_that_tokens_own(server: Any, engine: Any) -> None:
    text = "Once upon a time there was"
    body = {"prompt": text, "echo": True, "logprobs": 1, "max_tokens": 0}
    (choice,) = ask(server, COMPLETIONS, body)["choices"]
    assert choice["logprobs"]["tokens"] == [engine.tokenizer.token_text(token) for token in engine.tokenizer.encode(text)]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == text
