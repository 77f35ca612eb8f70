"""The one place where a step's results leave the device, and the flags that gate it."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sidestream import SamplingParams
from sidestream.engine.copies import Arena, ArenaFull, Copies, GenerationBatchResult, Ledger, host_array
from sidestream.engine.outputs import LogitsProcessorOutput, LogprobBlock
from sidestream.engine.runner import Runner
from sidestream.engine.streams import CpuStream, Event
from sidestream.messages import Submit

OpenEngine = Callable[..., AbstractContextManager[Any]]


class RecordingStream(CpuStream):
    """Notes the order of what it is asked to do."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        super().__init__("test")

    def launch(self, fn: Callable[..., Any], *args: Any) -> Any:
        self.calls.append("launch")
        return super().launch(fn, *args)

    def record(self) -> Event:
        self.calls.append("record")
        return super().record()

    def wait(self, event: Event) -> None:
        self.calls.append("wait")
        super().wait(event)


@pytest.fixture
def copies() -> Any:
    compute, side = CpuStream("compute"), RecordingStream()
    yield Copies(compute, side, Arena(1 << 16, pinned=False), Ledger(), hidden_size=8, itemsize=4)
    side.close()
    compute.close()


def result_of(copies: Copies, *, hidden: bool = True, logprobs: bool = True) -> GenerationBatchResult:
    output = LogitsProcessorOutput(
        next_token_logprobs=LogprobBlock(torch.randn(3), torch.randn(6), torch.arange(6, dtype=torch.int32)) if logprobs else None,
        input_token_logprobs=LogprobBlock(torch.randn(5)) if logprobs else None,
        hidden_states=(torch.randn(4, 2, 8), torch.randn(1, 1, 8).bfloat16()) if hidden else None,
    )
    return GenerationBatchResult(
        output, torch.tensor([7, 8, 9], dtype=torch.int32), copies, forward_tokens=10, sampled_rows=3, final_bytes=4 * 8 * 4
    )


def test_the_default_copies(copies: Copies) -> None:
    result = result_of(copies)
    before = result.logits_output.hidden_states
    assert before is not None
    result.copy_to_cpu(return_logprob=True)
    copies.wait(result.copy_done)  # type: ignore[arg-type]
    after = result.logits_output.hidden_states
    assert after is not None and len(after) == 2
    for host, device in zip(after, before, strict=True):
        assert torch.equal(host, device) and host.dtype == device.dtype
        assert host.data_ptr() != device.data_ptr()
    assert copies.ledger.copied["hidden"] == 4 * 2 * 8 * 4 + 8 * 2
    assert copies.ledger.copied["logprob"] == 4 * (3 + 6 + 6 + 5)
    assert copies.ledger.copied["token"] == 12
    assert host_array(result.next_token_ids).tolist() == [7, 8, 9]  # type: ignore[arg-type]


def test_false_drops_the_device_reference(copies: Copies) -> None:
    result = result_of(copies)
    hidden, logprobs = result.logits_output.hidden_states, result.logits_output.next_token_logprobs
    assert hidden is not None and logprobs is not None
    alive = [weakref.ref(hidden[0]), weakref.ref(hidden[1]), weakref.ref(logprobs.chosen)]
    del hidden, logprobs
    result.copy_to_cpu(return_logprob=False, return_hidden_states=False)
    gc.collect()
    assert [reference() for reference in alive] == [None, None, None]
    assert result.logits_output == LogitsProcessorOutput(None, None, None)
    assert copies.ledger.copied == {"token": 12, "logprob": 0, "hidden": 0}
    assert copies.ledger.skipped == {"token": 0, "logprob": 12, "hidden": 10 * 8 * 4}


