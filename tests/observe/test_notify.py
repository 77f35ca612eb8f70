"""What the service manager hears."""

from __future__ import annotations

import logging
import secrets
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidestream.observe.notify import Notifier

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux only")


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """(the value of NOTIFY_SOCKET, the socket behind it)"""
    name = str(tmp_path / "notify") if request.param == "path" else f"@sidestream-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(name.replace("@", "\0", 1) if name.startswith("@") else name)
        listening.settimeout(30)
        yield name, listening


def test_the_manager_hears_every_state(manager):
    name, listening = manager
    notifier = Notifier({"NOTIFY_SOCKET": name})
    notifier.status("loading smollm2")
    notifier.ready("serving http://127.0.0.1:30000")
    notifier.stopping("2 requests\nare open")
    notifier.ready()
    assert [listening.recv(4096) for _ in range(4)] == [
        b"STATUS=loading smollm2",
        b"READY=1\nSTATUS=serving http://127.0.0.1:30000",
        b"STOPPING=1\nSTATUS=2 requests are open",
        b"READY=1",
    ]


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}])
def test_without_a_manager_nothing_happens(environ, monkeypatch):
    monkeypatch.setattr(socket, "socket", lambda *_: pytest.fail("nobody is to be told"))
    notifier = Notifier(environ)
    notifier.status("loading")
    notifier.ready()
    notifier.stopping()


@pytest.mark.parametrize("name", ["/nowhere/notify", "@nobody-listens-here", "vsock:2:1234", "x" * 500])
def test_a_manager_that_is_gone_is_no_error(name, caplog):
    caplog.set_level(logging.DEBUG, "sidestream")
    Notifier({"NOTIFY_SOCKET": name}).ready()
    assert "the service manager could not be told READY=1" in caplog.text


def test_the_environment_is_read_when_it_is_made(monkeypatch, manager):
    name, listening = manager
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    Notifier().ready()
    assert listening.recv(4096) == b"READY=1"
