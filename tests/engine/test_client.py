"""The life of an `Engine` and of its calls: dropping, closing, ids, held-back prompts, streams."""

from __future__ import annotations

import gc
import platform
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from sidestream import Engine, SamplingParams
from sidestream.errors import EngineDead, InvalidRequest, ModelError

Opener = Callable[..., Any]
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_tokens": 4096, "log_level": "warning"}


def on(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True, **more)


def until(true: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread that makes the call, and what comes of it: the answer or the error."""
    out: list[Any] = []

    def run() -> None:
        try:
            out.append(call())
        except BaseException as error:
            out.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, out


@pytest.fixture(scope="module")
def engine(open_engine: Opener) -> Iterator[Engine]:
    with open_engine() as opened:
        yield opened


# Dropping.


def test_a_dropped_engine_is_collected_and_its_threads_end(tiny_llama: Path) -> None:
    before = set(threading.enumerate())
    engine = Engine(str(tiny_llama), **OPTIONS)
    assert engine.generate([5, 6], on(2)).completion_tokens == 2
    threads = set(threading.enumerate()) - before
    assert len(threads) >= 3
    kept = [weakref.ref(each) for each in (engine, engine._parts.loop, engine._parts.loop.runner.decoder)]
    del engine
    gc.collect()
    assert kept[0]() is None
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive(), thread
    gc.collect()
    assert [each() for each in kept] == [None] * 3


def test_an_engine_lives_as_long_as_a_stream_is_read(tiny_llama: Path) -> None:
    parts = Engine(str(tiny_llama), **OPTIONS).stream([5, 6], on(30))
    gc.collect()
    assert [part.finish_reason for part in parts][-1] == "length"


def test_an_engine_that_was_not_closed_does_not_hold_up_the_exit(tiny_llama: Path) -> None:
    """One is dropped just before, one is in the middle of an answer that another thread waits for."""
    script = f"""
import contextlib, threading
from sidestream import Engine, SamplingParams
from sidestream.errors import EngineDead
def ask():
    with contextlib.suppress(EngineDead):
        busy.generate([[5, 6]] * 300, long)
dropped, busy = (Engine({str(tiny_llama)!r}, **{OPTIONS!r}) for _ in range(2))
long = SamplingParams(max_new_tokens=400, ignore_eos=True)
parts = busy.stream([5, 6], long)
next(parts)
threading.Thread(target=ask, daemon=True).start()
del dropped
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Memory.


def test_a_closed_engine_holds_no_weights(tiny_llama: Path) -> None:
    with Engine(str(tiny_llama), **OPTIONS) as engine:
        engine.generate([5, 6], on(2), return_hidden_states=True)
        runner = engine._parts.loop.runner
        kept = [weakref.ref(each) for each in (runner.decoder, runner.memory, runner.copies.arena)]
    gc.collect()
    assert [each() for each in kept] == [None] * 3
    assert engine.context_length == 512


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs malloc_trim")
def test_a_model_without_a_tokenizer_takes_another(tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llama, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    sampling = SamplingParams(max_new_tokens=5, temperature=0.0)
    with Engine(str(tiny_llama), **OPTIONS) as engine:
        want = engine.generate("abc", sampling)
    with Engine(str(tmp_path / "model"), tokenizer=str(tmp_path / "tokenizer.json"), **OPTIONS) as engine:
        assert (answer := engine.generate("abc", sampling)).text == want.text and answer.token_ids == want.token_ids
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Engine(str(tmp_path / "model"), **OPTIONS)


def test_memory_is_flat_over_engines(tiny_llama: Path, tmp_path: Path) -> None:
    """Within half of the weights, which take 63 MB."""
    config = LlamaConfig(
        vocab_size=320, hidden_size=512, intermediate_size=1408, num_hidden_layers=5, num_attention_heads=8, max_position_embeddings=512
    )
    model = LlamaForCausalLM(config)
    assert 60e6 < sum(weight.nbytes for weight in model.parameters()) < 70e6
    model.save_pretrained(tmp_path)
    shutil.copy(tiny_llama / "tokenizer.json", tmp_path)
    script = f"""
import resource
from pathlib import Path
from sidestream import Engine, SamplingParams
for cycle in range(8):
    with Engine({str(tmp_path)!r}, **{OPTIONS!r}) as engine:
        engine.generate([[5, 6, 7]] * 8, SamplingParams(max_new_tokens=4, ignore_eos=True), return_hidden_states=True)
    print(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    resident = [int(line) for line in done.stdout.split()]
    # Single ones may be higher: glibc does not trim the end of a thread's heap, but the next thread takes it. Growth would stay.
    assert min(resident[4:]) - resident[0] < 30e6, resident


def test_repr_says_what_it_is(open_engine: Opener, tiny_llama: Path) -> None:
    with open_engine() as engine:
        assert repr(engine) == "_TestEngine('tiny-llama', device='cpu', dtype='float32', open)"
    assert repr(engine).endswith(", closed)")


# Ids and prompts that are held back.


def test_an_open_id_anywhere_in_a_call_queues_nothing(open_engine: Opener) -> None:
    with open_engine(max_running_requests=1, max_queued_requests=1) as engine:
        parts = engine.stream([5, 6], on(100), rid="mine")
        next(parts)
        with pytest.raises(InvalidRequest, match=r"rid: got 'mine'"):
            engine.generate([[7, 8], [7, 9], [7, 10]], on(2), rid=["first", "second", "mine"])
        assert set(engine._router.prompts) == {"mine"}
        assert engine.stats()["waiting"] == 0
        # Those of a call are its own from the beginning, also while they are held back.
        thread, out = in_thread(lambda: engine.generate([[7, 8], [7, 9], [7, 10]], on(2), rid=["first", "second", "third"]))
        until(lambda: "third" in engine._router.prompts)
        with pytest.raises(InvalidRequest, match=r"rid: got 'third'"):
            engine.generate([7, 8], on(1), rid="third")
        parts.close()
        thread.join(timeout=20)
        assert [output.rid for output in out[0]] == ["first", "second", "third"]
        until(lambda: not engine._router.prompts)
        assert engine.generate([7, 8], on(1), rid="third").completion_tokens == 1


def test_a_prompt_that_is_held_back_can_be_aborted(open_engine: Opener) -> None:
    rids = ["running", "waiting", "held", "pair", "last"]
    with open_engine(max_running_requests=1, max_queued_requests=1) as engine:
        sampling = [on(100), on(3), on(3), on(3, n=2), on(3)]
        outputs = {"return_hidden_states": True, "logprob_start_len": 0}
        thread, out = in_thread(lambda: engine.generate([[5, 6]] * 5, sampling, rid=rids, **outputs))
        until(lambda: "last" in engine._router.prompts)
        engine.abort("held")
        engine.abort("pair")
        engine.abort("pair")  # over already
        assert engine.generate([7, 8], on(2), rid="held").completion_tokens == 2  # its id is free
        thread.join(timeout=20)
        assert [output.rid for output in out[0]] == ["running", "waiting", "held", "pair", "pair", "last"]
        assert [output.finish_reason for output in out[0]] == ["length", "length", "abort", "abort", "abort", "length"]
        assert [output.index for output in out[0]] == [0, 0, 0, 0, 1, 0]
        for output in out[0][2:5]:
            assert (output.text, output.token_ids, output.completion_tokens, output.cached_tokens) == ("", [], 0, 0)
            assert output.copied_bytes == {"token": 0, "logprob": 0, "hidden": 0}
            assert output.hidden_states.data.shape == (0, 1, 64)
            assert output.logprobs.output == []


def test_a_call_whose_prompts_are_all_held_back_ends_when_they_are_aborted(open_engine: Opener) -> None:
    with open_engine(max_running_requests=1, max_queued_requests=1) as engine:
        others = [engine.stream([5, 6], on(300)) for _ in range(2)]
        thread, out = in_thread(lambda: engine.generate([[7, 8], [7, 9]], on(2), rid=["a", "b"]))
        until(lambda: "b" in engine._router.prompts)
        engine.abort("b")
        engine.abort("a")
        thread.join(timeout=20)
        assert [output.finish_reason for output in out[0]] == ["abort", "abort"]
        for parts in others:
            parts.close()


def test_calls_take_turns_when_places_become_free(open_engine: Opener) -> None:
    with open_engine(max_running_requests=1, max_queued_requests=1) as engine:
        large, _ = in_thread(lambda: engine.generate([[5, 6]] * 200, on(4)))
        until(lambda: len(engine._router.prompts) > 100)
        assert engine.generate([7, 8], on(1)).completion_tokens == 1
        assert large.is_alive(), "the small call waited for the whole of the large one"
        large.join(timeout=60)


def test_an_interrupted_call_gives_everything_up(open_engine: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(max_running_requests=1, max_queued_requests=1) as engine:

        def interrupted(*args: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("sidestream.client.finished", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[5, 6]] * 5, on(300), rid=list("abcde"))
        monkeypatch.undo()
        until(lambda: not engine._router.prompts)
        assert [output.rid for output in engine.generate([[5, 6]] * 5, on(2), rid=list("abcde"))] == list("abcde")


def test_closing_ends_a_call_that_holds_prompts_back(open_engine: Opener) -> None:
    with open_engine(max_running_requests=1, max_queued_requests=1, checked=False) as engine:
        thread, out = in_thread(lambda: engine.generate([[5, 6]] * 50, on(400)))
        until(lambda: engine.stats()["running"])
        engine.close()
        thread.join(timeout=20)
        assert isinstance(out[0], EngineDead)


def test_nobody_waits_when_answers_cannot_be_routed(open_engine: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(step: Any) -> None:
        raise RuntimeError("out of luck")

    with open_engine(checked=False) as engine:
        monkeypatch.setattr(engine._router, "_route", broken)
        with pytest.raises(EngineDead, match="out of luck"):
            engine.generate([5, 6], on(5))
        with pytest.raises(EngineDead, match="out of luck"):
            engine.stream([5, 6], on(5))
        assert repr(engine).endswith(", stopped by RuntimeError)")


# Streams.


def test_a_stream_closed_in_another_thread_ends_where_it_is_read(open_engine: Opener) -> None:
    with open_engine(max_running_requests=1) as engine:
        running = engine.stream([5, 6], on(400))
        waiting = engine.stream([7, 8], on(400), rid="waiting")  # nothing of it will come while the other one runs
        next(running)
        thread, out = in_thread(lambda: list(waiting))
        time.sleep(0.05)
        waiting.close()
        thread.join(timeout=20)
        assert not thread.is_alive() and out == [[]]
        assert list(waiting) == []
        assert next(running).finish_reason is None  # the other one goes on
        running.close()
        until(lambda: not engine._router.prompts)
        assert engine.generate([7, 8], on(2), rid="waiting").completion_tokens == 2


def test_two_threads_may_read_one_stream(open_engine: Opener) -> None:
    with open_engine() as engine:
        parts = engine.stream([5, 6], on(60))
        readers = [in_thread(lambda: list(parts)) for _ in range(2)]
        for thread, _ in readers:
            thread.join(timeout=20)
            assert not thread.is_alive()
        assert sum(len(part.token_ids) for _, out in readers for part in out[0]) == 60


@pytest.mark.parametrize("leave", ["with", "drop"])
def test_leaving_a_stream_aborts_its_request(open_engine: Opener, wait_until_idle: Callable[..., Any], leave: str) -> None:
    with open_engine() as engine:
        if leave == "with":
            with engine.stream([5, 6], on(400)) as parts:
                next(parts)
            with pytest.raises(StopIteration):
                next(parts)
        else:
            parts = engine.stream([5, 6], on(400))
            next(parts)
            del parts
            gc.collect()
        assert wait_until_idle(engine)["steps"] < 350
        until(lambda: not engine._router.prompts)


def test_a_stream_read_to_its_end_stays_ended(open_engine: Opener) -> None:
    with open_engine() as engine:
        with engine.stream([5, 6], on(5), rid="mine") as parts:
            assert [part.finish_reason for part in parts][-1] == "length"
            again = engine.stream([5, 6], on(5), rid="mine")
        parts.close()
        assert list(parts) == []
        assert [part.finish_reason for part in again][-1] == "length"


def test_a_stream_keeps_no_row_that_it_has_sent(open_engine: Opener) -> None:
    outputs = {"return_hidden_states": True, "logprob_start_len": 0}
    with open_engine() as engine:
        parts = engine.stream([5, 6, 7], on(50), **outputs)
        (choice,) = parts._prompt.choices
        for part in parts:
            assert len(part.hidden_states.positions) >= 1
            assert choice.rows == [] and len(choice._unsent) <= 4
        # The prompt's rows serve every choice, and are kept until the last one has begun.
        parts = engine.stream([5, 6, 7], on(50, n=3), **outputs)
        begun, first = set(), parts._prompt.choices[0]
        for part in parts:
            begun.add(part.index)
            assert len(first.rows) == (len(begun) < 3)
        assert begun == {0, 1, 2}


# Mistakes.


@pytest.mark.parametrize(
    ("field", "message", "call"),
    [
        ("prompts", "got an array of 0 dimensions, must be 1 (a prompt)", lambda e: e.generate(np.array(5))),
        ("prompts", "got an array of 3 dimensions", lambda e: e.generate(np.zeros((1, 1, 1), int))),
        ("prompts", "got NoneType, must be text, token ids, or a list of them", lambda e: e.generate(None)),
        ("prompt", "got a list with 'a' in it, must be one prompt: text or token ids", lambda e: e.stream(["a", "b"])),
        ("prompt", "got a list with [5, 6] in it, must be one prompt", lambda e: e.stream(np.array([[5, 6]]))),
        ("prompt", "got a list with 'a' in it, must be one prompt", lambda e: e.generate([["a", "b"]])),
        ("prompt", "got ndarray, must be text or a list of token ids", lambda e: e.stream(np.array(5))),
        ("max_new_tokens", "It goes into SamplingParams(max_new_tokens=...).", lambda e: e.generate("a", max_new_tokens=3)),
        ("max_new_tokens", "It goes into SamplingParams(max_new_tokens=...).", lambda e: e.stream("a", max_new_tokens=3)),
    ],
)
def test_mistakes_are_named(engine: Engine, field: str, message: str, call: Callable[[Engine], Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        call(engine)
    assert refused.value.param == field
    assert message in str(refused.value)


def test_an_arena_too_small_for_one_position_is_named(open_engine: Opener) -> None:
    with open_engine(arena_memory=100) as engine:
        cases = {
            "at least 1028": {"return_hidden_states": True, "hidden_states_layers": [0, 1, 2, 3]},  # 4 + 4 layers of 64 float32
            "at least 172": {"top_logprobs_num": 10},  # 4 + twice 84
        }
        hints = ["hidden_states_layers", "top_logprobs_num or token_ids_logprob"]
        for (limit, outputs), less in zip(cases.items(), hints, strict=True):
            with pytest.raises(InvalidRequest) as refused:
                engine.generate([5, 6], on(1), **outputs)
            assert refused.value.param == "arena_memory"
            assert f"got 100 bytes, must be {limit}" in str(refused.value)
            assert refused.value.hint == f"Raise --arena-memory, or ask for less with {less}."
    with open_engine(arena_memory=3) as engine, pytest.raises(InvalidRequest, match=r"arena_memory: got 3 bytes.* 4: .*\nRaise --arena-m"):
        engine.generate([5, 6], on(1))
