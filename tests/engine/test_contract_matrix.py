"""The first promise: a request's answer is the same whatever ran beside it, was cached, chunked, preempted or streamed, overlap or not.

One workload goes through every combination; the reference is each request alone on a fresh engine, cache and overlap off. In float32 on
PyTorch numbers agree within 1e-4; in bfloat16 on the native backend every logprob and row is the same to the bit.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sidestream import Engine, Output, SamplingParams
from sidestream.engine.scheduler import _Step
from sidestream.engine.streams import Streams, open_amplified_streams, open_streams
from sidestream.kernels import cpu
from sidestream.messages import Abort, StepOutputs, Submit
from sidestream.output import HiddenStates

DEFAULTS: dict[str, Any] = {
    "return_logprob": False,
    "logprob_start_len": -1,
    "top_logprobs_num": 0,
    "token_ids_logprob": None,
    "logprobs_mode": "raw",
    "return_hidden_states": False,
    "hidden_states_start": 0,
    "hidden_states_layers": [-1],
    "hidden_states_dtype": "model",
}


def open_poisoned_streams() -> Streams:
    """The streams of the CPU, with freed pages and arena blocks filled with NaN."""
    return open_streams(torch.device("cpu"), 1)._replace(poison=True)


@dataclass(frozen=True)
class Ask:
    name: str
    prompt: list[int]
    sampling: SamplingParams
    outputs: dict[str, Any] = field(default_factory=dict)
    abort_after: int | None = None  # tokens before it is aborted


class Alternating:
    """A grammar whose mask depends on the token before, and which is complete after twelve tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def admits(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        last = self.tokens[-1] if self.tokens else 0
        return (tokens % 7 == last % 5) & (tokens > 1)

    def fill_mask(self, mask: npt.NDArray[np.uint32]) -> None:
        admitted = self.admits(np.arange(len(mask) * 32))
        mask[:] = np.packbits(admitted.reshape(-1, 32), axis=1, bitorder="little").view(np.uint32)[:, 0]

    def advance(self, token_id: int) -> bool:
        assert self.admits(np.array([token_id]))[0], f"token {token_id} was not admitted after {self.tokens[-1:]}"
        self.tokens.append(token_id)
        return len(self.tokens) == 12


def grammar(message: Submit) -> Alternating | None:
    return Alternating() if message.rid.startswith("grammar") else None


@dataclass(frozen=True)
class Workload:
    asks: list[Ask]
    want: dict[str, list[Output]]  # by name, one for each choice

    @property
    def finishing(self) -> list[Ask]:
        return [ask for ask in self.asks if ask.abort_after is None]

    @property
    def aborted(self) -> list[Ask]:
        return [ask for ask in self.asks if ask.abort_after is not None]


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, temperature=0.0, **more)


def answers_of(engine: Engine, asks: Sequence[Ask]) -> dict[str, list[Output]]:
    """All at once, every keyword with one value per prompt."""
    rids = [ask.name for ask in asks]
    keywords = {name: [ask.outputs.get(name, default) for ask in asks] for name, default in DEFAULTS.items()}
    outputs = iter(engine.generate([ask.prompt for ask in asks], [ask.sampling for ask in asks], rid=rids, **keywords))
    answers = {ask.name: [next(outputs) for _ in range(ask.sampling.n)] for ask in asks}
    assert next(outputs, None) is None
    return answers


def find_stop(text: str, first: int, last: int) -> str:
    """A piece of `text` that appears in it for the first time between those characters, and would be held back before it is complete."""
    for match in re.finditer(r"(?=([a-zA-Z ]{3}))", text):
        if text.find(match[1]) == match.start() and first <= match.start() <= last:
            return match[1]
    raise AssertionError(f"no stop string in {text!r}")


