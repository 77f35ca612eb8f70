"""Hidden states as JSON, base64 and safetensors, encoded in slices so that other requests get their turn."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from starlette.responses import Response

from sidestream.api.fields import HiddenStatesFormat
from sidestream.api.sse import LargeResponse
from sidestream.errors import InvalidRequest
from sidestream.output import HiddenStates, Output

SLICE_NUMBERS = 32 * 1024  # of JSON numbers encoded at a time: a few milliseconds
SLICE_BYTES = 3 * 2**18  # of base64: a multiple of 3, so that slices join
SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

_encode = msgspec.json.Encoder().encode


async def hidden_json(output: Output, form: HiddenStatesFormat, *, start: int, streamed: bool = False) -> msgspec.Raw | None:
    """The JSON of an output's rows; None where there are none. `start` as the request gave it.

    json: with one layer and start 0, SGLang's shape: the list of the prompt's rows, then one row per output step (in a stream each
    part holds only its own); else an object with nested lists. base64: an object whose data is little endian.
    """
    states = output.hidden_states
    if states is None:
        return None
    if form == "base64":
        return _object(states, b'"%b"' % await _base64(states.raw))
    rows = await _rows(states)
    if len(states.layers) == 1 and start == 0:
        return msgspec.Raw(_as_sglang(rows, states.positions, output.prompt_tokens, streamed))
    return _object(states, b"[%b]" % b",".join(b"[%b]" % b",".join(layers) for layers in rows))


def _object(states: HiddenStates, data: bytes) -> msgspec.Raw:
    head = _encode(described(states))
    return msgspec.Raw(b'%b,"data":%b}' % (head[:-1], data))


def described(states: HiddenStates) -> dict[str, Any]:
    return {
        "dtype": states.dtype,
        "shape": list(states.shape),
        "layers": list(states.layers),
        "positions": list(states.positions),
    }


async def _base64(raw: Any) -> bytes:
    view, pieces = memoryview(raw), []
    for start in range(0, len(view), SLICE_BYTES):
        pieces.append(base64.b64encode(view[start : start + SLICE_BYTES]))
        await asyncio.sleep(0)
    return b"".join(pieces)


async def _rows(states: HiddenStates) -> list[list[bytes]]:
    """The JSON of each row's layers. msgspec writes null for what JSON cannot hold."""
    numbers = states.numbers()
    rows, layers, width = states.shape
    step = max(1, SLICE_NUMBERS // max(1, layers * width))
    encoded: list[list[bytes]] = []
    for first in range(0, rows, step):
        encoded += [[_encode(layer) for layer in row] for row in numbers[first : first + step].tolist()]
        await asyncio.sleep(0)
    return encoded


def _as_sglang(rows: Sequence[Sequence[bytes]], positions: Sequence[int], prompt_tokens: int, streamed: bool) -> bytes:
    prompt = [row[0] for row, position in zip(rows, positions, strict=True) if position < prompt_tokens]
    steps = [row[0] for row, position in zip(rows, positions, strict=True) if position >= prompt_tokens]
    if streamed and not prompt:
        return b"[%b]" % b",".join(steps)
    return b"[%b]" % b",".join([b"[%b]" % b",".join(prompt), *steps])


class Packed(NamedTuple):
    """The tensors of a safetensors answer, by name, and what the JSON answer says in their place."""

    tensors: dict[str, HiddenStates]

    def add(self, name: str, states: HiddenStates | None) -> dict[str, Any] | None:
        if states is None:
            return None
        self.tensors[name] = states
        return {"tensor": name, **described(states)}


def safetensors_response(answer: Any, tensors: Mapping[str, HiddenStates]) -> Response:
    """One body: the rows as tensors, and the JSON answer in the metadata under `answer`.

    The length of the header, the header as JSON, the bytes: written here, because the library's `serialize` took other arguments
    before version 0.8, and `safetensors.numpy` has no bfloat16.
    """
    header: dict[str, Any] = {"__metadata__": {"answer": _encode(answer).decode()}}
    end = 0
    for name, states in tensors.items():
        start, end = end, end + states.raw.nbytes
        header[name] = {"dtype": SAFETENSORS_DTYPES[states.dtype], "shape": list(states.shape), "data_offsets": [start, end]}
    written = _encode(header)
    written += b" " * (-len(written) % 8)  # the format wants the bytes aligned
    body = b"".join([len(written).to_bytes(8, "little"), written, *(states.raw.data for states in tensors.values())])
    return LargeResponse(body, media_type="application/octet-stream")


def check_format(form: str | None, *, wanted: Any, streamed: bool) -> HiddenStatesFormat:
    """The format asked for. Raises InvalidRequest where it cannot be had, or would be ignored."""
    if form is not None and not wanted:
        raise InvalidRequest("hidden_states_format", f"got {form!r}, must be left out without return_hidden_states")
    if form == "safetensors" and streamed:
        raise InvalidRequest("hidden_states_format", "got 'safetensors', which is one body, must be 'json' or 'base64' with stream")
    return form or "json"  # type: ignore[return-value]


def flat(values: Sequence[float] | np.ndarray[Any, Any], dtype: str) -> str:
    """Base64 of numbers, little endian."""
    return base64.b64encode(np.asarray(values, dtype=np.dtype(dtype).newbyteorder("<")).tobytes()).decode()
