"""What is on this machine: interpreter, libraries, processor, memory, GPUs, caches, variables."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from sidestream import __version__
from sidestream.config import declared_options
from sidestream.doctor.report import Fact, Report
from sidestream.options import MASK, variable_of
from sidestream.sources import unknown_variables

GIB = 2**30
FLAGS = re.compile(r"avx\w*|amx\w*|fma|f16c|asimd\w*|sve\w*|bf16|i8mm")  # what the kernels or PyTorch make use of
OTHERS = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "XDG_CACHE_HOME")
SECRETS = ("HF_TOKEN", "HTTPS_PROXY", "HTTP_PROXY")  # a proxy's address may hold a password
DEVELOPMENT = ("test", "bench")  # extras of those who work on the project
DRIVER = Path("/proc/driver/nvidia/version")


def find(report: Report, environ: Mapping[str, str]) -> None:
    """Everything that can be seen without a model."""
    for name, ask in (
        ("sidestream", _sidestream),
        ("python", _python),
        ("torch", _torch),
        ("processor", _processor),
        ("memory", _memory),
        ("native", lambda: _native(report)),
        ("cuda", lambda: _cuda(report)),
        ("packages", lambda: _packages(report)),
        ("cache", _cache),
        ("hub cache", _hub_cache),
        ("variables", lambda: _variables(report, environ)),
    ):
        report.tell("found", name, ask)


def _sidestream() -> Fact:
    where = str(Path(__file__).parent.parent)
    return Fact(f"{__version__} in {where}", {"version": __version__, "path": where})


def _python() -> Fact:
    version, system = platform.python_version(), platform.platform()
    return Fact(f"{version}, {sys.executable}, {system}", {"version": version, "executable": sys.executable, "platform": system})


def _torch() -> Fact:
    import torch

    build, threads = torch.version.cuda, torch.get_num_threads()
    words = f"{torch.__version__}, built {f'for CUDA {build}' if build else 'without CUDA'}, takes {_count(threads, 'thread')}"
    return Fact(words, {"version": torch.__version__, "cuda": build, "threads": threads})


def _processor() -> Fact:
    from sidestream.bench.machine import processor

    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    flags = _flags()
    words = f"{processor()}, {_count(cores, 'core')}, {usable} of them for this process: {' '.join(flags) or 'no vector flags known'}"
    return Fact(words, {"name": processor(), "cores": cores, "usable_cores": usable, "flags": flags})


def _flags() -> list[str]:
    """Of the processor, where Linux tells."""
    try:
        found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    except OSError:
        found = None
    return [flag for flag in (found[1].split() if found else ()) if FLAGS.fullmatch(flag)]


def _memory() -> Fact:
    from sidestream.engine.sizing import available_memory

    total, available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), available_memory()
    return Fact(f"{total / GIB:.1f} GiB, {available / GIB:.1f} GiB available", {"total_bytes": total, "available_bytes": available})


def _native(report: Report) -> Fact:
    from sidestream.kernels import cpu

    module = cpu.native()
    if module is None:
        report.add_problem(
            f"native: the CPU kernels are not installed ({cpu.WHY_NOT}), so PyTorch does their work, slower. "
            "Install sidestream again where there is a C++ compiler."
        )
        return Fact(f"not installed: {cpu.WHY_NOT}", {"installed": False, "why_not": cpu.WHY_NOT})
    supported: list[str] = module.supported()
    words = f"installed; this processor can run {', '.join(supported)}; {cpu.isa()} is used"
    return Fact(words, {"installed": True, "path": module.__file__, "supported": supported, "instruction_set": cpu.isa()})


def _cuda(report: Report) -> Fact:
    import torch

    if not torch.cuda.is_available():
        if DRIVER.exists():
            why = "is a build without CUDA" if torch.version.cuda is None else "does not find it"
            report.add_problem(f"cuda: there is an NVIDIA GPU, but this torch {why}. https://pytorch.org says which build to install.")
        return Fact("no device", [])
    devices: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        name = torch.cuda.get_device_name(index)
        devices.append({"name": name, "capability": capability, "total_bytes": total, "free_bytes": free})
    words = (f"{each['name']}, {each['free_bytes'] / GIB:.1f} of {each['total_bytes'] / GIB:.1f} GiB free" for each in devices)
    return Fact("; ".join(words), devices)


def _packages(report: Report) -> Fact:
    """What this package requires, and what its extras do."""
    versions: dict[str, str | None] = {}
    wanted: dict[str, str] = {}  # of what is not there, the extra that brings it
    for name, extra, limits in _requirements():
        versions[name] = _version(name)
        if versions[name] is None and extra:
            wanted[name] = extra
        elif versions[name] is None or not _within(limits, str(versions[name])):
            found = "is not installed" if versions[name] is None else f"{versions[name]} is installed"
            report.add_problem(f"packages: {name} {found}, sidestream needs {name}{limits}. pip install '{name}{limits}'")
    if not versions:
        return Fact("unknown: sidestream is not installed as a package", {})
    there = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    absent = ", ".join(f"{name} (sidestream[{extra}])" for name, extra in wanted.items())
    return Fact(f"{there}{f'; not installed: {absent}' if absent else ''}", versions)


def _requirements() -> Iterator[tuple[str, str, str]]:
    """Name, extra and limits on the version."""
    try:
        lines = metadata.requires("sidestream") or []
    except metadata.PackageNotFoundError:
        lines = []
    for line in lines:
        requirement, _, marker = line.partition(";")
        match = re.match(r"\s*([\w.-]+)(?:\[[^]]*\])?\s*\(?([^)]*)", requirement)
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)", marker)
        own = match is None or match[1] == "sidestream"
        if match is not None and not own and (extra is None or extra[1] not in DEVELOPMENT) and "python_version" not in marker:
            yield match[1], extra[1] if extra else "", match[2].strip()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _within(limits: str, version: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:  # comes with huggingface_hub, as a rule
        return True
    return SpecifierSet(limits).contains(version, prereleases=True)


def _cache() -> Fact:
    from sidestream.models.hub import cache_directory

    directory = cache_directory()
    files = {path.name: path.stat().st_size for path in sorted(directory.glob("*")) if path.is_file()} if directory.is_dir() else {}
    return Fact(f"{directory}: {_listed(files)}", {"path": str(directory), "files": files})


def _hub_cache() -> Fact:
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    directory = constants.HF_HUB_CACHE
    try:
        files = {repo.repo_id: repo.size_on_disk for repo in sorted(scan_cache_dir().repos, key=lambda repo: repo.repo_id)}
    except CacheNotFound:
        files = {}
    return Fact(f"{directory}: {_listed(files)}", {"path": directory, "repositories": files})


def _listed(files: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({size / 1e6:,.0f} MB)" for name, size in files.items()) or "nothing"


def _variables(report: Report, environ: Mapping[str, str]) -> Fact:
    declared = declared_options()
    secret = [*SECRETS, *(variable_of(field.flag) for field in declared if field.option.secret)]
    names = [name for name in environ if name.startswith("SIDESTREAM_") or name in OTHERS or name.upper() in SECRETS]
    values = {name: MASK if name.upper() in secret else environ[name] for name in sorted(names)}
    report.problems += [f"{name}: there is no such variable. {advice}" for name, advice in unknown_variables(declared, environ).items()]
    words: Any = ", ".join(f"{name}={value}" for name, value in values.items())
    return Fact(words or "none of those that are read", values)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
