"""Engines that are checked when they close, and comparisons of answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream import Engine, Output
from sidestream.assemble import Assembled, assemble
from sidestream.engine.loop import EngineLoop
from sidestream.engine.request import Constraint
from sidestream.engine.streams import Streams
from sidestream.messages import Submit
from sidestream.output import HiddenStates, Logprobs


class _TestEngine(Engine):
    """An engine with streams and grammars of the test's choice."""

    def __init__(self, model: str, streams: Streams | None, constraint: Callable[[Submit], Constraint | None], **options: Any) -> None:
        self._streams, self._constraint = streams, constraint
        super().__init__(model, **options)

    def _assemble(self) -> Assembled:
        return assemble(self.config, self._outbox.put, streams=self._streams, constraint=self._constraint)

    @property
    def loop(self) -> EngineLoop:
        return self._parts.loop


def _wait_until_idle(engine: Engine, seconds: float = 20.0) -> dict[str, Any]:
    """The statistics once nothing runs, waits or is held by a step in flight."""
    deadline = time.monotonic() + seconds
    while True:
        stats = engine.stats()
        pages = stats["kv_tokens_free"] + stats["kv_tokens_cached"]
        if not stats["running"] and not stats["waiting"] and pages == stats["kv_tokens_total"]:
            return stats
        assert time.monotonic() < deadline, f"still busy, or pages are lost: {stats}"
        time.sleep(0.002)


@pytest.fixture(scope="session")
def wait_until_idle() -> Callable[..., dict[str, Any]]:
    return _wait_until_idle


@pytest.fixture(scope="session")
def open_engine(tiny_llama: Path) -> Callable[..., AbstractContextManager[_TestEngine]]:
    """`with open_engine(overlap=True, ...) as engine`: on the tiny model in float32 unless said. When the block ends well, every page
    must be free or cached, exactly once."""

    @contextmanager
    def opened(
        model: Path | None = None,
        *,
        streams: Streams | None = None,
        constraint: Callable[[Submit], Constraint | None] = lambda _: None,
        checked: bool = True,
        jump: bool = True,
        **options: Any,
    ) -> Iterator[_TestEngine]:
        settings = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_tokens": 4096, "log_level": "warning"} | options
        engine = _TestEngine(str(model or tiny_llama), streams, constraint, **settings)
        if not jump:  # tokens that a grammar leaves no choice of are sampled one by one
            engine.loop.max_jump = 0
        try:
            yield engine
            if checked:
                _wait_until_idle(engine)
                engine.check()
        finally:
            engine.close()

    return opened


# Comparing answers.


def _assert_numbers(got: Sequence[float | None], want: Sequence[float | None], what: str) -> None:
    assert len(got) == len(want), f"{what}: {len(got)} entries, {len(want)} expected"
    for at, (one, other) in enumerate(zip(got, want, strict=True)):
        if one is None or other is None:
            assert one is other, f"{what}[{at}]: {one}, expected {other}"
        else:  # minus infinity equals itself; NaN equals nothing
            assert one == other or abs(one - other) <= 1e-4, f"{what}[{at}]: {one}, expected {other}"


def _assert_pairs(got: Sequence[Any], want: Sequence[Any], what: str) -> None:
    assert len(got) == len(want), f"{what}: {len(got)} entries, {len(want)} expected"
    for at, (one, other) in enumerate(zip(got, want, strict=True)):
        if one is None or other is None:
            assert one is other, f"{what}[{at}]: {one}, expected {other}"
            continue
        _assert_numbers([value for value, _ in one], [value for value, _ in other], f"{what}[{at}]")
        # Which of the tokens that were masked out fill up a list is nobody's business.
        named = [token for value, token in one if value != -math.inf]
        assert named == [token for value, token in other if value != -math.inf], f"{what}[{at}]: {one}, expected {other}"


def _assert_rows(got: Any, want: Any, what: str) -> None:
    assert list(got.positions) == list(want.positions), f"{what}: positions {list(got.positions)}, expected {list(want.positions)}"
    assert got.layers == want.layers
    assert got.data.dtype == want.data.dtype
    assert got.data.shape == want.data.shape == (len(want.positions), len(want.layers), want.data.shape[2])
    # A difference of 1e-6 before the conversion may move a half by one unit in its last place.
    relative = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(got.data.dtype, 1e-6)
    torch.testing.assert_close(got.data, want.data, atol=1e-4, rtol=relative, msg=lambda text: f"{what}: {text}")


def _assert_same(got: Output, want: Output, what: str = "answer") -> None:
    """Token for token the same answer; logprobs and rows within 1e-4. `rid`, `cached_tokens` and the bytes copied may differ."""
    assert list(got.token_ids) == list(want.token_ids), f"{what}: tokens"
    for name in ("text", "finish_reason", "matched_stop", "prompt_tokens", "completion_tokens", "index"):
        assert getattr(got, name) == getattr(want, name), f"{what}: {name} is {getattr(got, name)!r}, expected {getattr(want, name)!r}"
    assert got.completion_tokens == len(got.token_ids)
    assert (got.logprobs is None, got.hidden_states is None) == (want.logprobs is None, want.hidden_states is None), what
    if got.logprobs is not None:
        for name in ("input", "output"):
            _assert_numbers(getattr(got.logprobs, name), getattr(want.logprobs, name), f"{what}: {name}")
        for name in ("input_top", "output_top", "input_ids", "output_ids"):
            _assert_pairs(getattr(got.logprobs, name), getattr(want.logprobs, name), f"{what}: {name}")
    if got.hidden_states is not None:
        _assert_rows(got.hidden_states, want.hidden_states, what)


def _join(parts: Sequence[Output]) -> Output:
    """One answer from the parts of one choice of a stream."""
    first, last = parts[0], parts[-1]
    assert {part.index for part in parts} == {first.index}
    assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    logprobs = hidden = None
    if first.logprobs is not None:
        logprobs = Logprobs(**{f.name: [x for part in parts for x in getattr(part.logprobs, f.name)] for f in fields(Logprobs)})
    if first.hidden_states is not None:
        states = [part.hidden_states for part in parts]
        assert all(len(each.positions) == len(each.data) for each in states)
        positions = [position for each in states for position in each.positions]
        hidden = HiddenStates.of(torch.cat([each.data for each in states]), positions, first.hidden_states.layers)
    return replace(
        last,
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=logprobs,
        hidden_states=hidden,
    )


def _join_choices(parts: Iterable[Output]) -> list[Output]:
    """The answers of a stream, in order of `index`."""
    by_index: dict[int, list[Output]] = {}
    for part in parts:
        by_index.setdefault(part.index, []).append(part)
    return [_join(by_index[index]) for index in sorted(by_index)]


# As fixtures, because with --import-mode=importlib one test file cannot import from another.
@pytest.fixture(scope="session")
def assert_same() -> Callable[..., None]:
    return _assert_same


@pytest.fixture(scope="session")
def join_choices() -> Callable[[Iterable[Output]], list[Output]]:
    return _join_choices
