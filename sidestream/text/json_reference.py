"""Where the references of a JSON Schema lead within it, and what holds together with what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

DATA = ("const", "enum", "default", "example", "examples")  # keywords that hold values, not schemas
MAX_PARTS = 256


def target(root: Mapping[str, Any], reference: Any) -> Any:
    """What `#/...` leads to; None if nowhere, or if only the compiler knows."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found: Any = root
    for step in unquote(reference).split("/")[1:]:
        if isinstance(found, Mapping) and "$id" not in found:
            found = found.get(step.replace("~1", "/").replace("~0", "~"))
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            return None
    return found


def parts(root: Mapping[str, Any], schema: Any, *, alternatives: bool = False) -> Iterator[Mapping[str, Any]]:
    """The schemas that a value must obey to obey this one: itself, those in its `allOf`, those it refers to; with `alternatives` also
    those of which it must obey some. At most 256."""
    waiting, seen = [schema], set[int]()
    while waiting and len(seen) < MAX_PARTS:
        each = waiting.pop()
        if not isinstance(each, Mapping) or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting.append(target(root, each.get("$ref")))
        for name in ("allOf", "anyOf", "oneOf") if alternatives else ("allOf",):
            inner = each.get(name)
            waiting.extend(inner if isinstance(inner, list) else ())
