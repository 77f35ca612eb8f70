"""The prompts of a request: text or token ids, one or a list of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from sidestream.api.fields import called
from sidestream.async_client import AsyncEngine
from sidestream.errors import InvalidRequest
from sidestream.options import shown

MAX_PROMPTS = 4096  # in one request


class Prompts(NamedTuple):
    ids: list[list[int]]
    listed: bool  # whether a list was sent, even if of one


async def read_prompts(engine: AsyncEngine, value: str | Sequence[Any], field: str, *, most: int = MAX_PROMPTS) -> Prompts:
    """`value` is a text, token ids, or a list of such; `field` is what the client calls it. Raises InvalidRequest."""
    one = isinstance(value, str) or (len(value) > 0 and isinstance(value[0], int))
    if one:
        _check_all_ids(value, field)
    elif not 0 < len(value) <= most:
        raise InvalidRequest(field, f"got {len(value)} prompts, must be between 1 and {most}")
    prompts: list[list[int]] = []
    for place, prompt in enumerate([value] if one else value):
        where = field if one else f"{field}.{place}"
        if isinstance(prompt, int):
            raise InvalidRequest(where, f"got {prompt}, must be a prompt of its own: the first one is")
        with called({"prompt": where}):
            prompts.append(await engine.encode(prompt))
        if place:
            await asyncio.sleep(0)  # a list of many short ones takes a while, too
    return Prompts(prompts, not one)


def _check_all_ids(value: str | Sequence[Any], field: str) -> None:
    if not isinstance(value, str):
        for place, each in enumerate(value):
            if not isinstance(each, int):
                raise InvalidRequest(f"{field}.{place}", f"got {shown(each)}, must be a token id: the first one is")
