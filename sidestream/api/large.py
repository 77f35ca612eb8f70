"""JSON that is too large to be copied or made at once: it is made in slices, kept in pieces, and sent as it is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

MARK = b"\0"  # in no JSON
TURNS = 8  # of the event loop; what the engine says goes through about as many tasks on its way to a client


class LargeJson:
    """Stands in an answer, anywhere, for the JSON that its pieces are."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces


def encoded(value: Any) -> list[bytes]:
    """The JSON of a Struct or of plain values, in pieces; msgspec.Raw in it is copied, LargeJson is not."""
    large: list[LargeJson] = []

    def mark(part: Any) -> msgspec.Raw:
        if not isinstance(part, LargeJson):
            raise NotImplementedError(f"{type(part).__name__} is no JSON")
        large.append(part)
        return msgspec.Raw(MARK)

    first, *others = msgspec.json.Encoder(enc_hook=mark).encode(value).split(MARK)
    pieces = [first]
    for part, behind in zip(large, others, strict=True):
        pieces += [*part.pieces, behind]
    return pieces


async def others_first() -> None:
    """Let all that waits be done, between two slices of long work: one turn would bring a token of another client one task further."""
    for _ in range(TURNS):
        await asyncio.sleep(0)
