"""Bytes that leave the device, counted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from sidestream import SamplingParams
from sidestream.engine.copies import Copies
from sidestream.engine.loop import EngineLoop
from sidestream.messages import Abort, Submit

OpenEngine = Callable[..., AbstractContextManager[Any]]

HIDDEN, ITEM = 64, 4  # of the tiny model in float32
ROW = HIDDEN * ITEM


def greedy(new: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, temperature=0.0, **{"ignore_eos": True, **options})


@pytest.fixture(params=[False, True], ids=["normal", "overlap"])
def engine(request: pytest.FixtureRequest, open_engine: OpenEngine) -> Any:
    with open_engine(overlap=request.param) as engine:
        yield engine


def d2h(engine: Any) -> dict[str, Any]:
    ledger = engine.stats()["d2h"]
    assert isinstance(ledger, dict)
    return ledger


def test_nobody_asks_nothing_is_copied(engine: Any) -> None:
    engine.generate([[i + 3] * 20 for i in range(8)], greedy(10))
    ledger, stats = d2h(engine), engine.stats()
    assert ledger["hidden"]["copied_bytes"] == 0 and ledger["logprob"]["copied_bytes"] == 0
    assert ledger["hidden"]["skipped_bytes"] == stats["forward_tokens"] * ROW
    assert ledger["logprob"]["skipped_bytes"] == 8 * 10 * 4
    assert ledger["token"] == {"copied_bytes": 8 * 10 * 4, "skipped_bytes": 0, "discarded_bytes": 0}
    assert ledger["issue_seconds"] > 0 and ledger["wait_seconds"] >= 0


def last_of_32(engine: Any, sampling: SamplingParams) -> Any:
    prompts = [[i + 3, 9, i + 4] for i in range(32)]
    return engine.generate(prompts, [sampling, *[greedy(12)] * 31], return_hidden_states=["last", *[False] * 31], hidden_states_layers=[2])[
        0
    ]


def test_one_of_32_asks_for_last_ended_by_length(engine: Any) -> None:
    answer = last_of_32(engine, greedy(9))
    assert answer.finish_reason == "length"
    assert list(answer.hidden_states.positions) == [3 + 9 - 2]
    assert d2h(engine)["hidden"]["copied_bytes"] == ROW
    assert d2h(engine)["hidden"]["discarded_bytes"] == 0
    assert answer.copied_bytes == {"token": 9 * 4, "logprob": 0, "hidden": ROW}


def test_one_of_32_asks_for_last_ended_by_a_token(engine: Any) -> None:
    """The end is a surprise: the row waits on the device, and is fetched once."""
    fifth = engine.generate([3, 9, 4], greedy(9)).token_ids[4]
    before = d2h(engine)["hidden"]["copied_bytes"]
    assert before == 0
    answer = last_of_32(engine, greedy(9, stop_token_ids=[fifth]))
    assert answer.finish_reason == "stop" and answer.matched_stop == fifth
    assert list(answer.hidden_states.positions) == [3 + answer.completion_tokens - 2]
    assert d2h(engine)["hidden"]["copied_bytes"] == ROW
    assert d2h(engine)["hidden"]["discarded_bytes"] == 0


def test_one_of_32_asks_for_last_ended_by_a_stop_string(engine: Any) -> None:
    text = engine.generate([3, 9, 4], greedy(12)).text
    answer = last_of_32(engine, greedy(12, stop=[text[3:6]]))
    assert answer.finish_reason == "stop" and answer.matched_stop == text[3:6]
    assert d2h(engine)["hidden"]["copied_bytes"] == ROW
    assert d2h(engine)["hidden"]["discarded_bytes"] == 0


def test_last_that_could_have_ended_early_but_did_not(engine: Any) -> None:
    """The last step by arithmetic is launched while the token before it may still turn out to be a stop: never copied twice."""
    answer = last_of_32(engine, greedy(9, stop_token_ids=[1]))
    assert answer.finish_reason in ("length", "stop")
    assert d2h(engine)["hidden"]["copied_bytes"] == ROW
    assert d2h(engine)["hidden"]["discarded_bytes"] == 0


def test_all_rows_of_some_layers(engine: Any) -> None:
    answer = engine.generate([7, 8, 9, 10], greedy(5), return_hidden_states=True, hidden_states_layers=[1, -1, 1])
    rows = 4 + 5 - 1
    assert answer.hidden_states.data.shape == (rows, 3, HIDDEN)
    assert d2h(engine)["hidden"] == {"copied_bytes": rows * 3 * ROW, "skipped_bytes": 0, "discarded_bytes": 0}


def test_dtype_is_converted_before_the_copy(engine: Any) -> None:
    engine.generate([7, 8, 9, 10], greedy(2), return_hidden_states=True, hidden_states_dtype="bfloat16")
    assert d2h(engine)["hidden"]["copied_bytes"] == 5 * ROW // 2
    assert d2h(engine)["hidden"]["skipped_bytes"] == 5 * ROW - 5 * ROW // 2


def test_logprob_bytes(engine: Any) -> None:
    answer = engine.generate([7, 8, 9, 10], greedy(3), logprob_start_len=1, top_logprobs_num=4, token_ids_logprob=[1, 2])
    entries = 3 + 3  # positions 1..3 of the prompt, 3 output tokens
    assert d2h(engine)["logprob"] == {"copied_bytes": entries * (4 + 8 * 4 + 2 * 4), "skipped_bytes": 0, "discarded_bytes": 0}
    assert answer.copied_bytes["logprob"] == entries * 44


def test_choices_share_the_prompt_rows(engine: Any) -> None:
    answers = engine.generate([7] * 20, greedy(3, n=3), return_hidden_states=True)
    assert [len(answer.hidden_states.positions) for answer in answers] == [22] * 3
    assert d2h(engine)["hidden"]["copied_bytes"] == (20 + 3 * 2) * ROW


@pytest.mark.parametrize("overlap", [False, True])
def test_surprise_discards_one_step_of_overlap(open_engine: OpenEngine, overlap: bool) -> None:
    with open_engine(overlap=overlap) as engine:
        third = engine.generate([3, 9, 4], greedy(9)).token_ids[2]
        before = d2h(engine)
        answer = engine.generate([3, 9, 4], greedy(9, stop_token_ids=[third]), return_hidden_states=True, return_logprob=True)
        after = d2h(engine)
        rows = 3 + answer.completion_tokens - 1
        discarded = {kind: after[kind]["discarded_bytes"] - before[kind]["discarded_bytes"] for kind in ("token", "logprob", "hidden")}
        assert discarded == ({"token": 4, "logprob": 4, "hidden": ROW} if overlap else {"token": 0, "logprob": 0, "hidden": 0})
        copied = {kind: after[kind]["copied_bytes"] - before[kind]["copied_bytes"] for kind in discarded}
        assert copied == {kind: answer.copied_bytes[kind] + discarded[kind] for kind in discarded}
        assert answer.copied_bytes["hidden"] == rows * ROW


def test_a_constraint_does_not_change_the_ledger(open_engine: OpenEngine) -> None:
    class Everything:
        def fill_mask(self, mask: Any) -> None:
            pass

        def advance(self, token_id: int) -> bool:
            return False

    def constraint(message: Submit) -> Everything:
        return Everything()

    ledgers = []
    for make in (lambda _: None, constraint):
        with open_engine(overlap=True, constraint=make) as engine:
            engine.generate([[5, 6], [7, 8]], greedy(4), return_hidden_states=[True, False], return_logprob=[False, True])
            ledgers.append({kind: d2h(engine)[kind] for kind in ("token", "logprob", "hidden")})
    assert ledgers[0]["token"]["copied_bytes"] == ledgers[1]["token"]["copied_bytes"]
    assert {k: v["copied_bytes"] for k, v in ledgers[0].items()} == {k: v["copied_bytes"] for k, v in ledgers[1].items()}


SKIPPED = [
    # Only what an engine without gates would have moved counts: the final row of every position.
    ({"hidden_states_layers": [1]}, 10, 10),
    ({"hidden_states_layers": [1, -1], "hidden_states_start": 5}, 2 * 5, 10 - 5),
    ({"hidden_states_layers": [-1, 4]}, 2 * 10, 0),
    ({"hidden_states_start": 400}, 0, 10),
]


@pytest.mark.parametrize(("outputs", "copied", "skipped"), SKIPPED)
def test_skipped_hidden_bytes_by_hand(engine: Any, outputs: dict[str, Any], copied: int, skipped: int) -> None:
    """Seven prompt positions and three of output are computed; numbers of rows."""
    engine.generate([7, 8, 9, 10, 11, 12, 13], greedy(4), return_hidden_states=True, **outputs)
    assert engine.stats()["forward_tokens"] == 10
    assert d2h(engine)["hidden"] == {"copied_bytes": copied * ROW, "skipped_bytes": skipped * ROW, "discarded_bytes": 0}


def test_skipped_bytes_are_counted_step_by_step(open_engine: OpenEngine) -> None:
    """A step that copies more than the model's own type would need makes up for no other step."""
    with open_engine(dtype="bfloat16") as engine:
        engine.generate(
            [7, 8, 9, 10, 11, 12, 13], greedy(4), return_hidden_states=True, hidden_states_start=7, hidden_states_dtype="float32"
        )
        assert d2h(engine)["hidden"] == {"copied_bytes": 3 * HIDDEN * 4, "skipped_bytes": 7 * HIDDEN * 2, "discarded_bytes": 0}


