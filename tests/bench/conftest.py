"""A checkpoint that takes microseconds per token, with a context long enough for every workload; and a server to load."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 128


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bench") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    vocabulary = {"</s>": 1} | {f"w{i}": i for i in range(VOCAB) if i != 1}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0")).save(str(directory / "tokenizer.json"))
    return directory


class OpenAIServer:
    """A server with the OpenAI routes that answers with words, as the attributes say, and keeps the bodies it got."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.gap = 0.001  # seconds before each chunk
        self.tokens_per_chunk = 1
        self.refused_options: set[str] = set()  # of stream_options: HTTP 400
        self.gives_usage = True
        self.answers: Callable[[int, dict[str, Any]], Response | str | None] = lambda number, body: None  # a text is sent as it is
        self.app = Starlette(
            routes=[
                Route("/v1/models", lambda request: JSONResponse({"data": [{"id": "first"}, {"id": "second"}]})),
                Route("/v1/completions", self.answer, methods=["POST"]),
                Route("/v1/chat/completions", self.answer, methods=["POST"]),
            ]
        )
        self.url = ""

    @property
    def counted(self) -> list[dict[str, Any]]:
        """The bodies after those by which a client finds out what the server takes."""
        return [body for body in self.bodies if body["max_tokens"] != 2]

    async def answer(self, request: HTTPRequest) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        options = body.get("stream_options") or {}
        if refused := self.refused_options & set(options):
            return JSONResponse({"error": {"message": f"unknown {min(refused)}", "code": "unknown_field"}}, 400)
        given = self.answers(len(self.counted), body) if body["max_tokens"] != 2 else None
        if isinstance(given, Response):
            return given
        return StreamingResponse(self.events(body, options, given), media_type="text/event-stream")

    async def events(self, body: dict[str, Any], options: dict[str, Any], given: str | None) -> AsyncIterator[str]:
        if given is not None:
            yield given
            return
        usage = {"prompt_tokens": 11, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": 3}}
        yield ": keep-alive\n\n"
        for start in range(0, body["max_tokens"], self.tokens_per_chunk):
            await asyncio.sleep(self.gap)
            usage["completion_tokens"] = min(start + self.tokens_per_chunk, body["max_tokens"])
            text = " word" * (usage["completion_tokens"] - start)
            ends = "length" if usage["completion_tokens"] == body["max_tokens"] else None
            choice = {"index": 0, "finish_reason": ends, **({"delta": {"content": text}} if "messages" in body else {"text": text})}
            extra = {"usage": usage} if self.gives_usage and options.get("continuous_usage_stats") else {}
            yield f"data: {json.dumps({'choices': [choice], **extra})}\n\n"
        if self.gives_usage and options.get("include_usage"):
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"


@pytest.fixture
def openai_server() -> Iterator[OpenAIServer]:
    made = OpenAIServer()
    server = uvicorn.Server(uvicorn.Config(made.app, log_level="critical", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        made.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield made
        finally:
            server.should_exit = True
            thread.join()
