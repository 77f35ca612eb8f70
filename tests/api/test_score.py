"""`/v1/score`: probabilities of the next token, as transformers computes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from transformers import LlamaForCausalLM

QUERY, ITEMS, LABELS = "Is it so? ", ["The fox jumps", "The dog", "안녕"], [7, 300, 12]
Logprobs = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def encode(chat_model: Path) -> Callable[[str], list[int]]:
    tokenizer = tokenizers.Tokenizer.from_file(str(chat_model / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text).ids)


@pytest.fixture(scope="module")
def logprobs(chat_model: Path) -> Logprobs:
    """[vocabulary] of the token after `ids`."""
    model = LlamaForCausalLM.from_pretrained(chat_model, dtype=torch.float32).eval()

    def of(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)

    return of


def post(server: Any, **body: Any) -> Any:
    answer = server.post("/v1/score", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def near(got: Any, want: list[list[float]]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one == pytest.approx(other, rel=1e-3)


def test_scores_are_probabilities_of_the_next_token(server: Any, encode: Callable[[str], list[int]], logprobs: Logprobs) -> None:
    prompts = [encode(QUERY + item) for item in ITEMS]
    values = [logprobs(ids)[LABELS] for ids in prompts]
    got = post(server, query=QUERY, items=ITEMS, label_token_ids=LABELS)
    near(got["scores"], [each.exp().tolist() for each in values])
    assert got["object"] == "scoring" and got["token_logprobs"] is None
    tokens = sum(map(len, prompts))
    assert (got["usage"]["prompt_tokens"], got["usage"]["completion_tokens"], got["usage"]["total_tokens"]) == (tokens, 0, tokens)
    got = post(server, query=QUERY, items=ITEMS, label_token_ids=LABELS, apply_softmax=True, return_token_logprobs=True)
    near(got["scores"], [each.softmax(-1).tolist() for each in values])
    assert [sum(row) for row in got["scores"]] == pytest.approx([1.0] * 3)
    for row, each in zip(got["token_logprobs"], values, strict=True):
        assert row == pytest.approx(each.tolist(), abs=1e-4)
    got = post(server, query=QUERY, items=ITEMS, label_token_ids=LABELS, apply_softmax=True, temperature=0.5)
    near(got["scores"], [(each / 0.5).softmax(-1).tolist() for each in values])


def test_the_item_may_come_first(server: Any, encode: Callable[[str], list[int]], logprobs: Logprobs) -> None:
    got = post(server, query=QUERY, items=ITEMS, label_token_ids=LABELS, item_first=True)
    near(got["scores"], [logprobs(encode(item + QUERY))[LABELS].exp().tolist() for item in ITEMS])


def test_one_item_and_no_query(server: Any, encode: Callable[[str], list[int]], logprobs: Logprobs) -> None:
    want = [logprobs(encode(ITEMS[0]))[LABELS].exp().tolist()]
    near(post(server, items=ITEMS[0], label_token_ids=LABELS)["scores"], want)
    near(post(server, items=[encode(ITEMS[0])], label_token_ids=LABELS)["scores"], want)
    assert post(server, query=QUERY, items=[], label_token_ids=LABELS)["scores"] == []


def test_token_ids_and_labels_of_each_item(server: Any, logprobs: Logprobs) -> None:
    query, items, labels = [20, 21, 22], [[5, 6], [7], [8, 9, 10]], [[1], [2, 3], [300, 4, 5]]
    got = post(server, query=query, items=items, label_token_ids=labels)
    near(got["scores"], [logprobs(query + item)[ids].exp().tolist() for item, ids in zip(items, labels, strict=True)])
    near(
        post(server, query=query, items=items, label_token_ids=[9, 8], item_first=True)["scores"],
        [logprobs(item + query)[[9, 8]].exp().tolist() for item in items],
    )


def test_items_share_the_querys_cache(server: Any) -> None:
    server.post("/flush_cache", {})
    query = list(range(10, 74))
    post(server, query=query, items=[[5]], label_token_ids=[1])
    got = post(server, query=query, items=[[6], [7, 8]], label_token_ids=[1])
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 128


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"label_token_ids": [1]}, "items", "is missing"),
        ({"items": "a"}, "label_token_ids", "is missing"),
        ({"items": "a", "label_token_ids": []}, "label_token_ids", "length >= 1"),
        ({"items": "a", "label_token_ids": [[]]}, "label_token_ids.0", "length >= 1"),
        ({"items": "a", "label_token_ids": [-1]}, "label_token_ids.0", "got -1"),
        ({"items": "a", "label_token_ids": [320]}, "label_token_ids", "got token id 320"),
        ({"items": "a", "label_token_ids": [3, 3]}, "label_token_ids", "more than once"),
        ({"items": "a", "label_token_ids": [3, [4]]}, "label_token_ids.1", "must be a token id"),
        ({"items": ["a", "b"], "label_token_ids": [[3]]}, "label_token_ids", "got 1 lists for 2 items"),
        ({"query": "q", "items": [[1]], "label_token_ids": [3]}, "items.0", "must be a text like the query"),
        ({"query": [1], "items": "a", "label_token_ids": [3]}, "items.0", "must be token ids like the query"),
        ({"items": ["a", [1]], "label_token_ids": [3]}, "items.1", "must be a text"),
        ({"items": ["a", ""], "label_token_ids": [3]}, "items.1", "empty prompt"),
        ({"query": [5] * 512, "items": [[1]], "label_token_ids": [3]}, "items.0", "maximum context length is 512"),
        ({"items": "a", "label_token_ids": [3], "temperature": 0.5}, "temperature", "without apply_softmax"),
        ({"items": "a", "label_token_ids": [3], "apply_softmax": True, "temperature": 0}, "temperature", "got 0"),
        ({"text_1": "a", "text_2": "b"}, "text_1", "Use query."),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server: Any, body: dict[str, Any], param: str, words: str) -> None:
    answer = server.post("/v1/score", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and words in error["message"]


def test_a_number_for_a_token_that_cannot_come() -> None:
    from sidestream.api.score import _softmax

    assert _softmax([-math.inf, -math.inf], 1.0) == [0.0, 0.0]
    assert _softmax([-math.inf, -1.0], 1.0) == [0.0, 1.0]
    assert _softmax([-1.0, -1e30], 1e-3) == [1.0, 0.0]
