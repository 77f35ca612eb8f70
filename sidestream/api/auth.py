"""Who may ask what. Every route needs a key when there is one, except those declared open: what is new is closed by default."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence

from starlette.requests import Request

from sidestream.api.refusals import Forbidden, InvalidKey


class Keys:
    """The server's keys. Without any, everybody may ask; what changes things for others is then left to this machine's processes."""

    def __init__(self, keys: Sequence[str], admin_key: str | None) -> None:
        self._keys = [key.encode() for key in keys]
        self._admin = None if admin_key is None else admin_key.encode()

    def check(self, request: Request, *, admin: bool) -> None:
        """Raises InvalidKey, or Forbidden where another key would do."""
        given = _given_key(request)
        is_admin = self._admin is not None and given is not None and hmac.compare_digest(given, self._admin)
        if is_admin:
            return
        known = given is not None and sum(hmac.compare_digest(given, key) for key in self._keys) > 0  # all: no early end to time
        if self._keys and not known:
            raise InvalidKey(
                "this server needs an API key" if given is None else "the API key is wrong",
                hint="Send it as `Authorization: Bearer KEY` or `x-api-key: KEY`.",
            )
        if admin and self._admin is not None:
            raise Forbidden("this route needs the admin key (--admin-api-key)")
        if admin and not _is_local(request):
            raise Forbidden("without --admin-api-key this route answers to the server's own machine only")


def _given_key(request: Request) -> bytes | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip().encode()
    key = request.headers.get("x-api-key")
    return None if not key else key.encode()


def _is_local(request: Request) -> bool:
    if request.client is None:  # a Unix socket
        return True
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return True  # a Unix socket's path
