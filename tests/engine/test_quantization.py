"""Integer compute of a checkpoint that is not quantised: its matrices are, when they are packed."""

from __future__ import annotations

import pytest
import torch

from sidestream import SamplingParams
from sidestream.kernels import cpu

native = cpu.native()
pytestmark = pytest.mark.skipif(native is None, reason="the native extension is not built")

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], list(range(20, 90))]
PARAMS = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
ASKED = {"logprob_start_len": 0, "return_hidden_states": True}


@pytest.mark.parametrize("isa", native.supported() if native else [])
@pytest.mark.parametrize(("quantization", "near"), [("w8a8", 0.15), ("w4a8", 0.8)])
def test_a_plain_checkpoint_in_integers(open_engine, monkeypatch, isa, quantization, near):
    monkeypatch.setenv(cpu.ISA_VARIABLE, isa)
    with open_engine() as engine:  # float32
        exact = engine.generate(PROMPTS, PARAMS, logprob_start_len=0)
    with open_engine(dtype="bfloat16", quantization=quantization) as engine:
        together = engine.generate(PROMPTS, PARAMS, **ASKED)
        alone = [engine.generate(prompt, PARAMS, **ASKED) for prompt in PROMPTS]
    for one, other in zip(together, alone, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs == other.logprobs
        assert torch.equal(one.hidden_states.data, other.hidden_states.data)
    got, want = (torch.tensor(each[2].logprobs.input[1:]) for each in (together, exact))
    assert (got - want).abs().mean() < near  # they spread by 2.6
