"""Fields of other engines that have no meaning here: some are ignored, because they change no answer; the others are refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any

import msgspec

from sidestream.errors import InvalidRequest
from sidestream.options import shown

EMPTY: list[Any] = [None, False, 0, "", [], {}]  # says the same as leaving the field out
IGNORED = Annotated[Any, msgspec.Meta(description="Accepted and ignored: it changes no answer.")]


def with_foreign(name: str, base: type[msgspec.Struct], *, refused: Mapping[str, str], ignored: Collection[str] = ()) -> Any:
    """`base` with the fields of other engines; `refused` says why, in words that follow the value."""
    fields: list[tuple[str, Any, Any]] = [(each, IGNORED, None) for each in ignored]
    for each, why in refused.items():
        meta = msgspec.Meta(description=f"Refused: {why}.", extra_json_schema={"enum": EMPTY})
        fields.append((each, Annotated[Any, meta], None))
    return msgspec.defstruct(name, fields, bases=(base,), kw_only=True, forbid_unknown_fields=True, module=base.__module__)


def refuse_foreign(body: msgspec.Struct, refused: Mapping[str, str], *, within: str = "") -> None:
    """Raises InvalidRequest for the first refused field that says something. `within` is where the body is, with a dot behind it."""
    for name, why in refused.items():
        value = getattr(body, name)
        if value not in EMPTY:
            raise InvalidRequest(f"{within}{name}", f"got {shown(value)}, must be left out: {why}")