def make_asks(probe: Callable[[list[int]], Output], tokens: Callable[[int], list[int]]) -> list[Ask]:
    """About twenty requests. `tokens(n)` gives n token ids, other ones each time; `probe` answers greedily, 40 tokens past EOS."""
    base, longest = tokens(48), tokens(90)
    stopped = [base[:32] + tokens(8), tokens(21)]
    stops = [find_stop(probe(prompt).text, 6, 60) for prompt in stopped]
    long, forked = base + tokens(16), tokens(26)
    third = probe(forked).token_ids[7]
    return [
        Ask("short", tokens(1), greedy(12)),
        Ask("scored", tokens(17), greedy(14), {"top_logprobs_num": 3, "logprob_start_len": 0, "token_ids_logprob": [5, 300]}),
        Ask("rows", base[:33], greedy(10), {"return_hidden_states": True, "hidden_states_layers": [-1, 0, 2]}),
        Ask("last by length", base[:40], greedy(9, ignore_eos=True), {"return_hidden_states": "last", "hidden_states_layers": [3, -1]}),
        Ask(
            "last by stop token",
            forked,
            greedy(30, stop_token_ids=[third], ignore_eos=True),
            {"return_hidden_states": "last", "return_logprob": True},
        ),
        Ask(
            "stop string",
            stopped[0],
            greedy(40, stop=[stops[0], "never this"], ignore_eos=True),
            {"return_hidden_states": True, "hidden_states_start": -1, "return_logprob": True, "hidden_states_dtype": "float32"},
        ),
        Ask(
            "last by stop string",
            stopped[1],
            greedy(40, stop=stops[1], ignore_eos=True),
            {"return_hidden_states": "last", "top_logprobs_num": 2},
        ),
        Ask("deferred stop", stopped[1], greedy(38, stop=stops[1], min_new_tokens=35), {"return_logprob": True}),
        Ask(
            "three choices",
            base + tokens(5),
            SamplingParams(max_new_tokens=12, temperature=1.0, seed=11, n=3),
            {"return_hidden_states": "last", "hidden_states_layers": [2, -1], "logprob_start_len": 5, "top_logprobs_num": 2},
        ),
        Ask(
            "filtered",
            tokens(23),
            SamplingParams(max_new_tokens=16, temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=-7),
            {"logprobs_mode": "processed", "top_logprobs_num": 4, "token_ids_logprob": [7]},
        ),
        Ask(
            "penalised",
            tokens(12) * 2,
            greedy(24, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.3),
            {"logprobs_mode": "processed", "top_logprobs_num": 2},
        ),
        Ask("penalised at random", base[:20], SamplingParams(max_new_tokens=20, repetition_penalty=1.2, frequency_penalty=-0.4, seed=5)),
        Ask("nothing new", base[:45], greedy(0), {"return_hidden_states": True, "hidden_states_dtype": "bfloat16", "logprob_start_len": 0}),
        Ask("one new", tokens(9), greedy(1), {"return_hidden_states": "last", "hidden_states_dtype": "float16", "logprob_start_len": 7}),
        Ask(
            "twice a layer",
            longest[:70],
            greedy(11, ignore_eos=True),
            {"return_hidden_states": True, "hidden_states_start": 65, "hidden_states_layers": [1, 1], "top_logprobs_num": 2},
        ),
        Ask("long", long, greedy(50, ignore_eos=True)),
        Ask("long again", long, SamplingParams(max_new_tokens=45, seed=3, n=2, ignore_eos=True)),
        Ask("late input", longest, greedy(5), {"logprob_start_len": 60}),
        Ask(
            "edited",
            tokens(11),
            SamplingParams(max_new_tokens=12, seed=2, logit_bias={40: 4.0, 41: -100.0}, allowed_token_ids=range(30, 90), min_new_tokens=3),
            {"logprobs_mode": "processed", "token_ids_logprob": [40, 41, 2]},
        ),
        Ask("without", forked, greedy(12, bad_token_ids=[third, 1]), {"return_logprob": True}),
        Ask("two, nothing new", tokens(18), greedy(0, n=2), {"return_hidden_states": "last", "logprob_start_len": 3}),
        Ask(
            "two, one new",
            tokens(19),
            SamplingParams(max_new_tokens=1, n=2, seed=9),
            {"return_hidden_states": True, "top_logprobs_num": 1},
        ),
        Ask(
            "past the end",
            base[:36],
            greedy(3),
            {"return_hidden_states": True, "hidden_states_start": 99, "hidden_states_layers": [0, 1]},
        ),
        Ask(
            "grammar",
            tokens(15),
            greedy(40),
            {"return_hidden_states": "last", "logprobs_mode": "processed", "top_logprobs_num": 2},
        ),
        Ask(
            "grammar, two at random",
            base + tokens(2),
            SamplingParams(max_new_tokens=30, seed=8, n=2, top_k=30, repetition_penalty=1.2),
            {"return_hidden_states": True, "hidden_states_start": -2, "return_logprob": True},
        ),
        Ask("grammar cut off", tokens(5), greedy(7), {"return_hidden_states": True}),
        Ask(
            "aborted with rows",
            base + tokens(3),
            greedy(75, ignore_eos=True),
            {"return_hidden_states": True, "logprob_start_len": 2, "top_logprobs_num": 2},
            abort_after=4,
        ),
        Ask(
            "aborted last",
            tokens(30),
            greedy(75, ignore_eos=True),
            {"return_hidden_states": "last", "top_logprobs_num": 1},
            abort_after=6,
        ),
        Ask("aborted at once", tokens(40), greedy(75, ignore_eos=True), {"return_hidden_states": True}, abort_after=0),
    ]


