"""GGUF files: header, metadata as plain Python values, and tensors dequantised from the mapped file.

The header is parsed here and not by `gguf.GGUFReader`: that one makes numpy objects for each element of an array, which takes
2.2 s for the 98,052 strings of the default model's vocabulary and merges. This parser takes 0.08 s, and it checks each count,
length and offset against the size of the file before using it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sidestream.errors import ModelError
from sidestream.models.quants import SUPPORTED, dequantize_into, type_name

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ARRAY = 1 << 24  # elements; the largest vocabularies have 2**18, and Python objects cost memory
STRING, ARRAY = 8, 9
SCALARS: Mapping[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


class _Malformed(Exception):
    """What is wrong with the header; `open_gguf` adds the path."""


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the tensor table. `shape` is torch's order, [out, in]; `offset` counts from the start of the file."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int
    num_bytes: int | None  # None: a type whose layout is not known here


class _Cursor:
    """Reads forward through the header and never past the end of the file."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> int:
        """Advance by `size` bytes; the position before."""
        start = self.at
        if size > len(self.data) - start:
            raise _Malformed(f"it ends inside its header: {size} bytes are expected at {start}, the file has {len(self.data)}")
        self.at = start + size
        return start

    def u32(self) -> int:
        return int(U32.unpack_from(self.data, self.take(4))[0])

    def u64(self) -> int:
        return int(U64.unpack_from(self.data, self.take(8))[0])

    def count(self, what: str, smallest: int) -> int:
        """A number of things of at least `smallest` bytes each, which must therefore fit what is left of the file."""
        count = self.u64()
        if count > (len(self.data) - self.at) // smallest:
            raise _Malformed(f"it claims {count} {what}, more than the file can hold")
        return count

    def string(self) -> str:
        start = self.take(self.u64())
        return str(self.data[start : self.at], "utf-8")

    def value(self, type_id: int) -> Any:
        if type_id == STRING:
            return self.string()
        if type_id == ARRAY:
            return self.array()
        return self.scalars(type_id, 1)[0]

    def scalars(self, type_id: int, count: int) -> list[Any]:
        if type_id not in SCALARS:
            raise _Malformed(f"value type {type_id} is unknown or not allowed here")
        dtype = np.dtype(SCALARS[type_id])
        start = self.take(count * dtype.itemsize)
        values = np.frombuffer(self.data, np.uint8 if dtype == np.bool_ else dtype, count, start)
        result: list[Any] = (values != 0 if dtype == np.bool_ else values).tolist()
        return result

    def array(self) -> list[Any]:
        type_id = self.u32()
        count = self.count("array elements", 8 if type_id == STRING else 1)
        if count > MAX_ARRAY:
            raise _Malformed(f"an array of {count} elements, the limit is {MAX_ARRAY}")
        if type_id == STRING:
            return [self.string() for _ in range(count)]
        return self.scalars(type_id, count)


