"""`/v1/embeddings`: rows of transformers, pooled."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tokenizers
import torch
from transformers import LlamaForCausalLM

TEXTS = ["The quick brown fox", "Once upon a time there was a small engine", "jumps"]
Rows = Callable[[list[int], int], npt.NDArray[np.float32]]


@pytest.fixture(scope="module")
def encode(chat_model: Path) -> Callable[[str], list[int]]:
    tokenizer = tokenizers.Tokenizer.from_file(str(chat_model / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text).ids)


@pytest.fixture(scope="module")
def rows(chat_model: Path) -> Rows:
    """[prompt, hidden] of a layer, float32."""
    model = LlamaForCausalLM.from_pretrained(chat_model, dtype=torch.float32).eval()

    def of(ids: list[int], layer: int) -> npt.NDArray[np.float32]:
        with torch.no_grad():
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        return states[layer][0].numpy()

    return of


def post(server: Any, **body: Any) -> Any:
    answer = server.post("/v1/embeddings", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def unit(vector: Any) -> Any:
    return vector / np.linalg.norm(vector)


def test_an_answer_has_exactly_these_fields(server: Any, rows: Rows, encode: Callable[[str], list[int]]) -> None:
    ids = encode(TEXTS[0])
    got = post(server, input=TEXTS[0], model="default", user="somebody")
    vector = got["data"][0].pop("embedding")
    np.testing.assert_allclose(vector, unit(rows(ids, -1)[-1]), atol=1e-5)
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-6)
    name = server.http.get("/model_info").json()["served_model_name"]
    usage = {"prompt_tokens": len(ids), "total_tokens": len(ids)}
    assert got == {"object": "list", "data": [{"object": "embedding", "index": 0}], "model": name, "usage": usage}


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("layer", [0, 2, -1])
def test_any_layer_is_pooled(server: Any, rows: Rows, encode: Callable[[str], list[int]], pooling: str, layer: int) -> None:
    got = post(server, input=TEXTS, pooling=pooling, layer=layer, normalize=False)
    assert [each["index"] for each in got["data"]] == [0, 1, 2]
    for each, text in zip(got["data"], TEXTS, strict=True):
        states = rows(encode(text), layer)
        np.testing.assert_allclose(each["embedding"], states[-1] if pooling == "last" else states.mean(0), atol=1e-4)
    scaled = post(server, input=TEXTS, pooling=pooling, layer=layer)
    for each, plain in zip(scaled["data"], got["data"], strict=True):
        np.testing.assert_allclose(each["embedding"], unit(plain["embedding"]), atol=1e-6)


def test_inputs_may_be_token_ids(server: Any, encode: Callable[[str], list[int]]) -> None:
    ids = [encode(text) for text in TEXTS]
    want = [each["embedding"] for each in post(server, input=TEXTS)["data"]]
    np.testing.assert_allclose([each["embedding"] for each in post(server, input=ids)["data"]], want, atol=1e-5)
    np.testing.assert_allclose(post(server, input=ids[1])["data"][0]["embedding"], want[1], atol=1e-5)
    assert len(post(server, input=[ids[0]])["data"]) == 1


def test_base64_is_little_endian_float32(server: Any) -> None:
    for body in ({}, {"pooling": "mean", "dimensions": 5}):
        numbers = [each["embedding"] for each in post(server, input=TEXTS, **body)["data"]]
        packed = [each["embedding"] for each in post(server, input=TEXTS, encoding_format="base64", **body)["data"]]
        unpacked = [np.frombuffer(base64.b64decode(each), "<f4") for each in packed]
        np.testing.assert_allclose(unpacked, np.array(numbers, np.float32), atol=1e-6)


def test_fewer_dimensions_are_scaled_again(server: Any) -> None:
    whole = post(server, input=TEXTS[0], normalize=False)["data"][0]["embedding"]
    few = post(server, input=TEXTS[0], dimensions=7)["data"][0]["embedding"]
    np.testing.assert_allclose(few, unit(whole[:7]), atol=1e-6)
    few = post(server, input=TEXTS[0], dimensions=7, normalize=False)["data"][0]["embedding"]
    np.testing.assert_allclose(few, whole[:7], atol=1e-5)


def test_nothing_is_sampled(server: Any) -> None:
    before = server.stats()
    post(server, input=TEXTS)
    after = server.stats()
    assert after["generation_tokens"] == before["generation_tokens"]
    assert after["d2h"]["token"] == before["d2h"]["token"]
    copied = after["d2h"]["hidden"]["copied_bytes"] - before["d2h"]["hidden"]["copied_bytes"]
    assert copied == 3 * 64 * 4, "one row for each input"


def test_more_inputs_than_the_engine_runs_at_a_time(serve: Callable[..., Any]) -> None:
    server = serve("--max-running-requests", "2", "--max-queued-requests", "1")
    texts = [f"number {number}" for number in range(20)]
    for pooling in ("last", "mean"):
        got = post(server, input=texts, pooling=pooling)
        assert [each["index"] for each in got["data"]] == list(range(20))
        alone = post(server, input=texts[17], pooling=pooling)
        np.testing.assert_allclose(got["data"][17]["embedding"], alone["data"][0]["embedding"], atol=1e-5)


def test_the_operators_ceiling_holds(serve: Callable[..., Any]) -> None:
    server = serve("--hidden-states", "last")
    assert len(post(server, input="a")["data"]) == 1
    answer = server.post("/v1/embeddings", {"input": "a", "pooling": "mean"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "pooling"
    server = serve("--hidden-states", "off")
    answer = server.post("/v1/embeddings", {"input": "a"})
    assert answer.status_code == 400 and "--hidden-states off" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "is missing"),
        ({"input": ""}, "input", "empty prompt"),
        ({"input": []}, "input", "length >= 1"),
        ({"input": ["a", ""]}, "input.1", "empty prompt"),
        ({"input": [5, "a"]}, "input.1", "must be a token id"),
        ({"input": [[5], 5]}, "input.1", "must be a prompt of its own"),
        ({"input": [5, 320]}, "input", "got token id 320"),
        ({"input": ["a"] * 2049}, "input", "got 2049 prompts, must be between 1 and 2048"),
        ({"input": [5] * 513}, "input", "maximum context length is 512 tokens"),
        ({"input": "a", "dimensions": 65}, "dimensions", "at most 64"),
        ({"input": "a", "dimensions": 0}, "dimensions", "got 0"),
        ({"input": "a", "layer": 5}, "layer", "between -5 and 4"),
        ({"input": "a", "pooling": "max"}, "pooling", "got 'max'"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "got 'hex'"),
        ({"input": "a", "dimension": 3}, "dimension", "Did you mean dimensions?"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server: Any, body: dict[str, Any], param: str, words: str) -> None:
    answer = server.post("/v1/embeddings", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and words in error["message"]


def test_a_prompt_as_long_as_the_context_is_embedded(server: Any, rows: Rows) -> None:
    ids = [(7 * place) % 300 + 2 for place in range(512)]
    got = post(server, input=ids, normalize=False)
    np.testing.assert_allclose(got["data"][0]["embedding"], rows(ids, -1)[-1], atol=1e-4)
