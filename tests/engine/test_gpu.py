"""The contract on a CUDA device: the answers of the CPU, and no hidden synchronisation in a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sidestream import Engine, Output, SamplingParams

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 6, 7, 8] * 3, [5, 6, 7, 8] * 3 + [9], [11] * 40, [3, 4]]
GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)


def _answers(model: Path, device: str, *, overlap: bool) -> list[Output]:
    with Engine(str(model), device=device, dtype="float32", overlap=overlap, kv_tokens=4096, chunked_prefill_size=16) as engine:
        answers = engine.generate(
            PROMPTS,
            GREEDY,
            logprob_start_len=0,
            top_logprobs_num=3,
            return_hidden_states=[True, "last", True, False],
            hidden_states_layers=[0, -1],
        )
        assert isinstance(answers, list)
        engine.check()
        return answers


@pytest.fixture
def forbid_synchronisation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside the step's device work any implicit wait for the device is an error."""
    from sidestream.engine.runner import Runner

    run = Runner._run_batch

    def guarded(self: Runner, *args: object) -> object:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(self, *args)  # type: ignore[arg-type]
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Runner, "_run_batch", guarded)
    yield


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.usefixtures("forbid_synchronisation")
def test_cuda_gives_the_answers_of_the_cpu(tiny_llama: Path, overlap: bool) -> None:
    expected = _answers(tiny_llama, "cpu", overlap=False)
    for got, want in zip(_answers(tiny_llama, "cuda", overlap=overlap), expected, strict=True):
        assert got.token_ids == want.token_ids
        assert got.logprobs is not None and want.logprobs is not None
        assert got.logprobs.output == pytest.approx(want.logprobs.output, abs=1e-4)
        assert got.logprobs.input[1:] == pytest.approx(want.logprobs.input[1:], abs=1e-4)
        if want.hidden_states is not None:
            assert got.hidden_states is not None and got.hidden_states.data.device.type == "cpu"
            assert got.hidden_states.positions == want.hidden_states.positions
            torch.testing.assert_close(got.hidden_states.data, want.hidden_states.data, atol=1e-3, rtol=1e-3)


def test_nobody_asks_nothing_is_copied(tiny_llama: Path) -> None:
    with Engine(str(tiny_llama), device="cuda", kv_tokens=4096) as engine:
        engine.generate(PROMPTS, GREEDY)
        ledger = engine.stats()["d2h"]
        assert ledger["hidden"]["copied_bytes"] == 0 and ledger["logprob"]["copied_bytes"] == 0
        assert ledger["token"]["copied_bytes"] == 4 * len(PROMPTS) * GREEDY.max_new_tokens