@pytest.mark.parametrize("logprob", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
def test_each_flag_gates_its_own_tensors(copies: Copies, logprob: bool, hidden: bool) -> None:
    """What is asked for becomes host memory of its own, equal to the device's; what is not is freed at once."""
    result = result_of(copies)
    kinds = [(result.next_token_ids, True), *((rows, hidden) for rows in result.logits_output.hidden_states or ())]
    for block in (result.logits_output.next_token_logprobs, result.logits_output.input_token_logprobs):
        kinds += [(part, logprob) for part in block or () if part is not None]
    assert len(kinds) == 1 + 2 + 3 + 1
    alive = [(weakref.ref(tensor), kept) for tensor, kept in kinds]
    values = [(tensor.clone(), tensor.data_ptr()) for tensor, kept in kinds if kept]
    block = None
    kinds.clear()

    result.copy_to_cpu(logprob, hidden)
    gc.collect()
    assert [reference() is not None for reference, _ in alive] == [kept for _, kept in alive]
    copies.wait(result.copy_done)  # type: ignore[arg-type]
    output = result.logits_output
    host = [result.next_token_ids, *(output.hidden_states or ())]
    for block in (output.next_token_logprobs, output.input_token_logprobs):
        host += [part for part in block or () if part is not None]
    assert len(host) == len(values)
    for copy, (value, address) in zip(host, values, strict=True):
        assert copy.device.type == "cpu" and copy.dtype == value.dtype and torch.equal(copy, value)
        assert copy.data_ptr() != address, "a view of device memory would change under its reader"
    assert copies.ledger.copied == {"token": 12, "logprob": 80 * logprob, "hidden": 272 * hidden}
    assert copies.ledger.skipped == {"token": 0, "logprob": 0 if logprob else 12, "hidden": 320 - 128 * hidden}
    assert isinstance(copies.side, RecordingStream)
    assert copies.side.calls == ["wait", *["launch"] * (1 + 2 * hidden + 4 * logprob), "record"]


def test_what_is_copied_is_held_until_the_copy_is_done_and_not_longer(copies: Copies) -> None:
    result = result_of(copies, logprobs=False)
    source = weakref.ref(result.logits_output.hidden_states[0])  # type: ignore[index]
    result.copy_to_cpu(return_logprob=False)
    gc.collect()
    assert source() is not None, "the side stream may still read it"
    copies.wait(result.copy_done)  # type: ignore[arg-type]
    result.sources.clear()
    gc.collect()
    assert source() is None


@pytest.mark.parametrize("flag", [True, False])
def test_hidden_states_none_is_safe(copies: Copies, flag: bool) -> None:
    result = result_of(copies, hidden=False, logprobs=False)
    result.copy_to_cpu(return_logprob=flag, return_hidden_states=flag)
    copies.wait(result.copy_done)  # type: ignore[arg-type]
    assert result.logits_output.hidden_states is None
    assert copies.ledger.copied == {"token": 12, "logprob": 0, "hidden": 0}


def test_copy_done_is_recorded_last(copies: Copies) -> None:
    result = result_of(copies)
    result.copy_to_cpu(return_logprob=True, return_hidden_states=True)
    side = copies.side
    assert isinstance(side, RecordingStream)
    assert side.calls == ["wait", *["launch"] * 7, "record"]  # tokens, 3 + 1 logprob tensors, 2 hidden ones


def test_a_copy_waits_for_the_compute_stream(copies: Copies) -> None:
    source = torch.zeros(3, dtype=torch.int32)
    release = torch.tensor([7, 8, 9], dtype=torch.int32)

    def compute_late() -> None:
        time.sleep(0.05)
        source.copy_(release)

    copies.compute.launch(compute_late)
    result = GenerationBatchResult(LogitsProcessorOutput(), source, copies)
    result.copy_to_cpu(return_logprob=False)
    copies.wait(result.copy_done)  # type: ignore[arg-type]
    assert host_array(result.next_token_ids).tolist() == [7, 8, 9]  # type: ignore[arg-type]


def test_two_steps_do_not_share_a_block_and_a_full_block_says_so() -> None:
    arena = Arena(128, pinned=False)
    arena.begin_step()
    first = arena.take(torch.zeros(8))
    second = arena.take(torch.zeros(3, dtype=torch.bfloat16))
    assert second.data_ptr() - first.data_ptr() == 64
    with pytest.raises(ArenaFull, match="192 bytes"):
        arena.take(torch.zeros(16))
    arena.begin_step()
    other = arena.take(torch.zeros(8))
    assert other.data_ptr() != first.data_ptr()
    arena.begin_step()
    assert arena.take(torch.zeros(8)).data_ptr() == first.data_ptr()


def test_a_device_tensor_has_no_array() -> None:
    with pytest.raises(AssertionError, match="copy_to_cpu"):
        host_array(torch.empty(2, device="meta"))


# Both call sites


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool, str]]:
    """(return_logprob, return_hidden_states, call site) of every copy_to_cpu."""
    calls: list[tuple[bool, bool, str]] = []
    site = {"now": "run_batch"}
    copy, late = GenerationBatchResult.copy_to_cpu, Runner._sample_late

    def spy(self: GenerationBatchResult, return_logprob: bool, return_hidden_states: bool = True) -> None:
        calls.append((return_logprob, return_hidden_states, site["now"]))
        copy(self, return_logprob, return_hidden_states)

    def from_late(self: Runner, *args: Any) -> GenerationBatchResult:
        site["now"] = "launch_batch_sample_if_needed"
        result = late(self, *args)
        site["now"] = "run_batch"
        return result

    monkeypatch.setattr(GenerationBatchResult, "copy_to_cpu", spy)
    monkeypatch.setattr(Runner, "_sample_late", from_late)
    return calls