@pytest.mark.parametrize(("layers", "final"), [([-1], 1), ([2], 0), ([2, -1, 1], 1)])
def test_a_late_row_was_not_skipped(engine: Any, layers: list[int], final: int) -> None:
    fourth = engine.generate([3, 9, 4], greedy(9)).token_ids[3]
    before = engine.stats()
    answer = engine.generate([3, 9, 4], greedy(9, stop_token_ids=[fourth]), return_hidden_states="last", hidden_states_layers=layers)
    after = engine.stats()
    assert answer.finish_reason == "stop"
    copied, skipped = (after["d2h"]["hidden"][kind] - before["d2h"]["hidden"][kind] for kind in ("copied_bytes", "skipped_bytes"))
    assert copied == len(layers) * ROW == answer.copied_bytes["hidden"]
    assert skipped == (after["forward_tokens"] - before["forward_tokens"] - final) * ROW


def test_skipped_logprob_bytes(engine: Any) -> None:
    engine.generate([[5, 6], [7, 8, 9]], [greedy(3), greedy(5)], return_logprob=[True, False])
    assert d2h(engine)["logprob"] == {"copied_bytes": 3 * 4, "skipped_bytes": 5 * 4, "discarded_bytes": 0}


def test_last_ended_by_the_end_of_sequence(engine: Any) -> None:
    prompts = [[i, i + 7, 9] for i in range(3, 43)]
    answers = engine.generate(prompts, greedy(24, ignore_eos=False))
    ended = [p for p, a in zip(prompts, answers, strict=True) if a.finish_reason == "stop" and 3 < a.completion_tokens < 20]
    assert ended, "no prompt ends by itself"
    assert d2h(engine)["hidden"]["copied_bytes"] == 0
    answer = engine.generate(
        [ended[0], *prompts[:31]], greedy(24, ignore_eos=False), return_hidden_states=["last", *[False] * 31], hidden_states_layers=[2]
    )[0]
    assert answer.finish_reason == "stop" and answer.matched_stop == answer.token_ids[-1]
    assert list(answer.hidden_states.positions) == [3 + answer.completion_tokens - 2]
    assert d2h(engine)["hidden"]["copied_bytes"] == ROW == answer.copied_bytes["hidden"]
    assert d2h(engine)["hidden"]["discarded_bytes"] == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_what_the_outputs_say_adds_up_to_the_ledger(open_engine: OpenEngine, overlap: bool) -> None:
    """Several choices, rows, logprobs, ends by length and by surprise: what nobody received was discarded."""
    with open_engine(overlap=overlap) as engine:
        prompts = [[i + 3, 9, i + 4] * 7 for i in range(8)]
        stops = [answer.token_ids[4] for answer in engine.generate(prompts, greedy(8))]
        before = d2h(engine)
        answers = engine.generate(
            prompts,
            [greedy(8, n=1 + i % 3, stop_token_ids=[stop] if i % 2 else []) for i, stop in enumerate(stops)],
            return_hidden_states=[True, True, "last", "last", False, True, True, False],
            hidden_states_start=[0, -1, 0, 0, 0, 2, 21, 0],
            hidden_states_layers=[1, -1],
            top_logprobs_num=[0, 2, 0, 3, 1, 0, 0, 0],
            logprob_start_len=[-1, 4, -1, -1, 0, -1, 20, -1],
        )
        after = d2h(engine)
        for kind in ("token", "logprob", "hidden"):
            copied, discarded = (after[kind][name] - before[kind][name] for name in ("copied_bytes", "discarded_bytes"))
            assert copied > 0 and sum(answer.copied_bytes[kind] for answer in answers) == copied - discarded
            assert (discarded > 0) == overlap
        # The first choice pays for the rows of the prompt that all of them hold.
        first, second = answers[1], answers[2]
        assert (first.index, second.index) == (0, 1) and len(first.hidden_states.positions) == len(second.hidden_states.positions)
        assert first.copied_bytes["hidden"] - second.copied_bytes["hidden"] == 2 * ROW
        assert first.copied_bytes["logprob"] - second.copied_bytes["logprob"] == (21 - 4) * (4 + 2 * 8)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("more", [{}, {"ignore_eos": False}], ids=["cannot end before", "may end before"])
