"""Hidden states as JSON, base64 and safetensors, encoded in slices so that other requests get their turn."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.responses import Response

from sidestream.api.fields import HiddenStatesFormat
from sidestream.api.large import LargeJson, others_first
from sidestream.api.sse import LargeResponse
from sidestream.errors import InvalidRequest
from sidestream.output import HiddenStates, Output

SLICE_NUMBERS = 8 * 1024  # of JSON encoded at a time: 2 milliseconds
SLICE_BYTES = 3 * 2**18  # of base64: a multiple of 3, so that slices join
SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

_encode = msgspec.json.Encoder().encode


async def hidden_json(output: Output, form: HiddenStatesFormat, *, start: int, streamed: bool = False) -> LargeJson | None:
    """The JSON of an output's rows; None where there are none. `start` as the request gave it.

    json: with one layer and start 0, SGLang's shape: the list of the prompt's rows, then one row per output step (in a stream each
    part holds only its own); else an object with nested lists. base64: an object whose data is little endian.
    """
    states = output.hidden_states
    if states is None:
        return None
    if form == "base64":
        return _object(states, [b'"', *await _base64(states.raw), b'"'])
    if len(states.layers) == 1 and start == 0:
        return LargeJson(await _as_sglang(states, sum(position < output.prompt_tokens for position in states.positions), streamed))
    return _object(states, await _nested(states))


def _object(states: HiddenStates, data: Sequence[bytes]) -> LargeJson:
    head = _encode(described(states))
    return LargeJson([b'%b,"data":' % head[:-1], *data, b"}"])


def described(states: HiddenStates) -> dict[str, Any]:
    return {
        "dtype": states.dtype,
        "shape": list(states.shape),
        "layers": list(states.layers),
        "positions": list(states.positions),
    }


async def _base64(raw: npt.NDArray[np.uint8]) -> list[bytes]:
    view, pieces = raw.data, []
    for start in range(0, len(view), SLICE_BYTES):
        pieces.append(base64.b64encode(view[start : start + SLICE_BYTES]))
        await others_first()
    return pieces


async def _nested(states: HiddenStates) -> list[bytes]:
    """A list of rows, each a list of layers."""
    rows, layers, _ = states.shape
    if not rows:
        return [b"[]"]
    return [*await _vectors(states, lambda place: b"[[" if place == 0 else b"],[" if place % layers == 0 else b","), b"]]"]


async def _as_sglang(states: HiddenStates, of_prompt: int, streamed: bool) -> list[bytes]:
    """The list of the prompt's rows, which a part of a stream may be without, and behind it the others."""
    rows = states.shape[0]
    if not rows:
        return [b"[]" if streamed else b"[[]]"]
    first = b"[[" if of_prompt else b"[" if streamed else b"[[],"
    pieces = await _vectors(states, lambda place: first if place == 0 else b"]," if place == of_prompt else b",")
    return [*pieces, b"]]" if of_prompt == rows else b"]"]


async def _vectors(states: HiddenStates, before: Callable[[int], bytes]) -> list[bytes]:
    """The JSON of each layer of each row, and before it what `before` says. msgspec writes null for what JSON cannot hold."""
    rows, layers, width = states.shape
    size = states.raw.nbytes // (rows * layers)
    step = max(1, SLICE_NUMBERS // width)
    pieces: list[bytes] = []
    for first in range(0, rows * layers, step):
        count = min(step, rows * layers - first)
        part = replace(states, raw=states.raw[first * size : (first + count) * size], shape=(1, count, width))
        for place, vector in enumerate(part.numbers()[0].tolist(), first):
            pieces += before(place), _encode(vector)
        await others_first()
    return pieces


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
    pieces: list[bytes | memoryview] = [len(written).to_bytes(8, "little"), written, *(states.raw.data for states in tensors.values())]
    return LargeResponse(pieces, media_type="application/octet-stream")


def check_format(form: str | None, *, wanted: Any, streamed: bool) -> HiddenStatesFormat:
    """The format asked for. Raises InvalidRequest where it cannot be had, or would be ignored."""
    if form not in (None, "json") and not wanted:  # json is what there would be anyway
        raise InvalidRequest("hidden_states_format", f"got {form!r}, must be left out without return_hidden_states")
    if form == "safetensors" and streamed:
        raise InvalidRequest("hidden_states_format", "got 'safetensors', which is one body, must be 'json' or 'base64' with stream")
    return form or "json"  # type: ignore[return-value]


def flat(values: Sequence[float] | np.ndarray[Any, Any], dtype: str) -> str:
    """Base64 of numbers, little endian."""
    return base64.b64encode(np.asarray(values, dtype=np.dtype(dtype).newbyteorder("<")).tobytes()).decode()
