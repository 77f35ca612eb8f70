"""From the bytes of a request to a checked Struct. Every mistake names the field and what it must be."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from starlette.requests import Request

from sidestream.api.refusals import BodyTooLarge
from sidestream.api.schema import expected_at, fields_at
from sidestream.errors import InvalidRequest
from sidestream.options import did_you_mean, shown, written_size

Body = TypeVar("Body", bound=msgspec.Struct)

# Fields that other engines have, or had, and what says the same here.
ELSEWHERE = {
    "guided_json": "response_format",
    "guided_regex": "response_format",
    "guided_choice": "response_format",
    "guided_grammar": "response_format",
    "guided_decoding_backend": "response_format",
    "functions": "tools",
    "function_call": "tool_choice",
    "max_length": "max_tokens",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "typical_p": "top_p",
    "best_of": "n",
    "prompt_logprobs": "logprob_start_len and top_logprobs_num",
    "bad_words": "bad_token_ids",
    "logprob_token_ids": "token_ids_logprob",
    "text_1": "query",
    "text_2": "items",
}


async def read_body(request: Request, kind: type[Body], limit: int) -> Body:
    """Raises BodyTooLarge, InvalidRequest."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(int(declared), limit)
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise _too_large(size, limit)
        pieces.append(piece)
    return decode_body(b"".join(pieces), kind)


def decode_body(data: bytes, kind: type[Body]) -> Body:
    """A field that is null counts as not given. Raises InvalidRequest, its `param` like `messages.0.content`."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), kind, data) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _no_json(error) from None


def _no_json(error: Exception) -> InvalidRequest:
    said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    return InvalidRequest("body", f"must be a JSON object: {said}")


def _too_large(size: int, limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has {size} bytes or more, at most {written_size(limit)} are taken (--max-body-size)")


def _refusal(message: str, kind: type[msgspec.Struct], data: bytes) -> InvalidRequest:
    said, _, place = message.partition(" - at `")
    path = _dotted(place.rstrip("`"))
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", said):
        name = unknown[1]
        param = f"{path}.{name}" if path else name
        hint = f"Use {ELSEWHERE[name]}." if name in ELSEWHERE else _place_of(name, kind, path)
        return InvalidRequest(param, "is not a field of this request", hint=hint)
    if missing := re.fullmatch(r"Object missing required field `(.*)`", said):
        return InvalidRequest(f"{path}.{missing[1]}" if path else missing[1], "is missing")
    expected = expected_at(kind, path)
    must = re.sub(r"^Expected `(.*?)`(, got .*)?", r"must be \1", said).replace("| null", "or null")
    if expected.values:  # a choice, of which msgspec names only the value it got
        must = f"must be {'one of ' if len(expected.values) > 1 else ''}{', '.join(expected.values)}"
    return InvalidRequest(path or "body", f"got {_shown_at(data, path)}, {must}", hint=expected.reason)


def _place_of(name: str, kind: type[msgspec.Struct], path: str) -> str | None:
    """Where a field goes that was sent to the wrong place, or what it may have meant to be."""
    body = fields_at(kind, "")
    if path and name in body:
        return f"It goes beside {path.partition('.')[0]}."
    inside = [] if path else [field for field in body if name in fields_at(kind, field)]
    return f"It goes into {inside[0]}." if inside else did_you_mean(name, fields_at(kind, path))


def _shown_at(data: bytes, path: str) -> str:
    """The value that was refused, as an error quotes it."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # the type did not fit before the end was read
        raise _no_json(error) from None
    for key in path.split(".") if path else ():
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, ValueError, IndexError, TypeError):  # a key that the message does not name
            break
    return shown(value)


def _dotted(path: str) -> str:
    """msgspec's `$.messages[0].content` as OpenAI writes it: `messages.0.content`. `[...]` stands for a key that it does not name."""
    path = path.removeprefix("key in ").removeprefix("$")
    return re.sub(r"\[(\d+)\]", r".\1", path.replace("[...]", ".*")).strip(".")
