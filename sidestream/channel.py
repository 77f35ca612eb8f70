"""The line between an engine's process and the process that asks it: a ZMQ socket for each direction, in a private directory."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from contextlib import suppress
from typing import Any, cast

import zmq
import zmq.asyncio

from sidestream import wire
from sidestream.messages import Inbound, Outbound

LINGER_MS = 5000  # what was said last still gets out


class EngineEnd:
    """The engine's: one thread receives, for as long as the process lives, and one sends."""

    def __init__(self, directory: str) -> None:
        inbound, outbound = _addresses(directory)
        # A context of its own for each thread: one is closed while the other thread still waits in a socket, which only it may touch.
        self._receiving, self._sending = zmq.Context(), zmq.Context()
        self._inbound = _unbounded(self._receiving.socket(zmq.PULL))
        self._outbound = _unbounded(self._sending.socket(zmq.PUSH))
        self._inbound.connect(inbound)
        self._outbound.connect(outbound)

    def send(self, message: Outbound | Any) -> None:
        self._outbound.send_multipart(wire.encode(message), copy=False)

    def receive(self) -> Inbound:
        """What is asked next."""
        frames = self._inbound.recv_multipart(copy=False)
        return cast(Inbound, wire.decode([frame.buffer for frame in frames], copy=True))

    def end(self) -> None:
        """Nothing more is said; what was said last is still delivered."""
        self._outbound.close(LINGER_MS)
        self._sending.term()


class AskingEnd:
    """The asking process's, in its event loop."""

    def __init__(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="sidestream-")  # only this user may enter it
        self._context = zmq.Context()
        self._outbound = _unbounded(self._context.socket(zmq.PUSH))
        self._inbound = zmq.asyncio.Socket(zmq.asyncio.Context(self._context), zmq.PULL)
        _unbounded(self._inbound)
        inbound, outbound = _addresses(self.directory)
        self._outbound.bind(inbound)
        self._inbound.bind(outbound)

    def send(self, message: Inbound) -> None:
        """Never waits. What is said to an engine that is gone is lost: its end is noticed, and everybody who waits hears of it."""
        with suppress(zmq.Again):
            self._outbound.send_multipart(wire.encode(message), zmq.NOBLOCK, copy=False)

    async def connected(self) -> None:
        """Wait until the engine can be spoken to: that it was heard does not say so."""
        while not self._outbound.poll(0, zmq.POLLOUT):
            await asyncio.sleep(0.001)

    async def receive(self) -> Outbound | Any:
        frames = await self._inbound.recv_multipart(copy=False)
        return wire.decode([frame.buffer for frame in frames])

    def close(self) -> None:
        self._outbound.close(0)
        self._inbound.close(0)
        self._context.term()
        shutil.rmtree(self.directory, ignore_errors=True)


def _addresses(directory: str) -> tuple[str, str]:
    return f"ipc://{directory}/in", f"ipc://{directory}/out"


def _unbounded(socket: Any) -> Any:
    """A sender never waits for a slow receiver: what is under way is bounded by what the open requests may ask for."""
    socket.set_hwm(0)
    return socket
