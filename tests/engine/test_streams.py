"""Streams and events: order, errors, and the race amplifier."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from sidestream.engine.streams import CpuEvent, CpuStream, CudaStream, DelayedCpuStream, open_amplified_streams, open_streams


@pytest.fixture
def stream() -> Iterator[CpuStream]:
    stream = CpuStream("test", threads=1)
    yield stream
    stream.close()


def test_work_runs_in_order_on_one_other_thread(stream: CpuStream) -> None:
    seen: list[tuple[int, int]] = []
    for i in range(100):
        stream.launch(lambda i=i: seen.append((i, threading.get_ident())))
    stream.record().synchronize()
    assert [i for i, _ in seen] == list(range(100))
    assert len({ident for _, ident in seen}) == 1
    assert seen[0][1] != threading.get_ident()


def test_result_waits_and_returns_the_value(stream: CpuStream) -> None:
    gate = threading.Event()
    launched = stream.launch(lambda a, b: (gate.wait(5), a + b)[1], 2, 3)
    event = stream.record()
    assert not event.query()
    gate.set()
    assert launched.result() == 5
    event.synchronize()
    assert event.query()


def test_work_launched_from_the_worker_is_in_its_turn(stream: CpuStream) -> None:
    order: list[str] = []

    def outer() -> None:
        order.append("outer begins")
        assert stream.launch(lambda: order.append("inner")).result() is None
        assert stream.record().query()
        order.append("outer ends")

    stream.launch(outer)
    stream.launch(lambda: order.append("next"))
    stream.record().synchronize()
    assert order == ["outer begins", "inner", "outer ends", "next"]


def test_an_error_reaches_the_result_and_every_later_event(stream: CpuStream) -> None:
    before = stream.record()
    launched = stream.launch(lambda: 1 // 0)
    after = stream.record()
    before.synchronize()
    with pytest.raises(ZeroDivisionError):
        launched.result()
    with pytest.raises(ZeroDivisionError):
        after.synchronize()
    assert stream.launch(lambda: "still running").result() == "still running"
    with pytest.raises(ZeroDivisionError):
        stream.record().synchronize()


def test_one_stream_waits_for_another(stream: CpuStream) -> None:
    other = CpuStream("other")
    written: list[int] = []
    stream.launch(lambda: (time.sleep(0.05), written.append(1)))
    other.wait(stream.record())
    seen = other.launch(lambda: list(written))
    assert seen.result() == [1]
    stream.launch(lambda: 1 // 0)
    other.wait(stream.record())
    with pytest.raises(ZeroDivisionError):
        other.record().synchronize()
    other.close()


def test_the_worker_is_in_inference_mode_with_its_own_number_of_threads(stream: CpuStream) -> None:
    assert stream.launch(torch.is_inference_mode_enabled).result() is True
    assert stream.launch(torch.get_num_threads).result() == 1
    assert not torch.is_inference_mode_enabled()


def test_close_finishes_what_was_launched() -> None:
    stream, done = CpuStream("test"), []
    for i in range(5):
        stream.launch(lambda i=i: (time.sleep(0.005), done.append(i)))
    stream.close()
    assert done == [0, 1, 2, 3, 4]


def test_on_the_cpu_both_streams_are_the_same_worker() -> None:
    streams = open_streams(torch.device("cpu"), 1)
    assert streams.compute is streams.side and not streams.poison
    streams.close()


def test_the_amplifier_delays_and_keeps_each_streams_own_order() -> None:
    streams = open_amplified_streams(threads=1, seed=3)
    assert isinstance(streams.compute, DelayedCpuStream) and streams.side is not streams.compute and streams.poison
    order: list[str] = []
    for i in range(30):
        streams.compute.launch(lambda i=i: order.append(f"c{i}"))
        streams.side.launch(lambda i=i: order.append(f"s{i}"))
    streams.close()
    assert [x for x in order if x[0] == "c"] == [f"c{i}" for i in range(30)]
    assert [x for x in order if x[0] == "s"] == [f"s{i}" for i in range(30)]
    assert order != [f"{name}{i}" for i in range(30) for name in "cs"], "without events nothing orders the two"


def test_the_amplifier_reads_too_early_where_no_event_orders() -> None:
    """What it is for: a side stream that does not wait for its writer sees old values; the sleeps are real and repeat with the seed."""
    stale = 0
    for seed in range(3):
        streams = open_amplified_streams(threads=1, seed=seed)
        written, seen = [-1], []
        for i in range(20):
            streams.compute.launch(lambda i=i, written=written: written.__setitem__(0, i))
            seen.append(streams.side.launch(lambda written=written: written[0]))
        stale += sum(launched.result() < i for i, launched in enumerate(seen))
        streams.close()
    assert stale > 0
    started = time.perf_counter()
    slow = DelayedCpuStream("slow", seed=1, longest_ms=20)
    for _ in range(20):
        slow.launch(lambda: None)
    slow.close()
    assert time.perf_counter() - started > 0.05, "half of the 20 items wait for 10 ms on average"


def test_the_amplifier_respects_events() -> None:
    streams = open_amplified_streams(threads=1, seed=5)
    written, seen = [-1], []
    for i in range(30):
        streams.compute.launch(lambda i=i: written.__setitem__(0, i))
        streams.side.wait(streams.compute.record())
        seen.append(streams.side.launch(lambda: written[0]))
    assert all(launched.result() >= i for i, launched in enumerate(seen))
    streams.close()


def test_an_event_carries_the_error_it_was_completed_with() -> None:
    event = CpuEvent()
    event.complete(ValueError("lost"))
    with pytest.raises(ValueError, match="lost"):
        event.synchronize()


@pytest.mark.gpu
def test_cuda_streams_order_copies_after_the_kernels_they_need() -> None:
    device = torch.device("cuda")
    streams = open_streams(device, None)
    assert isinstance(streams.compute, CudaStream) and streams.side is not streams.compute
    source = streams.compute.launch(lambda: torch.zeros(1 << 24, device=device)).result()
    target = torch.empty(1 << 24, pin_memory=True)
    for i in range(1, 5):
        streams.compute.launch(source.fill_, i)
        streams.side.wait(streams.compute.record())
        streams.side.launch(lambda: target.copy_(source, non_blocking=True))
        event = streams.side.record()
        streams.compute.wait(event)
        event.synchronize()
        assert event.query() and bool((target == i).all())
    with pytest.raises(ZeroDivisionError):
        streams.compute.launch(lambda: 1 // 0)
    streams.close()