def reference(fresh: Callable[[], Any], tokens: Callable[[int], list[int]]) -> Workload:
    """`fresh()` opens an engine with nothing in its cache."""
    with fresh() as engine:
        asks = make_asks(lambda ids: engine.generate(ids, greedy(40, ignore_eos=True)), tokens)
    want = {}
    for ask in asks:
        # To cut an aborted answer anywhere, every row is needed.
        outputs = ask.outputs | {"return_hidden_states": True} if ask.abort_after is not None else ask.outputs
        with fresh() as engine:
            want |= answers_of(engine, [replace(ask, outputs=outputs)])
    return Workload(asks, want)


@pytest.fixture(scope="module", params=["float32", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and cpu.native() is None:
        pytest.skip(f"no native backend: {cpu.WHY_NOT}")
    return str(request.param)


@pytest.fixture(scope="module")
def open_engine(open_engine: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return partial(open_engine, dtype="bfloat16") if backend == "native" else open_engine


@pytest.fixture(scope="module")
def assert_same(assert_same: Callable[..., None], backend: str) -> Callable[..., None]:
    def same_bits(got: Output, want: Output, what: str = "answer") -> None:
        assert_same(got, want, what)
        assert numbers_of(got) == numbers_of(want), what
        if got.hidden_states is not None and want.hidden_states is not None:
            assert torch.equal(got.hidden_states.data, want.hidden_states.data), f"{what}: rows"

    return same_bits if backend == "native" else assert_same


def numbers_of(output: Output) -> list[Any]:
    """Every logprob; not the ids, which `assert_same` compares."""
    if output.logprobs is None:
        return []
    pairs = [getattr(output.logprobs, name) for name in ("input_top", "output_top", "input_ids", "output_ids")]
    values = [[entry and [value for value, _ in entry] for entry in entries] for entries in pairs]
    return [output.logprobs.input, output.logprobs.output, *values]


@pytest.fixture(scope="module")
def workload(open_engine: Callable[..., Any]) -> Workload:
    source = random.Random(4)
    made = reference(
        lambda: open_engine(disable_radix_cache=True, overlap=False, constraint=grammar),
        lambda count: [source.randrange(2, 320) for _ in range(count)],
    )
    reasons = {name: outputs[0].finish_reason for name, outputs in made.want.items()}
    # The workload is worth its name only if these happen.
    assert reasons["stop string"] == reasons["last by stop string"] == reasons["last by stop token"] == "stop", reasons
    assert isinstance(made.want["stop string"][0].matched_stop, str)
    assert len({tuple(output.token_ids) for output in made.want["three choices"]}) == 3
    assert (reasons["grammar"], made.want["grammar"][0].completion_tokens) == ("stop", 12)
    assert (reasons["grammar cut off"], reasons["grammar, two at random"]) == ("length", "stop")
    assert made.want["deferred stop"][0].completion_tokens >= 35
    assert sum(reason == "stop" for reason in reasons.values()) >= 4
    return made


def check_aborted(engine: Engine, ask: Ask, got: Output, want: Output, assert_same: Callable[..., None]) -> None:
    """A prefix of the solo answer, with the rows of the positions computed for its tokens."""
    count, length = len(got.token_ids), len(ask.prompt)
    assert got.finish_reason == "abort"
    assert count < len(want.token_ids), f"{ask.name}: not aborted in time"
    assert got.hidden_states is not None and want.hidden_states is not None
    positions = list(got.hidden_states.positions)
    if ask.outputs["return_hidden_states"] == "last":
        assert positions == ([length + count - 2] if count else [])
    elif count:
        assert positions == list(range(length + count - 1))
    else:
        assert positions == list(range(len(positions))) and len(positions) <= length
    logprobs = None
    if want.logprobs is not None:
        inputs = slice(None if count else len(got.logprobs.input))
        cut = {name: getattr(want.logprobs, name)[inputs] for name in ("input", "input_top", "input_ids")}
        cut |= {name: getattr(want.logprobs, name)[:count] for name in ("output", "output_top", "output_ids")}
        logprobs = replace(want.logprobs, **cut)
    expected = replace(
        want,
        text=engine.tokenizer.decode(want.token_ids[:count]),
        token_ids=want.token_ids[:count],
        completion_tokens=count,
        finish_reason="abort",
        logprobs=logprobs,
        hidden_states=HiddenStates.of(want.hidden_states.data[positions], positions, want.hidden_states.layers),
    )
    assert_same(got, expected, ask.name)


@dataclass(frozen=True)
class Checks:
    """Runs the workload and compares."""

    assert_same: Callable[..., None]
    join_choices: Callable[..., list[Output]]
    wait_until_idle: Callable[..., dict[str, Any]]

    def abort_in_time(self, engine: Any, asks: Sequence[Ask]) -> None:
        """Abort each of them from the engine's own thread, after so many tokens (0: with the first rows of the prompt)."""
        loop, emit = engine.loop, engine._outbox.put
        left = {ask.name: ask.abort_after for ask in asks}

        def watching(step: Any) -> None:
            for key in {*step.keys, *step.rows} if isinstance(step, StepOutputs) else ():
                rid = engine._router.choices[key].prompt.rid
                if rid in left:
                    left[rid] -= key in step.keys
                    if left[rid] <= 0:
                        del left[rid]
                        loop.inbox.put(Abort(rid))
            emit(step)

        loop.emit = watching

    def start_aborted(self, engine: Engine, ask: Ask, out: dict[str, Output]) -> threading.Thread:
        parts = engine.stream(ask.prompt, ask.sampling, rid=ask.name, **ask.outputs)
        thread = threading.Thread(target=lambda: out.update({ask.name: self.join_choices(parts)[0]}), daemon=True)
        thread.start()
        return thread

    def run(self, engine: Engine, workload: Workload, *, batched: bool) -> dict[str, list[Output]]:
        """Once through the workload; returns the answers of those that finish."""
        cut: dict[str, Output] = {}
        self.abort_in_time(engine, workload.aborted)
        if batched:
            threads = [self.start_aborted(engine, ask, cut) for ask in workload.aborted]
            answers = answers_of(engine, workload.finishing)
        else:
            threads, answers = [], {}
            for ask in workload.asks:
                if ask.abort_after is None:
                    answers |= answers_of(engine, [ask])
                else:
                    threads.append(self.start_aborted(engine, ask, cut))
                    threads[-1].join(timeout=60)
        for thread in threads:
            thread.join(timeout=60)
        for ask in workload.finishing:
            for got, want in zip(answers[ask.name], workload.want[ask.name], strict=True):
                self.assert_same(got, want, f"{ask.name}[{got.index}]")
                assert 0 <= got.cached_tokens <= got.prompt_tokens - 1
                assert got.cached_tokens == answers[ask.name][0].cached_tokens
        for ask in workload.aborted:
            check_aborted(engine, ask, cut[ask.name], workload.want[ask.name][0], self.assert_same)
        self.check_ledger(engine, [output for outputs in answers.values() for output in outputs] + list(cut.values()))
        return answers

    def check_ledger(self, engine: Engine, answers: list[Output]) -> None:
        """What the engine copied is what it returned, and what it says it discarded."""
        d2h = self.wait_until_idle(engine)["d2h"]
        before = getattr(engine, "returned", dict.fromkeys(("token", "logprob", "hidden"), 0))
        for kind in before:
            before[kind] += sum(answer.copied_bytes[kind] for answer in answers)
            assert d2h[kind]["copied_bytes"] == before[kind] + d2h[kind]["discarded_bytes"], kind
        engine.returned = before  # type: ignore[attr-defined]
        if not engine.config.overlap:
            assert all(d2h[kind]["discarded_bytes"] == 0 for kind in before)


@pytest.fixture(scope="module")
def checks(assert_same: Callable[..., None], join_choices: Callable[..., Any], wait_until_idle: Callable[..., Any]) -> Checks:
    return Checks(assert_same, join_choices, wait_until_idle)


AMPLE, SCARCE = 4096, 144  # KV tokens; the longest request needs 128


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "alone"])
@pytest.mark.parametrize("kv_tokens", [AMPLE, SCARCE], ids=["ample", "scarce"])
@pytest.mark.parametrize("page_size", [1, 16], ids=["page1", "page16"])
@pytest.mark.parametrize("chunk", [16, 512], ids=["chunk16", "chunk512"])
@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
def test_every_combination_gives_the_solo_answer(
    open_engine: Callable[..., Any],
    workload: Workload,
    checks: Checks,
    overlap: bool,
    chunk: int,
    page_size: int,
    kv_tokens: int,
    batched: bool,
) -> None:
    """Cold, then warm on the same engine."""
    options = {"overlap": overlap, "chunked_prefill_size": chunk, "page_size": page_size, "kv_tokens": kv_tokens}
    with open_engine(constraint=grammar, **options) as engine:
        cold = checks.run(engine, workload, batched=batched)
        retracted = engine.stats()["retracted"]
        warm = checks.run(engine, workload, batched=batched)
        if batched and kv_tokens == SCARCE:
            assert engine.stats()["retracted"] > retracted > 0
        elif kv_tokens == AMPLE:
            assert engine.stats()["retracted"] == 0
            reused = [name for name in warm if warm[name][0].cached_tokens > cold[name][0].cached_tokens]
            assert len(reused) >= 4, f"the second run was not warm: {reused}"


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
def test_two_threads_give_the_solo_answer_of_one(
    open_engine: Callable[..., Any], workload: Workload, checks: Checks, overlap: bool
) -> None:
    with open_engine(constraint=grammar, overlap=overlap, threads=2, chunked_prefill_size=64) as engine:
        checks.run(engine, workload, batched=True)
        checks.run(engine, workload, batched=False)


@pytest.mark.parametrize("longest_prefix_first", [False, True], ids=["fcfs", "lpm"])
@pytest.mark.parametrize("disable_radix_cache", [False, True], ids=["cache", "no cache"])
def test_few_slots_and_a_small_arena_give_the_solo_answer(
    open_engine: Callable[..., Any], workload: Workload, checks: Checks, longest_prefix_first: bool, disable_radix_cache: bool
) -> None:
    """The queue is long, and a step's outputs do not fit: the scheduler makes batches smaller."""
    with open_engine(
        constraint=grammar,
        overlap=True,
        chunked_prefill_size=40,
        page_size=4,
        max_running_requests=5,
        arena_memory=2048,  # a row of three layers takes 768 bytes
        disable_radix_cache=disable_radix_cache,
        schedule_policy="lpm" if longest_prefix_first else "fcfs",
    ) as engine:
        checks.run(engine, workload, batched=True)
        checks.run(engine, workload, batched=True)


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "alone"])
@pytest.mark.parametrize("page_size", [1, 16], ids=["page1", "page16"])
def test_a_request_may_be_retracted_at_any_moment(
    open_engine: Callable[..., Any], workload: Workload, checks: Checks, overlap: bool, batched: bool, page_size: int
) -> None:
    """Memory that runs short takes the pages of whoever was admitted last; here anybody's are taken, in the middle of anything."""
    with open_engine(
        constraint=grammar, overlap=overlap, chunked_prefill_size=16, page_size=page_size, streams=open_poisoned_streams()
    ) as engine:
        scheduler, choose = engine.loop.scheduler, random.Random(page_size)
        next_batch = scheduler.next_batch
        victims = set()

        def retracting() -> Any:
            able = [request for request in scheduler.running if not request.launched_all and not request.aborting]
            for victim in able:
                if choose.random() < 0.15:
                    victims.add(victim.rid)
                    scheduler._retract(victim, _Step(0, 0))
            return next_batch()

        scheduler.next_batch = retracting
        checks.run(engine, workload, batched=batched)
        if not batched:
            cold = engine.generate([7] * 40, greedy(30, ignore_eos=True))
            assert cold.cached_tokens == 0, "its own pages, after it was retracted, are not what it found when it was admitted"
        assert len(victims) >= 15, victims


