"""Every error a user can meet: what was wrong, with which value, what to do, and the HTTP status a server answers with."""

from __future__ import annotations


class SidestreamError(Exception):
    """Base of all errors raised on purpose. `status` and `code` are what an HTTP server answers; `hint` says what to do."""

    status = 500
    code = "engine_error"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\n{hint}")
        self.message = message
        self.hint = hint

    def one_line(self) -> str:
        """What was wrong and what to do, as the command line says it."""
        message = " ".join(self.message.split())
        return message if self.hint is None else f"{message.rstrip('.')}. {' '.join(self.hint.split())}"


class InvalidRequest(SidestreamError, ValueError):
    """A field of a request has a value it cannot have. Raised before anything is queued."""

    status = 400
    code = "invalid_value"

    def __init__(self, param: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"{param}: {message}", hint=hint)
        self.param = param
        self.said = message  # without the field


class ContextLengthExceeded(InvalidRequest):
    """The prompt alone leaves no room for the forward that was asked for."""

    code = "context_length_exceeded"


class QueueFull(SidestreamError):
    """The queue holds as many requests as it may; try again later."""

    status = 429
    code = "queue_full"


class NoToken(SidestreamError):
    """From the distribution of the next token none can be taken. Ends this request; others go on."""

    code = "no_token"


class EngineFault(SidestreamError):
    """Something unforeseen went wrong in the engine's process; the message begins with the kind of the error."""


class SlowReader(SidestreamError):
    """A stream was read so slowly that what waited for its reader passed the bound; its request was aborted."""

    code = "slow_reader"


class EngineDead(SidestreamError):
    """The engine stopped with an error; every open request gets this one."""


class ConfigError(SidestreamError, ValueError):
    """An option has a value with which the engine cannot start."""

    code = "config_error"


class ModelError(SidestreamError):
    """A model cannot be found, read or supported."""

    status = 404
    code = "model_not_found"


class DownloadError(ModelError):
    """A model could not be fetched."""
