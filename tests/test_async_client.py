"""`AsyncEngine`: the answers of `Engine`, from a process that lives as long as its owner."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sidestream import AsyncEngine, ConfigError, Engine, EngineDead, InvalidRequest, ModelError, QueueFull, SamplingParams, SlowReader
from sidestream.async_stream import Mailbox
from sidestream.errors import ContextLengthExceeded
from sidestream.messages import Inbound, Submit

OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "kv_tokens": 4096, "log_level": "error", "threads": 1}  # beside other tests
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=400, temperature=0.0, ignore_eos=True)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 100))


def exists(pid: int) -> bool:
    """Whether the process runs: one that nobody has waited for yet does not."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_answers_are_those_of_an_engine_in_this_process(tiny_llama: Path) -> None:
    wanted = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3, "return_hidden_states": True}
    prompts = ["Once upon a time", [5, 6, 7], "The quick brown fox"]
    with Engine(str(tiny_llama), **OPTIONS) as engine:
        want = engine.generate(prompts, GREEDY, **wanted)

    async def work() -> None:
        async with AsyncEngine(str(tiny_llama), **OPTIONS) as engine:
            got = await engine.generate(prompts, GREEDY, **wanted)
            assert isinstance(got, list) and isinstance(want, list)
            for ours, theirs in zip(got, want, strict=True):
                assert (ours.text, ours.token_ids, ours.finish_reason) == (theirs.text, theirs.token_ids, theirs.finish_reason)
                assert ours.logprobs == theirs.logprobs
                assert ours.hidden_states.raw.tobytes() == theirs.hidden_states.raw.tobytes()
                assert ours.hidden_states.positions == theirs.hidden_states.positions
                assert ours.hidden_states.data.shape == theirs.hidden_states.data.shape
            parts = [part async for part in engine.stream(prompts[0], GREEDY, return_hidden_states=True)]
            assert "".join(part.text for part in parts) == want[0].text and len(parts) > 1
            assert b"".join(part.hidden_states.raw.tobytes() for part in parts) == want[0].hidden_states.raw.tobytes()
            await engine.check()

    run(work())


def test_questions_aborts_and_refusals(tiny_llama: Path) -> None:
    async def work() -> None:
        async with AsyncEngine(str(tiny_llama), max_running_requests=2, max_queued_requests=1, **OPTIONS) as engine:
            assert engine.context_length == 512 and engine.facts.name == "tiny-llama"
            with pytest.raises(InvalidRequest, match="prompt: got an empty prompt"):
                await engine.generate("")
            with pytest.raises(InvalidRequest, match="token id 320, must be between 0 and 319"):
                await engine.generate([320])
            with pytest.raises(ContextLengthExceeded, match=r"length is 512 tokens\. However, the prompt has 2000000 tokens"):
                await engine.generate([320] * 2_000_000)
            with pytest.raises(ContextLengthExceeded, match=r"length is 512 tokens\. However, the prompt has more than 1024 tokens"):
                await engine.generate("word " * 2_000_000)
            answering = asyncio.ensure_future(engine.generate([5, 6], LONG, rid="mine"))
            while not (await engine.stats())["running"]:
                await asyncio.sleep(0.01)
            with pytest.raises(QueueFull):
                await engine.generate([[5, 6]] * 3, LONG, wait=False)
            await engine.abort("mine")
            output = await answering
            assert not isinstance(output, list) and output.finish_reason == "abort"
            await engine.generate(list(range(10, 60)), GREEDY)
            assert await engine.flush_cache() >= 48
            cancelled = asyncio.ensure_future(engine.generate([[7, 8]] * 5, LONG))
            while not (await engine.stats())["running"]:
                await asyncio.sleep(0.01)
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            while (await engine.stats())["running"]:
                await asyncio.sleep(0.01)
            await engine.check()

    run(work())


def test_other_weights_leave_nothing_of_the_old_ones(tiny_llama: Path, tmp_path: Path) -> None:
    """The cache of the old weights is not used; requests made before end with them; weights that do not fit change nothing."""
    import torch
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (other / name).write_bytes((tiny_llama / name).read_bytes())
    torch.manual_seed(7)
    weights = load_file(tiny_llama / "model.safetensors")
    save_file({name: weight + 0.05 * torch.randn_like(weight) for name, weight in weights.items()}, other / "model.safetensors")
    prompt = list(range(10, 60))
    with Engine(str(tiny_llama), **OPTIONS) as old, Engine(str(other), **OPTIONS) as new:
        before, after = (engine.generate(prompt, LONG, return_hidden_states="last") for engine in (old, new))
        with pytest.raises(ModelError, match="nowhere"):
            old.update_weights(str(tmp_path / "nowhere"))
        again = old.generate(prompt, LONG, return_hidden_states="last")
    assert before.token_ids != after.token_ids and again.token_ids == before.token_ids

    async def work() -> None:
        async with AsyncEngine(str(tiny_llama), **OPTIONS) as engine:
            earlier = asyncio.ensure_future(engine.generate(prompt, LONG, return_hidden_states="last"))
            while not (await engine.stats())["running"]:
                await asyncio.sleep(0.01)
            updating = asyncio.ensure_future(engine.update_weights(str(other)))
            await asyncio.sleep(0.05)
            later = asyncio.ensure_future(engine.generate(prompt, LONG, return_hidden_states="last"))
            assert await updating == 1
            old, new = await earlier, await later
            assert not isinstance(old, list) and not isinstance(new, list)
            assert (old.token_ids, new.token_ids, new.cached_tokens) == (before.token_ids, after.token_ids, 0)
            assert new.hidden_states.raw.tobytes() == after.hidden_states.raw.tobytes()
            assert (await engine.stats())["weight_version"] == 1

    run(work())


