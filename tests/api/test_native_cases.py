"""Faults that users reported on other engines, replayed over HTTP: the cases of shared/cases/README.md by their numbers."""

from __future__ import annotations

import base64
import json
import random
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from sidestream import Engine, Output, SamplingParams

ROWS = {"return_hidden_states": True, "hidden_states_format": "base64"}
LISTS = ("input_token_logprobs", "output_token_logprobs", "input_top_logprobs", "output_top_logprobs")


def ids(count: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(2, 320) for _ in range(count)]


def greedy(count: int, **more: Any) -> dict[str, Any]:
    return {"max_new_tokens": count, "temperature": 0.0, **more}


def ask(server: Any, prompt: Any, sampling: Any, **body: Any) -> Any:
    answer = server.post("/generate", {"input_ids": prompt, "sampling_params": sampling, **body})
    assert answer.status_code == 200, answer.text
    return json.loads(answer.content, parse_constant=pytest.fail)


@pytest.fixture
def solo(chat_model: Path) -> Callable[..., Output]:
    """Alone on a fresh engine with an empty cache."""

    def alone(prompt: Sequence[int], sampling: dict[str, Any], model: Path | None = None, **outputs: Any) -> Output:
        with Engine(str(model or chat_model), dtype="bfloat16", disable_radix_cache=True, kv_tokens=4096, log_level="warning") as engine:
            output = engine.generate(prompt, SamplingParams(**sampling), **outputs)
        assert isinstance(output, Output)
        return output

    return alone


def assert_rows(answer: Any, want: Output) -> None:
    """Byte for byte."""
    states = answer["meta_info"]["hidden_states"]
    assert want.hidden_states is not None
    assert states["positions"] == list(want.hidden_states.positions)
    assert states["shape"] == list(want.hidden_states.shape)
    assert base64.b64decode(states["data"]) == want.hidden_states.raw.tobytes()


def test_case_01_hidden_states_of_a_batch_of_different_lengths(exact_server: Any, solo: Callable[..., Output]) -> None:
    prompts = [ids(length, length) for length in (3, 17, 40, 9)]
    want = [solo(prompt, greedy(1), return_hidden_states=True) for prompt in prompts]
    for _ in range(10):
        for prompt, answer, alone in zip(prompts, ask(exact_server, prompts, greedy(1), **ROWS), want, strict=True):
            assert answer["meta_info"]["hidden_states"]["shape"] == [len(prompt), 1, 64]
            assert_rows(answer, alone)
    for prompt, answer in zip(prompts, ask(exact_server, prompts, greedy(1), return_hidden_states=True), strict=True):
        (rows,) = answer["meta_info"]["hidden_states"]
        assert [len(row) for row in rows] == [64] * len(prompt), "as JSON"


def test_case_02_chunked_prompts_return_every_row(
    serve: Callable[..., Any], chat_model: Path, solo: Callable[..., Output], tmp_path: Path
) -> None:
    model = shutil.copytree(chat_model, tmp_path / "long")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    server = serve(
        *("--dtype", "bfloat16", "--chunked-prefill-size", "512", "--disable-radix-cache", "--kv-tokens", str(16 * 1504)), model=model
    )
    prompts = [ids(1500, seed) for seed in range(16)]
    want = [solo(prompt, greedy(1), model, return_hidden_states=True) for prompt in prompts[:2]]
    answers = ask(server, prompts, greedy(1), **ROWS)
    for answer in answers:
        states = answer["meta_info"]["hidden_states"]
        assert states["positions"] == list(range(1500)) and states["shape"] == [1500, 1, 64]
    assert len({answer["meta_info"]["hidden_states"]["data"] for answer in answers}) == 16
    for answer, alone in zip(answers, want, strict=False):
        assert_rows(answer, alone)


def test_case_03_a_prefix_in_the_cache_takes_no_rows_away(exact_server: Any, solo: Callable[..., Output]) -> None:
    prompt = ids(64)
    longer = prompt + ids(8, 1)
    want = [solo(each, greedy(2), return_hidden_states=True) for each in (prompt, longer)]
    exact_server.post("/flush_cache", {})
    for each, alone in ((prompt, want[0]), (prompt, want[0]), (longer, want[1])):
        answer = ask(exact_server, each, greedy(2), **ROWS)
        assert len(answer["meta_info"]["hidden_states"]["positions"]) == len(each) + 1
        assert answer["meta_info"]["cached_tokens"] == 0, "the cached prefix is used only up to the first row wanted"
        assert_rows(answer, alone)
    tail = ask(exact_server, longer, greedy(2), **ROWS, hidden_states_start=40)
    assert tail["meta_info"]["cached_tokens"] == 32
    assert want[1].hidden_states is not None
    assert base64.b64decode(tail["meta_info"]["hidden_states"]["data"]) == want[1].hidden_states.raw.tobytes()[40 * 128 :]


