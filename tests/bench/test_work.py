from __future__ import annotations

import pytest

from sidestream.bench.work import CASES, Work, prompts, timed


def test_the_cases_are_those_that_others_publish():
    assert {name: str(work) for works in CASES.values() for name, work in works.items()} == {
        "single stream": "1 of 128 + 256",
        "32 at once": "32 of 128 + 128",
        "prefill": "1 of 2,048 + 1",
        "shared prefix, cold": "32 of 1,024 shared + 32 + 32",
        "shared prefix, warm": "32 of 1,024 shared + 32 + 32",
    }
    counted = {name: work.tokens for works in CASES.values() for name, work in works.items()}
    assert list(counted.values()) == [255, 4096, 2048, 1024, 1024]


def test_prompts_are_distinct_after_what_they_share_and_the_same_every_time():
    made = prompts("a", 3, 8, shared=5, vocab_size=50)
    assert made == prompts("a", 3, 8, shared=5, vocab_size=50) != prompts("b", 3, 8, shared=5, vocab_size=50)
    assert len({tuple(ids[:5]) for ids in made}) == 1
    assert len({tuple(ids[5:]) for ids in made}) == 3
    assert all(len(ids) == 8 and all(25 <= id < 50 for id in ids) for ids in made)


def test_a_warm_work_has_the_prefix_of_the_cold_one_and_own_endings():
    cold, warm = Work(2, 6, 1, "output", shared=4), Work(2, 6, 1, "output", shared=4, warm=True)
    one, other = cold.prompts(0), warm.prompts(0)
    assert one[0][:4] == one[1][:4] == other[0][:4]
    assert one[0][4:] != other[0][4:]


@pytest.mark.parametrize(
    ("work", "asked", "emptied", "seconds"),
    [
        (Work(1, 4, 3, "decode"), [1, 3], 2, 20.0),
        (Work(2, 4, 3, "output"), [3], 1, 30.0),
        (Work(2, 4, 3, "output", shared=2, warm=True), [3], 0, 30.0),
        (Work(1, 4, 1, "prompt"), [1], 1, 10.0),
    ],
)
def test_what_is_timed(work, asked, emptied, seconds, monkeypatch):
    """The time of the answers, 10 s a token, less that of the first token where only decoding counts."""
    calls: list[int] = []
    flushes: list[None] = []
    now = 0.0
    monkeypatch.setattr("sidestream.bench.work.time.perf_counter", lambda: now)

    def generate(prompts, new):
        nonlocal now
        calls.append(new)
        assert [len(ids) for ids in prompts] == [4] * work.requests
        now += 10.0 * new
        return [[7] * new] * work.requests

    assert timed(work, "seed", generate, lambda: flushes.append(None)) == seconds
    assert calls == asked
    assert len(flushes) == emptied


def test_answers_of_another_length_are_no_measurement():
    with pytest.raises(RuntimeError, match=r"2 of 4 \+ 3: got answers of \[2, 3\] tokens, 3 were asked of each"):
        timed(Work(2, 4, 3, "output"), 0, lambda prompts, new: [[1, 2], [1, 2, 3]], lambda: None)