# The amplifier: two streams that delay at random, freed pages and arena blocks filled with NaN.


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("overlap", "chunk", "page_size", "kv_tokens"),
    [(True, 16, 1, SCARCE), (True, 512, 16, AMPLE), (True, 512, 16, SCARCE), (False, 512, 16, SCARCE)],
    ids=["overlap-chunk16-page1-scarce", "overlap-chunk512-page16-ample", "overlap-chunk512-page16-scarce", "normal-chunk512-page16"],
)
def test_the_race_amplifier_finds_nothing(
    open_engine: Callable[..., Any],
    workload: Workload,
    checks: Checks,
    overlap: bool,
    chunk: int,
    page_size: int,
    kv_tokens: int,
    seed: int,
) -> None:
    streams = open_amplified_streams(threads=1, seed=seed)
    options = {"overlap": overlap, "chunked_prefill_size": chunk, "page_size": page_size, "kv_tokens": kv_tokens}
    with open_engine(streams=streams, constraint=grammar, **options) as engine:
        checks.run(engine, workload, batched=True)  # a NaN equals nothing
        if kv_tokens == SCARCE:
            assert engine.stats()["retracted"] > 0


# Streams.


def never_shown_too_early(parts: Sequence[Output], stops: Sequence[str]) -> None:
    """While the request runs, what is shown never ends in a proper prefix of a stop string, and never inside a character."""
    shown = ""
    for part in parts[:-1]:
        shown += part.text
        for stop in stops:
            for length in range(1, len(stop)):
                assert not shown.endswith(stop[:length]), f"{shown!r} ends in the beginning of {stop!r}"


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
def test_the_parts_of_a_stream_add_up_to_the_answer(
    open_engine: Callable[..., Any], workload: Workload, checks: Checks, overlap: bool
) -> None:
    with open_engine(overlap=overlap, chunked_prefill_size=16, constraint=grammar) as engine:
        for ask in workload.finishing:
            parts = list(engine.stream(ask.prompt, ask.sampling, rid=ask.name, **ask.outputs))
            joined = checks.join_choices(parts)
            for got, want in zip(joined, workload.want[ask.name], strict=True):
                checks.assert_same(got, want, f"{ask.name}[{got.index}]")
                own = [part for part in parts if part.index == got.index]
                never_shown_too_early(own, ask.sampling.stop)
                if want.completion_tokens > 3:
                    assert len(own) > 1


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("hidden", [True, "last"])
def test_held_back_text_takes_its_logprobs_and_rows_along(
    open_engine: Callable[..., Any], workload: Workload, checks: Checks, overlap: bool, choices: int, hidden: bool | str
) -> None:
    """Stop strings begin in many places without being completed; many tokens end in the beginning of one, some span two."""
    prompt = workload.asks[3].prompt
    outputs = {
        "return_hidden_states": hidden,
        "hidden_states_layers": [0, -1],
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "token_ids_logprob": [3],
    }
    with open_engine(overlap=overlap, page_size=4) as engine:
        pieces = {token: engine.tokenizer.token_bytes(token) for token in range(2, 320)}
        letters = [token for token, piece in pieces.items() if all(byte in b"abcdefghijklmnopqrstuvwxyz " for byte in piece)]
        stops = tuple(letter + "~" for letter in "aeilnorstu ") + ("quququ", "edededed")
        sampling = SamplingParams(
            max_new_tokens=60, temperature=2.0, seed=21, n=choices, stop=stops, allowed_token_ids=letters, ignore_eos=True
        )
        answers = engine.generate(prompt, sampling, **outputs)
        parts = list(engine.stream(prompt, sampling, **outputs))
        joined = checks.join_choices(parts)
        answers = answers if choices > 1 else [answers]
        assert len(joined) == choices
        held = split = 0
        for got, want in zip(joined, answers, strict=True):
            checks.assert_same(got, want, f"choice {got.index}")
            own = [part for part in parts if part.index == got.index]
            never_shown_too_early(own, stops)
            position = len(prompt)
            for at, part in enumerate(own):
                held += len(part.token_ids) > 1
                split += part.text != engine.tokenizer.decode(part.token_ids)
                # A part carries just the numbers of its own tokens, the first one the prompt's too.
                assert len(part.logprobs.output) == len(part.logprobs.output_top) == len(part.logprobs.output_ids) == len(part.token_ids)
                assert len(part.logprobs.input) == (0 if at else len(prompt))
                if hidden is True:
                    rows = range(position - 1, position - 1 + len(part.token_ids))
                    assert list(part.hidden_states.positions) == (list(rows) if at else list(range(rows.stop)))
                elif part.finish_reason is None:
                    assert list(part.hidden_states.positions) == []
                position += len(part.token_ids)
        assert held >= 5, "nothing was ever held back"
        assert split >= 2, "no token was shown in part"