def test_case_05_prompt_logprobs_are_complete_with_a_warm_cache(exact_server: Any, solo: Callable[..., Output]) -> None:
    prompt = ids(33)
    outputs = {"logprob_start_len": 0, "top_logprobs_num": 2}
    want = solo(prompt, greedy(4), **outputs).logprobs
    assert want is not None
    ask(exact_server, prompt, greedy(4))  # everything is cached now
    first, second = (ask(exact_server, prompt, greedy(4), **outputs)["meta_info"] for _ in range(2))
    for name in LISTS:
        assert first[name] == second[name]
    assert len(first["input_token_logprobs"]) == len(first["input_top_logprobs"]) == 33
    assert first["input_token_logprobs"][0] == [None, prompt[0], None] and first["input_top_logprobs"][0] is None
    assert [value for value, _, _ in first["input_token_logprobs"]] == list(want.input)
    assert [value for value, _, _ in first["output_token_logprobs"]] == list(want.output)


BAD: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("token_ids_logprob.0", {}, {"token_ids_logprob": [-1]}, "-1"),
    ("token_ids_logprob", {}, {"token_ids_logprob": [10**7]}, "10000000"),
    ("sampling_params.logit_bias", {"logit_bias": {"999999": 5}}, {}, "999999"),
    ("sampling_params.logit_bias", {"logit_bias": {"AI": 1}}, {}, "AI"),
    ("sampling_params.stop_token_ids", {"stop_token_ids": [10**7]}, {}, "10000000"),
]