def test_last_of_a_request_aborted_before_any_of_its_steps(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, overlap: bool, more: dict[str, Any]
) -> None:
    """One row, that of the tokens returned, also when the step that was to be the last is under way; nothing is discarded."""
    ingest, prompt, reasons = EngineLoop.ingest, list(range(5, 24)), []
    left = 0

    def aborting(self: EngineLoop, *, wait: bool) -> bool:
        nonlocal left
        if self.requests:
            left -= 1
            if left == 0:
                self.inbox.put(Abort("aborted"))
        return ingest(self, wait=wait)

    with open_engine(overlap=overlap, chunked_prefill_size=8, disable_radix_cache=True) as engine:
        want = engine.generate(prompt, greedy(4, **more), return_hidden_states=True).hidden_states.data
        monkeypatch.setattr(EngineLoop, "ingest", aborting)
        before = d2h(engine)["hidden"]
        for moment in range(1, 10):
            left = moment
            answer = engine.generate(prompt, greedy(4, **more), return_hidden_states="last", rid="aborted")
            reasons.append(answer.finish_reason)
            after = d2h(engine)["hidden"]
            assert after["discarded_bytes"] == before["discarded_bytes"]
            states = answer.hidden_states
            if answer.token_ids:
                assert list(states.positions) == [len(prompt) + answer.completion_tokens - 2]
                torch.testing.assert_close(states.data[0], want[states.positions[0]], atol=1e-4, rtol=0)
            assert after["copied_bytes"] - before["copied_bytes"] == len(states.positions) * ROW
            before = after
    assert reasons[0] == "abort" and reasons[-1] == "length" and reasons == sorted(reasons)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each late copy."""
    calls: list[int] = []
    copy_late = Copies.copy_late

    def spied(self: Copies, tensor: Any, row: int) -> Any:
        calls.append(row)
        return copy_late(self, tensor, row)

    monkeypatch.setattr(Copies, "copy_late", spied)
    return calls


@pytest.mark.parametrize("at", [1, 4, 7, 8])
def test_last_ended_by_a_token_at_any_distance_from_the_length(engine: Any, late: list[int], at: int) -> None:
    """With the second to last token, the step of the last one is already in flight: it must not have copied the row."""
    prompts = [[i, i + 5, 9, 4] for i in range(3, 23)]
    answers = engine.generate(prompts, greedy(9))
    prompt, stop = next((p, a.token_ids[at]) for p, a in zip(prompts, answers, strict=True) if a.token_ids[at] not in a.token_ids[:at])
    answer = engine.generate(prompt, greedy(9, stop_token_ids=[stop]), return_hidden_states="last")
    assert answer.finish_reason == "stop" and answer.completion_tokens == at + 1
    assert list(answer.hidden_states.positions) == [4 + at - 1]
    assert d2h(engine)["hidden"]["copied_bytes"] == ROW
    assert d2h(engine)["hidden"]["discarded_bytes"] == 0
    assert len(late) <= 1 and (len(late) == 1 or at == 8)


@pytest.mark.parametrize("count", [0, 1, 2, 6])
def test_last_whose_end_is_known_leaves_with_its_final_step(engine: Any, late: list[int], count: int) -> None:
    answer = engine.generate([7, 8, 9], greedy(count), return_hidden_states="last")
    assert list(answer.hidden_states.positions) == [3 + max(count, 1) - 2]
    assert d2h(engine)["hidden"]["copied_bytes"] == ROW and not late
