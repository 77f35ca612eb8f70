"""Why the server is built on Starlette: what a streamed chunk costs in three frameworks, and which of them takes "5" for 5.

    pip install starlette litestar fastapi uvicorn httptools uvloop msgspec
    python benchmarks/http_frameworks.py

Each streams the same chunks to the same clients, in turn, several rounds. The client reads raw sockets in a process of its own.
"""

import argparse
import asyncio
import multiprocessing
import socket
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

CHUNK = b'data: {"id":"x","object":"text_completion","choices":[{"index":0,"text":" word","finish_reason":null}]}\n\n'
BODY = b'{"max_tokens":"5"}'


async def chunks(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield CHUNK
        await asyncio.sleep(0)


def starlette_app(count: int) -> Any:
    import msgspec
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    class Body(msgspec.Struct):
        max_tokens: int

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        async for chunk in chunks(count):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    class Stream(Response):
        def __init__(self) -> None:
            self.background = None

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await stream(scope, receive, send)

    async def get(request: Request) -> Response:
        return Stream()

    async def post(request: Request) -> Response:
        try:
            msgspec.json.decode(await request.body(), type=Body)
        except msgspec.ValidationError as error:
            return Response(str(error), 400)
        return Response("taken")

    return Starlette(routes=[Route("/", get), Route("/", post, methods=["POST"])])


def litestar_app(count: int) -> Any:
    import msgspec
    from litestar import Litestar, get, post
    from litestar.response import Stream

    class Body(msgspec.Struct):
        max_tokens: int

    @get("/", sync_to_thread=False)
    def stream() -> Stream:
        return Stream(lambda: chunks(count))

    @post("/", status_code=200, sync_to_thread=False)
    def take(data: Body) -> str:
        return "taken"

    return Litestar([stream, take], openapi_config=None)


def fastapi_app(count: int) -> Any:
    from fastapi import FastAPI
    from fastapi.responses import StreamingResponse
    from pydantic import BaseModel

    class Body(BaseModel):
        max_tokens: int

    app = FastAPI()

    @app.get("/")
    async def stream() -> StreamingResponse:
        return StreamingResponse(chunks(count))

    @app.post("/")
    async def take(body: Body) -> str:
        return "taken"

    return app


APPS = {"starlette + msgspec": starlette_app, "litestar": litestar_app, "fastapi": fastapi_app}


def serve(name: str, count: int, port: int) -> None:
    import uvicorn

    uvicorn.run(APPS[name](count), port=port, log_level="error")


def ask(port: int, clients: int) -> float:
    """Seconds until all clients have their whole stream."""
    started = time.perf_counter()
    open_sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(clients)]
    for each in open_sockets:
        each.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    for each in open_sockets:
        while each.recv(1 << 16):
            pass
        each.close()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--chunks", type=int, default=1000)
    asked = parser.parse_args()
    ports: dict[str, int] = {}
    running = []
    for name in APPS:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports[name] = probe.getsockname()[1]
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(name, asked.chunks, ports[name]), daemon=True)
        process.start()
        running.append(process)
    time.sleep(4)
    seconds: dict[str, list[float]] = {name: [] for name in APPS}
    for _ in range(asked.rounds):
        for name in APPS:
            seconds[name].append(ask(ports[name], asked.clients))
    for name in APPS:
        each = [1e6 * taken / (asked.clients * asked.chunks) for taken in seconds[name]]
        request = urllib.request.Request(f"http://127.0.0.1:{ports[name]}/", BODY, {"Content-Type": "application/json"})
        try:
            taken = urllib.request.urlopen(request).status
        except urllib.error.HTTPError as error:
            taken = error.code
        print(f'{name:20} {statistics.median(each):6.1f} us per chunk ({min(each):.1f} to {max(each):.1f})   "5" for 5: status {taken}')
    for process in running:
        process.terminate()


if __name__ == "__main__":
    main()