class GGUFFile:
    """An open file: `metadata` as plain values, `tensors` by name; tensor data stays on disk until it is read."""

    def __init__(self, path: Path, data: np.memmap[Any, np.dtype[np.uint8]]) -> None:
        self.path = path
        self.file_bytes = len(data)
        self._data = data
        cursor = _Cursor(data.data)
        if bytes(cursor.data[:4]) != MAGIC:
            raise _Malformed("it is not a GGUF file: the first four bytes are not 'GGUF'")
        cursor.take(4)
        version = cursor.u32()
        if version not in VERSIONS:
            what = "big-endian files are not supported" if version & 0xFFFF == 0 else f"version {version} is not supported"
            raise _Malformed(f"{what}; supported are little-endian files of version {' and '.join(map(str, VERSIONS))}")
        num_tensors, num_keys = cursor.count("tensors", 1), cursor.count("metadata keys", 13)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string()
            if key in self.metadata:
                raise _Malformed(f"metadata key {key!r} appears twice")
            self.metadata[key] = cursor.value(cursor.u32())
        self.tensors: dict[str, GGUFTensor] = self._tensor_table(cursor, num_tensors)

    def _tensor_table(self, cursor: _Cursor, num_tensors: int) -> dict[str, GGUFTensor]:
        entries = []
        for _ in range(num_tensors):
            name, rank = cursor.string(), cursor.u32()
            if not 1 <= rank <= 4:
                raise _Malformed(f"tensor {name!r} has {rank} dimensions; 1 to 4 are possible")
            shape = tuple(cursor.u64() for _ in range(rank))[::-1]
            entries.append((name, shape, cursor.u32(), cursor.u64()))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise _Malformed(f"general.alignment is {alignment!r}; it must be a power of two of at least 8")
        base = -(-cursor.at // alignment) * alignment
        tensors = {}
        for name, shape, type_id, offset in entries:
            if name in tensors:
                raise _Malformed(f"tensor {name!r} appears twice")
            if offset % alignment:
                raise _Malformed(f"tensor {name!r} starts at {offset}, which is not a multiple of {alignment}")
            num_bytes = _num_bytes(name, type_id, shape)
            end = base + offset + (num_bytes or 0)
            if end > self.file_bytes:
                raise _Malformed(f"tensor {name!r} ends at byte {end}, the file has {self.file_bytes}: it is cut short")
            tensors[name] = GGUFTensor(name, type_id, shape, base + offset, num_bytes)
        return tensors

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @property
    def format(self) -> str:
        """ "GGUF " and the type that holds most of the parameters."""
        elements: dict[int, int] = {}
        for tensor in self.tensors.values():
            elements[tensor.type_id] = elements.get(tensor.type_id, 0) + prod(tensor.shape)
        return "GGUF " + type_name(max(elements, key=elements.__getitem__)) if elements else "GGUF"

    def check_type(self, name: str) -> None:
        """Raises `ModelError` if the tensor's type cannot be read."""
        type_id = self.tensors[name].type_id
        if type_id not in SUPPORTED:
            supported = ", ".join(kind.name for kind in SUPPORTED.values())
            raise ModelError(
                f"{self.path}: tensor {name!r} has GGUF type {type_name(type_id)}, which is not supported",
                hint=f"Supported types: {supported}. Convert the file with llama-quantize, or take another variant of the model.",
            )

    def type_name(self, name: str) -> str:
        return type_name(self.tensors[name].type_id)

    def read_into(self, name: str, out: Tensor, *, interleaved_heads: int | None = None) -> None:
        """Dequantise a tensor into `out`; its rows are put back in order if they are interleaved within that many heads."""
        self.check_type(name)
        dequantize_into(self._stored_rows(name, interleaved_heads).reshape(-1), SUPPORTED[self.tensors[name].type_id], out)

    def blocks(self, name: str, *, interleaved_heads: int | None = None) -> Tensor | None:
        """The bytes of a quantised matrix, [out, bytes of a row]; None for plain types. Mapped, unless rows are put back in order."""
        self.check_type(name)
        plain = SUPPORTED[self.tensors[name].type_id].dtype is not None
        return None if plain else self._stored_rows(name, interleaved_heads)

    def _stored_rows(self, name: str, interleaved_heads: int | None) -> Tensor:
        """[out, bytes of a row] uint8; a vector has rows of one element. Whole blocks only for matrices."""
        tensor = self.tensors[name]
        assert tensor.num_bytes is not None
        rows = tensor.shape[0]
        raw = torch.from_numpy(self._data[tensor.offset : tensor.offset + tensor.num_bytes]).view(rows, -1)  # uint8, mapped
        if interleaved_heads is None:
            return raw
        # On the stored rows: they are the smallest form, and it is the same for each type.
        return raw.view(interleaved_heads, rows // interleaved_heads // 2, 2, -1).transpose(1, 2).reshape(rows, -1)


def _num_bytes(name: str, type_id: int, shape: tuple[int, ...]) -> int | None:
    kind = SUPPORTED.get(type_id)
    if kind is None:
        return None
    if shape[-1] % kind.block:
        raise _Malformed(f"tensor {name!r} has rows of {shape[-1]}, which {kind.name} cannot store in blocks of {kind.block}")
    return prod(shape) // kind.block * kind.size


def open_gguf(path: Path) -> GGUFFile:
    """Map a file and parse its header. Raises `ModelError` for anything that is not a complete GGUF file."""
    try:
        # Copy-on-write, because torch wants to be able to write to what it wraps; nothing does.
        return GGUFFile(path, np.memmap(path, dtype=np.uint8, mode="c"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not a usable GGUF file: a string of its header is not UTF-8 ({error.reason})") from None
    except (_Malformed, ValueError) as error:  # ValueError: numpy maps no empty file
        hint = "Fetch the file again; if that does not help, the program that wrote it is at fault."
        raise ModelError(f"{path}: not a usable GGUF file: {error}", hint=hint) from None
