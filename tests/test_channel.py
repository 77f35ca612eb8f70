"""The line between the processes, without an engine."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from sidestream.channel import AskingEnd
from sidestream.messages import Abort, Report

ENGINE = """
import os, sys, threading
from sidestream.channel import EngineEnd
from sidestream.messages import Report

end = EngineEnd(sys.argv[1])
heard = threading.Event()

def receive():
    while True:
        end.receive()
        heard.set()

threading.Thread(target=receive, daemon=True).start()
heard.wait(20)
for number in range(100):
    end.send(Report({"number": number, "text": "a" * 100_000}))
end.end()
os._exit(3)
"""


def test_an_engine_that_ends_while_it_listens_is_heard_to_its_last_word() -> None:
    async def work() -> None:
        asking = AskingEnd()
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", ENGINE, asking.directory, stderr=subprocess.PIPE)
        await asyncio.wait_for(asking.connected(), 20)
        for _ in range(100):
            asking.send(Abort("nobody"))
        said = [await asyncio.wait_for(asking.receive(), 20) for _ in range(100)]
        assert [report.stats["number"] for report in said if isinstance(report, Report)] == [*range(100)]
        _, errors = await asyncio.wait_for(process.communicate(), 20)
        assert (process.returncode, errors) == (3, b"")
        asking.close()

    asyncio.run(work())


def test_speaking_to_an_engine_that_is_gone_does_not_wait() -> None:
    """It would stop the event loop for ever, just when the engine's end has to be noticed."""

    async def work() -> None:
        asking = AskingEnd()
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", ENGINE, asking.directory)
        await asyncio.wait_for(asking.connected(), 20)
        asking.send(Abort("nobody"))
        await asyncio.wait_for(asking.receive(), 20)
        process.kill()
        await process.wait()
        for _ in range(100):
            asking.send(Abort("nobody"))
            await asyncio.sleep(0.001)
        asking.close()

    asyncio.run(work())
