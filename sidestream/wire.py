"""Messages as frames: msgpack, with large arrays as raw frames of their own, which neither side copies. No pickle.

A message is `[kind, body, array, array, ...]`. Small arrays travel in the body; an error travels as its class's name and its words,
so only the errors of this package come back as themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from sidestream import errors
from sidestream.errors import EngineFault, InvalidRequest, SidestreamError
from sidestream.frontend import FrontendState
from sidestream.messages import Abort, Answer, Ask, Ended, EngineFailed, Report, StepOutputs, Stop, Submit

KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Submit, Abort, Ask, Stop, FrontendState, StepOutputs, Answer, Report, EngineFailed, Ended)
}
ARRAY, ERROR = 1, 2  # msgpack's extension codes
INLINE_BYTES = 512  # of an array that travels in the body

Frame = bytes | bytearray | memoryview


class _Array(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    frame: int  # which of the frames behind the body, from 0; -1: the bytes are here
    data: bytes


class _Error(msgspec.Struct, array_like=True):
    kind: str
    message: str
    hint: str | None
    param: str | None


def encode(message: Any) -> list[Frame]:
    """The frames of a message; arrays are referred to, not copied: they must not change any more."""
    arrays: list[Frame] = []

    def extension(value: Any) -> msgspec.msgpack.Ext:
        if isinstance(value, np.ndarray):
            data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
            small = data.nbytes <= INLINE_BYTES
            if not small:
                arrays.append(data)
            packed = _Array(value.dtype.str, value.shape, -1 if small else len(arrays) - 1, bytes(data) if small else b"")
            return msgspec.msgpack.Ext(ARRAY, _PACK.encode(packed))
        if isinstance(value, BaseException):
            return msgspec.msgpack.Ext(ERROR, _PACK.encode(_packed_error(value)))
        if isinstance(value, np.generic):
            return value.item()  # type: ignore[no-any-return]
        raise NotImplementedError(f"{type(value).__name__} does not cross the process boundary")

    body = msgspec.msgpack.Encoder(enc_hook=extension).encode(message)
    return [type(message).__name__.encode(), body, *arrays]


def decode(frames: Sequence[Frame], *, copy: bool = False) -> Any:
    """The message of these frames. Its arrays read the memory of the frames, or are copies that may be written to."""
    name, body, *arrays = frames

    def extension(code: int, data: memoryview) -> Any:
        if code == ERROR:
            return _error_of(_ERRORS.decode(data))
        packed = _ARRAYS.decode(data)
        source = packed.data if packed.frame < 0 else arrays[packed.frame]
        array = np.frombuffer(source, dtype=packed.dtype).reshape(packed.shape)
        return array.copy() if copy else array

    return msgspec.msgpack.decode(body, type=KINDS[bytes(name).decode()], ext_hook=extension, dec_hook=_as_it_is)


_PACK = msgspec.msgpack.Encoder()
_ARRAYS = msgspec.msgpack.Decoder(_Array)
_ERRORS = msgspec.msgpack.Decoder(_Error)


def _as_it_is(kind: Any, value: Any) -> Any:
    """Arrays and errors were made by the extension hook already."""
    return value


def _packed_error(error: BaseException) -> _Error:
    if isinstance(error, SidestreamError):
        message = error.said if isinstance(error, InvalidRequest) else error.message
        return _Error(type(error).__name__, message, error.hint, getattr(error, "param", None))
    return _Error(type(error).__name__, str(error), None, None)


def _error_of(packed: _Error) -> BaseException:
    kind = getattr(errors, packed.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, SidestreamError)):
        return EngineFault(f"{packed.kind}: {packed.message}")
    if issubclass(kind, InvalidRequest):
        return kind(packed.param or "request", packed.message, hint=packed.hint)
    return kind(packed.message, hint=packed.hint)
