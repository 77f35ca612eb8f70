"""What systemd wants to know of a service with `Type=notify`: that it is ready, that it is ending, what it does (sd_notify(3))."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

log = logging.getLogger("sidestream")


class Notifier:
    """Tells the service manager whose socket `NOTIFY_SOCKET` names; says nothing where there is none, and never fails."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        name = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + name[1:] if name.startswith("@") else name  # @: a name in the abstract namespace, without a file

    def ready(self, status: str = "") -> None:
        """The server answers requests."""
        self._send("READY=1", status)

    def stopping(self, status: str = "") -> None:
        """The server has begun to end."""
        self._send("STOPPING=1", status)

    def status(self, text: str) -> None:
        """One line that `systemctl status` shows."""
        self._send("", text)

    def _send(self, state: str, status: str) -> None:
        if not self._address or not hasattr(socket, "AF_UNIX"):
            return
        told = f"STATUS={' '.join(status.split())}" if status else ""  # a line break would begin another assignment
        message = "\n".join(filter(None, (state, told)))
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
                channel.settimeout(1.0)
                channel.connect(self._address)
                channel.sendall(message.encode())
        except OSError as error:
            log.debug("the service manager could not be told %s: %s", message, error)
