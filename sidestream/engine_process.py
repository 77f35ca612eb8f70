"""The engine's own process: `python -m sidestream.engine_process`, started by `AsyncEngine` and by nobody else.

Its first line of standard input says what to start. Standard input then stays open for as long as the asking process lives: when it
ends, however that came, this process ends too.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from typing import Any

import msgspec

from sidestream.channel import EngineEnd
from sidestream.config import EngineConfig
from sidestream.messages import Ended, EngineFailed
from sidestream.observe.logs import LogFormat, log_to_stderr

log = logging.getLogger("sidestream")

EXIT_FAILURE = 1


class Start(msgspec.Struct):
    """What the first line says."""

    config: dict[str, Any]  # of EngineConfig
    directory: str  # of the channel
    log_format: LogFormat = "text"


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group: the asking process decides what becomes of requests
        signal.signal(number, signal.SIG_IGN)
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    threading.Thread(target=_end_with_the_asking_process, name="sidestream-watch", daemon=True).start()
    with log_to_stderr(start.config["log_level"], start.log_format):
        return _serve(start)


def _serve(start: Start) -> int:
    channel = EngineEnd(start.directory)
    try:
        from sidestream.assemble import assemble  # torch, which takes a second: an early end of the asking process is noticed meanwhile

        assembled = assemble(EngineConfig(**start.config), channel.send)
    except BaseException as error:
        log.debug("the engine cannot start", exc_info=True)
        channel.send(EngineFailed(error))
        channel.end()
        return EXIT_FAILURE
    loop = assembled.loop
    threading.Thread(target=_receive, args=(channel, loop.inbox), name="sidestream-receive", daemon=True).start()
    channel.send(assembled.frontend.state())
    failed = loop.run()
    if not failed:
        channel.send(Ended())
    channel.end()
    return EXIT_FAILURE if failed else 0


def _receive(channel: EngineEnd, inbox: Any) -> None:
    try:
        while True:
            inbox.put(channel.receive())
    except BaseException:
        log.exception("the engine cannot read what it is asked")
        os._exit(EXIT_FAILURE)


def _end_with_the_asking_process() -> None:
    while os.read(0, 4096):  # not through sys.stdin, whose lock Python wants when it ends
        pass
    os._exit(EXIT_FAILURE)


if __name__ == "__main__":
    os._exit(main())  # at once: there is nothing left to do, and the interpreter would take a second to take itself apart
