"""Errors as HTTP answers: OpenAI's nested object, whatever went wrong; Anthropic's on the routes of its API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from sidestream.errors import ContextLengthExceeded, ModelError, SidestreamError, Unavailable

TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "invalid_request_error"}
TYPES |= {405: "invalid_request_error", 413: "invalid_request_error", 429: "rate_limit_error", 431: "invalid_request_error"}
RETRY_AFTER = {429: "1", 503: "2"}  # seconds
CODES = {400: "invalid_http", 404: "not_found", 405: "method_not_allowed", 431: "head_too_large"}

ErrorShape = Literal["openai", "anthropic"]
ANTHROPIC_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
ANTHROPIC_TYPES |= {429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}


class ErrorInfo(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    request_id: str | None = msgspec.field(default=None)


class Aborted(SidestreamError):
    """Somebody ended the request by its id. Not one of the statuses after which clients try again by themselves."""

    status = 499
    code = "aborted"


class ErrorAnswer(msgspec.Struct, kw_only=True):
    error: ErrorInfo


class AnthropicErrorInfo(msgspec.Struct, kw_only=True):
    type: str
    message: str


class AnthropicErrorAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="error"):
    error: AnthropicErrorInfo
    request_id: str | None = None


ERROR_ANSWERS: dict[ErrorShape, type[msgspec.Struct]] = {"openai": ErrorAnswer, "anthropic": AnthropicErrorAnswer}


def described(error: BaseException, id: str | None = None) -> tuple[int, ErrorAnswer]:
    """The status and the body of an error."""
    if isinstance(error, HTTPException):
        return error.status_code, _answer(error.status_code, str(error.detail), CODES.get(error.status_code))
    if not isinstance(error, SidestreamError):
        info = _answer(500, f"{type(error).__name__}: {error}", "engine_error")
        info.error.request_id = id
        return 500, info
    message = error.said if isinstance(error, ContextLengthExceeded) else error.message  # clients look for its sentence
    if error.hint is not None:
        message += f"{'' if message.endswith('.') else '.'} {error.hint}"
    message = message.replace("\n", " ")
    status = 404 if isinstance(error, ModelError) else error.status
    answer = _answer(status, message, error.code, getattr(error, "param", None))
    if status >= 500 and not isinstance(error, Unavailable):
        answer.error.request_id = id
    return status, answer


def _answer(status: int, message: str, code: str | None, param: str | None = None) -> ErrorAnswer:
    return ErrorAnswer(error=ErrorInfo(message=message, type=TYPES.get(status, "server_error"), param=param, code=code))


def shaped(error: BaseException, id: str | None, shape: ErrorShape) -> tuple[int, msgspec.Struct]:
    """The status, and the body in the shape of an API."""
    status, answer = described(error, id)
    if shape == "openai":
        return status, answer
    message = answer.error.message
    if isinstance(error, ContextLengthExceeded):  # clients of this API look for these words
        message = f"prompt is too long: {message}"
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error")
    return status, AnthropicErrorAnswer(error=AnthropicErrorInfo(type=kind, message=message), request_id=id)


def error_response(error: BaseException, id: str | None = None, shape: ErrorShape = "openai") -> Response:
    status, answer = shaped(error, id, shape)
    headers = {"Retry-After": RETRY_AFTER[status]} if status in RETRY_AFTER else {}
    if isinstance(error, HTTPException) and error.headers:
        headers |= error.headers
    return Response(msgspec.json.encode(answer), status, headers, media_type="application/json")


def error_event(error: BaseException, id: str | None = None, shape: ErrorShape = "openai") -> dict[str, Any]:
    """What a stream says last when it fails."""
    return msgspec.to_builtins(shaped(error, id, shape)[1])  # type: ignore[no-any-return]