def greedy(new: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("overlap", [False, True])
def test_none_asking_passes_false(open_engine: OpenEngine, spied: list[tuple[bool, bool, str]], overlap: bool) -> None:
    with open_engine(overlap=overlap) as engine:
        engine.generate([[5, 6], [7, 8, 9]], greedy(4))
    assert spied and set(spied) == {(False, False, "run_batch")}


@pytest.mark.parametrize("overlap", [False, True])
def test_the_flags_follow_the_batch_from_step_to_step(open_engine: OpenEngine, spied: list[tuple[bool, bool, str]], overlap: bool) -> None:
    """One request asks and ends after 3 tokens; its neighbour goes on to 6 without it."""
    with open_engine(overlap=overlap) as engine:
        engine.generate(
            [[5, 6], [7, 8, 9]],
            [greedy(3), greedy(6)],
            return_hidden_states=[True, False],
            return_logprob=[True, False],
        )
    flags = [(logprob, hidden) for logprob, hidden, _ in spied]
    assert flags.count((True, True)) == 3, "one step for each token of the request that asks"
    assert flags[-3:] == [(False, False)] * 3, "the steps without it pay nothing"
    assert not {(True, False), (False, True)} & set(flags)


@pytest.mark.parametrize("overlap", [False, True])
def test_each_flag_on_its_own(open_engine: OpenEngine, spied: list[tuple[bool, bool, str]], overlap: bool) -> None:
    with open_engine(overlap=overlap) as engine:
        engine.generate([5, 6], greedy(2), return_logprob=True)
        engine.generate([5, 6, 7], greedy(2), return_hidden_states=True)
    assert [(logprob, hidden) for logprob, hidden, _ in spied] == [(True, False)] * 2 + [(False, True)] * 2


class OnlyTokens:
    """A grammar: the given tokens, one after the other."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.at = 0

    def fill_mask(self, mask: npt.NDArray[np.uint32]) -> None:
        mask[:] = 0
        token = self.tokens[self.at]
        mask[token // 32] = np.uint32(1 << (token % 32))

    def advance(self, token_id: int) -> bool:
        assert token_id == self.tokens[self.at]
        self.at += 1
        return self.at == len(self.tokens)


def constrain_first(message: Submit) -> OnlyTokens | None:
    return OnlyTokens([33, 64, 31, 319]) if message.prompt[0] == 5 else None


@pytest.mark.parametrize("overlap", [False, True])
def test_the_delayed_call_site_passes_the_flags_of_its_own_batch(
    open_engine: OpenEngine, spied: list[tuple[bool, bool, str]], overlap: bool
) -> None:
    with open_engine(overlap=overlap, constraint=constrain_first, jump=False) as engine:
        constrained, free = engine.generate(
            [[5, 6], [7, 8, 9]], greedy(8), return_hidden_states=[True, False], return_logprob=[False, True]
        )
    assert constrained.token_ids == [33, 64, 31, 319]
    assert constrained.finish_reason == "stop"
    assert free.finish_reason == "length" and len(free.token_ids) == 8
    assert constrained.hidden_states is not None and list(constrained.hidden_states.positions) == [0, 1, 2, 3, 4]
    delayed = [(logprob, hidden) for logprob, hidden, where in spied if where == "launch_batch_sample_if_needed"]
    at_once = [(logprob, hidden) for logprob, hidden, where in spied if where == "run_batch"]
    if overlap:  # exactly the steps that hold the constrained row are delayed, and carry its flag
        assert len(delayed) in (4, 5) and all(hidden for _, hidden in delayed)
        assert at_once and not any(hidden for _, hidden in at_once), "a step without a grammar never waits"
    else:
        assert not delayed and at_once


def test_delayed_sampling_gives_the_answers_of_the_normal_loop(open_engine: OpenEngine, assert_same: Callable[..., None]) -> None:
    answers = []
    for overlap in (False, True):
        with open_engine(overlap=overlap, constraint=constrain_first) as engine:
            answers.append(
                engine.generate(
                    [[5, 6], [7, 8, 9], [10] * 20],
                    SamplingParams(max_new_tokens=6, seed=3),
                    top_logprobs_num=2,
                    logprobs_mode="processed",
                    return_hidden_states=[True, "last", False],
                )
            )
    for got, want in zip(*answers, strict=True):
        assert_same(got, want)


class Failing(OnlyTokens):
    def advance(self, token_id: int) -> bool:
        raise RuntimeError("no such rule")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_grammar_that_fails_ends_its_request_alone(open_engine: OpenEngine, overlap: bool) -> None:
    with open_engine(overlap=overlap, constraint=lambda m: Failing([33]) if m.prompt[0] == 5 else None) as engine:
        neighbour = engine.stream([7, 8, 9], greedy(12))
        with pytest.raises(RuntimeError, match="no such rule"):
            engine.generate([5, 6], greedy(4))
        assert sum(len(part.token_ids) for part in neighbour) == 12


def test_dropping_a_finished_stream_leaves_the_next_owner_of_its_rid_alone(open_engine: OpenEngine) -> None:
    with open_engine() as engine:
        first = engine.stream([5, 6, 7], greedy(2), rid="x")
        while "x" in engine._router.prompts:  # until the engine has finished it
            time.sleep(0.001)
        second = engine.stream([9, 9, 9], greedy(200), rid="x")
        first.close()
        parts = list(second)
        assert parts[-1].finish_reason == "length" and sum(len(part.token_ids) for part in parts) == 200