def test_case_08_bad_ids_are_refused_and_nobody_notices(server: Any) -> None:
    prompt, neighbour = ids(8), ids(9, 1)
    sampling = greedy(60, ignore_eos=True)
    server.post("/flush_cache", {})
    want = ask(server, neighbour, sampling, return_logprob=True)
    beside: list[Any] = []
    thread = threading.Thread(target=lambda: beside.append(ask(server, neighbour, sampling, return_logprob=True)))
    thread.start()
    for param, wrong, body, value in BAD:
        answer = server.post("/generate", {"input_ids": prompt, "sampling_params": greedy(1, **wrong), **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param) and value in error["message"]
    for bad in ([5, 320], [5, -1]):
        answer = server.post("/generate", {"input_ids": bad, "sampling_params": greedy(1)})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_ids")
    assert len(ask(server, prompt, greedy(3, ignore_eos=True))["output_ids"]) == 3
    thread.join()
    assert beside[0]["output_ids"] == want["output_ids"]
    got, right = ([value for value, _, _ in each["meta_info"]["output_token_logprobs"]] for each in (beside[0], want))
    assert got == pytest.approx(right, abs=1e-4)


def penalised(model: LlamaForCausalLM, prompt: list[int], count: int, repetition: float, frequency: float) -> list[int]:
    """Greedy decoding with the penalties as documented: repetition on prompt and output, frequency on output."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        for token in set(tokens):
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        output = tokens[len(prompt) :]
        for token in set(output):
            logits[token] -= frequency * output.count(token)
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("schedule", ["--overlap-schedule", "--disable-overlap-schedule"])
def test_case_12_a_penalty_is_applied_exactly_once(serve: Callable[..., Any], chat_model: Path, schedule: str) -> None:
    server = serve(schedule)
    model = LlamaForCausalLM.from_pretrained(chat_model, dtype=torch.float32).eval()
    prompt, neighbours = [11, 12] * 8, [ids(9 + at, at) for at in range(7)]
    plain = [each["output_ids"] for each in ask(server, neighbours, greedy(16, ignore_eos=True))]
    unpenalised = ask(server, prompt, greedy(16, ignore_eos=True))["output_ids"]
    for repetition, frequency in ((1.3, 0.0), (1.0, 1.0)):
        want = penalised(model, prompt, 16, repetition, frequency)
        assert want != unpenalised
        sampling = greedy(16, ignore_eos=True, repetition_penalty=repetition, frequency_penalty=frequency)
        assert ask(server, prompt, sampling)["output_ids"] == want
        beside = ask(server, [prompt, *neighbours], [sampling] + [greedy(16, ignore_eos=True)] * 7)
        assert beside[0]["output_ids"] == want
        assert [each["output_ids"] for each in beside[1:]] == plain


def test_case_15_cold_and_warm_are_the_same(exact_server: Any) -> None:
    prompt = ids(50, 3)
    outputs = {"logprob_start_len": 0, "top_logprobs_num": 3}
    answers = []
    for flush in (True, True, False):
        if flush:
            exact_server.post("/flush_cache", {})
        answers.append(ask(exact_server, prompt, greedy(20, ignore_eos=True), return_logprob=True))
        answers.append(ask(exact_server, prompt, greedy(20, ignore_eos=True), **outputs))
    assert [answer["meta_info"]["cached_tokens"] for answer in answers[::2]] == [0, 0, 48]
    for first, *others in (answers[::2], answers[1::2]):
        for other in others:
            assert other["output_ids"] == first["output_ids"] and other["text"] == first["text"]
            for name in LISTS:
                assert other["meta_info"].get(name) == first["meta_info"].get(name), "bit for bit"


def test_case_17_a_client_that_leaves_frees_its_pages(serve: Callable[..., Any]) -> None:
    server = serve()
    prompt, sampling = ids(40), greedy(460, ignore_eos=True)
    want = ask(server, ids(5, 9), greedy(200, ignore_eos=True))["output_ids"]
    neighbour: list[Any] = []
    thread = threading.Thread(target=lambda: neighbour.append(ask(server, ids(5, 9), greedy(200, ignore_eos=True))))
    thread.start()
    body = json.dumps({"input_ids": prompt, "sampling_params": sampling}).encode()
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname, place.port)) as client:
        client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        _until(lambda: server.stats()["running"] == 2)
    _until(lambda: server.stats()["running"] < 2)
    stats = server.stats()
    assert stats["aborted"] == 1
    thread.join()
    assert neighbour[0]["output_ids"] == want and neighbour[0]["meta_info"]["finish_reason"]["type"] == "length"
    stats = server.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["kv_tokens_free"] + stats["kv_tokens_cached"] == stats["kv_tokens_total"]


def _until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_case_18_nothing_of_the_old_weights_is_used(serve: Callable[..., Any], chat_model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(chat_model, tmp_path / "other")
    torch.manual_seed(3)
    tensors = load_file(other / "model.safetensors")
    save_file({name: each + 0.05 * torch.randn_like(each) for name, each in tensors.items()}, other / "model.safetensors", {"format": "pt"})
    prompt = ids(64, 5)
    outputs = {"logprob_start_len": 0}
    server, fresh = serve(), serve(model=other)
    old = ask(server, prompt, greedy(8, ignore_eos=True), **outputs)
    ask(server, prompt, greedy(8, ignore_eos=True))  # cached
    assert server.post("/update_weights_from_disk", {"model_path": str(other)}).json()["success"] is True
    got = ask(server, prompt, greedy(8, ignore_eos=True), **outputs)
    want = ask(fresh, prompt, greedy(8, ignore_eos=True), **outputs)
    assert got["meta_info"]["cached_tokens"] == 0
    for name in ("input_token_logprobs", "output_token_logprobs"):
        assert got["meta_info"][name] == want["meta_info"][name] != old["meta_info"][name]
    assert got["output_ids"] == want["output_ids"]


def _peak(server: Any) -> int:
    """Bytes that the engine's process had at most."""
    for line in Path(f"/proc/{server.engine_pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


@pytest.fixture
def workload() -> Iterator[Callable[[Any], None]]:
    with ThreadPoolExecutor(4) as pool:

        def run(server: Any) -> None:
            list(pool.map(lambda seed: ask(server, ids(100, seed), greedy(30, ignore_eos=True), return_logprob=True), range(12)))

        yield run


def test_case_19_what_nobody_asks_for_costs_nothing(serve: Callable[..., Any], workload: Callable[[Any], None]) -> None:
    peaks = []
    for ceiling in ("full", "off"):
        server = serve("--hidden-states", ceiling, "--enable-return-hidden-states")
        workload(server)
        hidden = server.stats()["d2h"]["hidden"]
        assert hidden["copied_bytes"] == hidden["discarded_bytes"] == 0 and hidden["skipped_bytes"] > 0
        metrics = server.http.get("/metrics").text
        (line,) = [line for line in metrics.splitlines() if line.startswith("sidestream:d2h_bytes_total") and 'output="hidden"' in line]
        assert float(line.split()[-1]) == 0.0
        peaks.append(_peak(server))
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)
