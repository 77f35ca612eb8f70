"""Errors that only a server has: who may ask, how much, when, and what for."""

from __future__ import annotations

from sidestream.errors import ModelError, SidestreamError


class BodyTooLarge(SidestreamError):
    """The body of a request is larger than it may be."""

    status = 413
    code = "body_too_large"


class InvalidKey(SidestreamError):
    """The request has no key of the server, or a wrong one."""

    status = 401
    code = "invalid_api_key"


class Forbidden(SidestreamError):
    """The request needs rights that its key does not give."""

    status = 403
    code = "forbidden"


class UnknownModel(ModelError):
    """The request asks for a model that this server does not have."""

    param = "model"


class Unavailable(SidestreamError):
    """The server takes no requests now; `code` says why: it is loading, draining, stalled or failed."""

    status = 503

    def __init__(self, message: str, *, code: str = "loading", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code
