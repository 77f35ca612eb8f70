"""A client's connection: uvicorn's, with an end to what it would take or wait for without one."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from sidestream.api.errors import error_response

HEAD_BYTES = 64 * 1024  # of a request's first line and headers, or of what follows a body in pieces; what comes at once may be more
LAST_WORDS_SECONDS = 0.5  # for a client to take what it is told when the server ends


class Connection(HttpToolsProtocol):
    """Heads are bounded, what is no HTTP is refused in the shape of every error, and a client that leaves ends all that it asked."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._head_bytes = 0  # received, and not yet part of a head that is complete, nor of a body
        self._answering: RequestResponseCycle | None = None  # the first of those that were sent without waiting for answers
        self._refused = False

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > HEAD_BYTES and not self._refused:
            self._refuse(431, f"the head of the request has {self._head_bytes} bytes or more, at most {HEAD_BYTES} are taken")

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        super().on_headers_complete()
        if not self.pipeline:
            self._answering = self.cycle

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not a request of HTTP/1.1")

    def _refuse(self, status: int, message: str) -> None:
        """Take nothing more. What was asked before is answered to its end."""
        self._refused = True
        before = self._answering
        if before is not None and not before.response_complete and (before.response_started or not before.more_body):
            before.keep_alive = False
            return
        refusal = error_response(HTTPException(status, message))
        head = [STATUS_LINE[status], *(b"%b: %b\r\n" % pair for pair in refusal.raw_headers), b"connection: close\r\n\r\n"]
        self.transport.write(b"".join([*head, refusal.body]))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)  # tells the request that came last, which may still wait for its turn
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def shutdown(self) -> None:
        """The server ends. Half of a request is not waited for, and nobody who reads nothing."""
        super().shutdown()
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_started:
            self.transport.close()
        self.loop.call_later(LAST_WORDS_SECONDS, self.transport.abort)