# The default model.

PAIRWISE = [  # every pair of values of two columns appears: overlap, chunk, page, KV tokens, batched, warm
    (False, 16, 1, AMPLE, False, False),
    (False, 16, 16, AMPLE, True, True),
    (False, 512, 1, SCARCE, True, False),
    (False, 512, 16, SCARCE, False, True),
    (True, 16, 1, SCARCE, False, True),
    (True, 16, 16, SCARCE, True, False),
    (True, 512, 1, AMPLE, True, True),
    (True, 512, 16, AMPLE, False, False),
]


def test_the_pairs_are_complete() -> None:
    for first in range(6):
        for second in range(first):
            assert len({(row[first], row[second]) for row in PAIRWISE}) == 4


@pytest.fixture(scope="module")
def default_workload(open_engine: Callable[..., Any], default_model: Path) -> Workload:
    """Text that means something, cut where the requests of the workload want it. It must not change: PyTorch rounds differently for other
    shapes, and with another text a random number may be so near to the edge between two tokens that it decides.
    """
    text = (Path(__file__).parents[2] / "benchmarks" / "data" / "prose.txt").read_text()
    with ExitStack() as stack:
        engine = stack.enter_context(
            open_engine(default_model, disable_radix_cache=True, overlap=False, context_length=512, constraint=grammar)
        )
        ids, at = engine.tokenizer.encode(text), 0

        def tokens(count: int) -> list[int]:
            nonlocal at
            at += count
            return ids[at - count : at]

        class Fresh:  # without a cache an engine is as good as new
            def __enter__(self) -> Engine:
                return engine

            def __exit__(self, *_: object) -> None:
                pass

        return reference(Fresh, tokens)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("overlap", "chunk", "page_size", "kv_tokens", "batched", "warm"), PAIRWISE)
def test_pairs_of_options_give_the_solo_answer_on_the_default_model(
    open_engine: Callable[..., Any],
    default_model: Path,
    default_workload: Workload,
    checks: Checks,
    overlap: bool,
    chunk: int,
    page_size: int,
    kv_tokens: int,
    batched: bool,
    warm: bool,
) -> None:
    options = {"overlap": overlap, "chunked_prefill_size": chunk, "page_size": page_size, "kv_tokens": kv_tokens}
    with open_engine(default_model, constraint=grammar, **options) as engine:
        for _ in range(1 + warm):
            checks.run(engine, default_workload, batched=batched)
        if batched and kv_tokens == SCARCE:
            assert engine.stats()["retracted"] > 0