def test_a_killed_engine_ends_every_request_with_an_error(tiny_llama: Path) -> None:
    async def work() -> None:
        async with AsyncEngine(str(tiny_llama), **OPTIONS) as engine:
            whole = asyncio.ensure_future(engine.generate([[5, 6], [7, 8]], LONG))
            parts = engine.stream([9, 10], LONG)
            await parts.__anext__()
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            started = time.monotonic()
            with pytest.raises(EngineDead, match="ended by signal 9"):
                await whole
            with pytest.raises(EngineDead, match="ended by signal 9"):
                async for _ in parts:
                    pass
            with pytest.raises(EngineDead):
                await engine.stats()
            assert "signal 9" in str(await engine.wait())
            assert time.monotonic() - started < 2.0, "a promise of the contract, not a benchmark"

    run(work())


def test_a_killed_owner_takes_its_engine_along(tiny_llama: Path) -> None:
    script = f"""
import asyncio
from sidestream import AsyncEngine, SamplingParams
async def main():
    async with AsyncEngine({str(tiny_llama)!r}, **{OPTIONS!r}) as engine:
        print(engine.pid, flush=True)
        await engine.generate([5, 6], SamplingParams(max_new_tokens=400, ignore_eos=True))
        await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.kill()
    until = time.monotonic() + 2.0
    while exists(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not exists(pid)


def test_an_engine_that_cannot_start_says_why(tiny_llama: Path, tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(ConfigError, match="page_size: got 3"):
            AsyncEngine(str(tiny_llama), page_size=3)
        with pytest.raises(ModelError, match="nowhere"):
            await AsyncEngine(str(tmp_path / "nowhere"), **OPTIONS).start()
        idle = AsyncEngine(str(tiny_llama), **OPTIONS)
        with pytest.raises(EngineDead, match="was not started"):
            await idle.generate([5, 6])
        await idle.close()

    run(work())


def test_a_slow_reader_is_told_and_costs_nobody_else() -> None:
    given_up = []

    async def work() -> None:
        mailbox = Mailbox(lambda: given_up.append(True))
        for _ in range(5000):
            mailbox.put(None)
        assert given_up == [True]
        event = await mailbox.get()
        assert isinstance(event, SlowReader) and "4097 parts" in str(event)

    run(work())


def test_numbers_of_any_size_cross_to_the_engine(tiny_llama: Path) -> None:
    """Beyond the context they mean what they mean at its end. A request that cannot be sent leaves nothing behind."""
    huge = 10**40

    async def work() -> None:
        async with AsyncEngine(str(tiny_llama), context_length=64, **OPTIONS) as engine:
            sampling = SamplingParams(max_new_tokens=huge, min_new_tokens=huge - 1, temperature=0.0)
            output = await engine.generate([5, 6], sampling, return_hidden_states=True, hidden_states_start=huge)
            assert not isinstance(output, list)
            assert (output.completion_tokens, output.finish_reason) == (62, "length")
            assert output.hidden_states.shape == (0, 1, 64)
            parts = [part async for part in engine.stream([5, 6], sampling)]
            assert [token for part in parts for token in part.token_ids] == list(output.token_ids)

            send = engine.router._send

            def refuse(message: Inbound) -> None:
                if isinstance(message, Submit):
                    raise OverflowError("too large")
                send(message)

            engine.router._send = refuse
            with pytest.raises(OverflowError):
                engine.stream([5, 6])
            assert not engine.router.prompts

    run(work())


@pytest.mark.parametrize("given", [None, "77"])
def test_the_engine_does_not_spin_for_long(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    """Unless somebody says so: another process that uses a core would bring it nearly to a stop."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if given is not None:
        monkeypatch.setenv("GOMP_SPINCOUNT", given)

    async def work() -> None:
        async with AsyncEngine(str(tiny_llama), **OPTIONS) as engine:
            environment = Path(f"/proc/{engine.pid}/environ").read_bytes().split(b"\0")
            assert f"GOMP_SPINCOUNT={given or 3000}".encode() in environment

    run(work())
