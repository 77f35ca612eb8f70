"""`/v1/embeddings`: vectors of texts, pooled from the hidden states of any layer. No token is sampled."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Raw
from starlette.responses import Response

from sidestream.api.fields import called
from sidestream.api.foreign import IGNORED
from sidestream.api.generation import Generation
from sidestream.api.openai import check_not_aborted
from sidestream.api.prompts import read_prompts
from sidestream.api.route import Call, Route
from sidestream.api.sse import json_response
from sidestream.errors import InvalidRequest
from sidestream.output import Output
from sidestream.params import SamplingParams

MAX_INPUTS = 2048  # as OpenAI has it
ROWS_BYTES = 64 * 2**20  # of hidden states that one group of inputs may bring: they are pooled before the next one is asked

Vector = npt.NDArray[np.float32]

_encode = msgspec.json.Encoder().encode


class Embed(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    input: Annotated[
        str | Annotated[list[str | int | list[int]], Meta(min_length=1)],
        Meta(description=f"A text, token ids, or a list of either: at most {MAX_INPUTS}."),
    ]
    model: Annotated[str, Meta(description="Name of the model; may be left out.")] | None = None
    encoding_format: Annotated[Literal["float", "base64"], Meta(description="Numbers, or base64 of little endian float32.")] | None = None
    dimensions: Annotated[int, Meta(ge=1, description="Numbers of each vector: the first ones.")] | None = None
    pooling: (
        Annotated[Literal["last", "mean"], Meta(description="The row of the last position, the default, or the mean of all.")] | None
    ) = None
    layer: (
        Annotated[int, Meta(description="0 is the embeddings, i follows block i, -1, the default, is the last block and the final norm.")]
        | None
    ) = None
    normalize: Annotated[bool, Meta(description="Scale each vector to length 1; the default.")] | None = None
    user: IGNORED = None


class Embedding(msgspec.Struct, kw_only=True):
    object: str = "embedding"
    index: int
    embedding: Annotated[Raw, Meta(description="A list of numbers, or base64.")]


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


async def embed(call: Call[Embed]) -> Response:
    body, service = call.body, call.service
    model = service.check_model(body.model)
    facts = service.engine.facts
    if body.dimensions is not None and body.dimensions > facts.hidden_size:
        raise InvalidRequest("dimensions", f"got {body.dimensions}, must be at most {facts.hidden_size} (the model's hidden size)")
    _check_ceiling(service.config.hidden_states, body.pooling or "last")
    ids, _ = await read_prompts(service.engine, body.input, "input", most=MAX_INPUTS)
    row_bytes = facts.hidden_size * 4
    sizes = [len(each) * row_bytes if body.pooling == "mean" else row_bytes for each in ids]
    data: list[Embedding] = []
    for group in _groups(sizes, most=4 * facts.max_running):
        for output in await _outputs(call, ids[group]):
            check_not_aborted(output)
            data.append(Embedding(index=len(data), embedding=_written(_vector(output, body), body.encoding_format)))
            await asyncio.sleep(0)
    tokens = sum(map(len, ids))
    usage = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
    return json_response(EmbeddingsAnswer(data=data, model=model, usage=usage))


def _groups(sizes: Sequence[int], *, most: int) -> Iterator[slice]:
    """Parts of the list, of `most` inputs that fit into ROWS_BYTES; one alone always does."""
    first = 0
    while first < len(sizes):
        end, size = first, 0
        while end < len(sizes) and end - first < most and (end == first or size + sizes[end] <= ROWS_BYTES):
            size += sizes[end]
            end += 1
        yield slice(first, end)
        first = end


async def _outputs(call: Call[Embed], ids: list[list[int]]) -> list[Output]:
    body: Embed = call.body
    wanted = {
        "return_hidden_states": True if body.pooling == "mean" else "last",
        "hidden_states_layers": [-1 if body.layer is None else body.layer],
        "hidden_states_dtype": "float32",
    }
    with called({"prompt": "input", "hidden_states_layers": "layer"}):
        return await Generation(call, ids, SamplingParams(max_new_tokens=0), wanted, operation="embeddings").answers()


def _check_ceiling(ceiling: str, pooling: str) -> None:
    """What the operator lets a request have of the hidden states. Raises InvalidRequest."""
    if ceiling == "off":
        raise InvalidRequest("input", "cannot be embedded: this server gives no hidden states", hint="It runs with --hidden-states off.")
    if ceiling == "last" and pooling == "mean":
        raise InvalidRequest("pooling", "got 'mean', must be 'last' on this server", hint="It runs with --hidden-states last.")


def _vector(output: Output, body: Embed) -> Vector:
    """[dimensions], float32. The mean and the length are taken in float64."""
    assert output.hidden_states is not None
    rows = output.hidden_states.numbers()[:, 0]  # [rows, hidden] float32
    pooled = rows.mean(axis=0, dtype=np.float64)[: body.dimensions]
    length = np.linalg.norm(pooled) if body.normalize is not False else 0.0
    vector: Vector = (pooled / length if length > 0 else pooled).astype(np.float32)
    return vector


def _written(vector: Vector, form: str | None) -> Raw:
    if form == "base64":
        return Raw(b'"%b"' % base64.b64encode(vector.astype("<f4").tobytes()))
    return Raw(_encode(vector.tolist()))


EMBEDDINGS = (Route("POST", "/v1/embeddings", embed, "Vectors of texts", body=Embed, answer=EmbeddingsAnswer),)
