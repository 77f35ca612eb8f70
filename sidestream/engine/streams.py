"""Ordered queues of device work behind one interface: `torch.cuda` streams on a GPU, one worker thread with a FIFO on the CPU.

`Stream.launch(fn)` runs `fn` in the order of the stream. On CUDA `fn` runs at once on the calling thread and only *enqueues* kernels; on
the CPU `fn` runs later, on the worker, and does the work itself. Code that must be the same for both is written as such functions:
inside one of them everything earlier in the stream has happened, in the stream's order.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

T = TypeVar("T")


class Launched(Generic[T]):
    """The result of launched work, once there is one. `result()` waits for the host part and raises what the work raised."""

    __slots__ = ("_done", "_error", "_value")

    def __init__(self, done: threading.Event | None = None) -> None:
        self._done = done
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self, fn: Callable[..., T], *args: Any) -> Launched[T]:
        try:
            self._value = fn(*args)
        except BaseException as error:  # carried to whoever asks for the result
            self._error = error
        if self._done is not None:
            self._done.set()
        return self

    def result(self) -> T:
        if self._done is not None:
            self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


class Event(Protocol):
    """A marker in a stream: complete when all work before it is."""

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...


class Stream(Protocol):
    def launch(self, fn: Callable[..., T], *args: Any) -> Launched[T]: ...

    def record(self) -> Event: ...

    def wait(self, event: Event) -> None: ...

    def close(self) -> None: ...


class CudaStream:
    """A CUDA stream. `launch` enqueues and returns; errors of the host part are raised at once."""

    def __init__(self, device: torch.device) -> None:
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def launch(self, fn: Callable[..., T], *args: Any) -> Launched[T]:
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            launched = Launched[T]().run(fn, *args)
        launched.result()
        return launched

    def record(self) -> Event:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event  # type: ignore[no-any-return]

    def wait(self, event: Event) -> None:
        self.stream.wait_event(event)

    def close(self) -> None:
        self.stream.synchronize()


class CpuEvent:
    def __init__(self) -> None:
        self._set = threading.Event()
        self._error: BaseException | None = None

    def complete(self, error: BaseException | None = None) -> None:
        self._error = error
        self._set.set()

    def synchronize(self) -> None:
        self._set.wait()
        if self._error is not None:  # the work before this marker failed: what it should have written is not there
            raise self._error

    def query(self) -> bool:
        return self._set.is_set()


class CpuStream:
    """One worker thread that does, in order, all that touches torch kernels: it owns the OpenMP team and sets its size itself.

    Work launched from the worker is already in its turn and runs at once. The first error stays: later events carry it, so nobody
    reads a buffer that was never written.
    """

    def __init__(self, name: str = "compute", *, threads: int | None = None) -> None:
        self._threads = threads
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"sidestream-{name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)  # of this thread's team: OpenMP keeps the number per thread
        with torch.inference_mode():
            while (item := self._queue.get()) is not None:
                self.before_item()
                item()

    def before_item(self) -> None:
        """A place for a test to stand in the way."""

    def _put(self, item: Callable[[], object]) -> None:
        if threading.current_thread() is self._thread:
            item()
        else:
            self._queue.put(item)

    def launch(self, fn: Callable[..., T], *args: Any) -> Launched[T]:
        launched = Launched[T](threading.Event())

        def item() -> None:
            launched.run(fn, *args)
            self._error = self._error or launched._error

        self._put(item)
        return launched

    def record(self) -> Event:
        event = CpuEvent()
        self._put(lambda: event.complete(self._error))
        return event

    def wait(self, event: Event) -> None:
        def item() -> None:
            try:
                event.synchronize()
            except BaseException as error:
                self._error = self._error or error

        self._put(item)

    def close(self) -> None:
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=30)


class DelayedCpuStream(CpuStream):
    """The race amplifier's stream: sleeps at random before its work, so that what is only ordered by luck comes out of order."""

    def __init__(self, name: str, *, threads: int | None = None, seed: int = 0, longest_ms: float = 3.0) -> None:
        self._random = random.Random(f"{name}-{seed}")
        self._longest = longest_ms / 1000
        super().__init__(name, threads=threads)

    def before_item(self) -> None:
        if self._random.random() < 0.5:
            time.sleep(self._random.random() * self._longest)


class Streams(NamedTuple):
    """The compute stream, and the side stream on which results leave the device. On the CPU they are the same worker."""

    compute: Stream
    side: Stream
    poison: bool = False  # fill freed device and host buffers with NaN: reading one becomes visible

    def close(self) -> None:
        self.compute.close()
        if self.side is not self.compute:
            self.side.close()


def open_streams(device: torch.device, threads: int | None) -> Streams:
    if device.type == "cuda":
        return Streams(CudaStream(device), CudaStream(device))
    worker = CpuStream(threads=threads)
    return Streams(worker, worker)


def open_amplified_streams(threads: int | None = None, seed: int = 0) -> Streams:
    """Two CPU streams that delay at random, and poisoned buffers: for tests of rules 1 to 3 of the overlap."""
    compute = DelayedCpuStream("compute", threads=threads, seed=seed)
    return Streams(compute, DelayedCpuStream("side", threads=1, seed=seed), poison=True)
