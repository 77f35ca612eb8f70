"""Where an engine is put together: model, memory, streams and loop, with the text side's matchers injected."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import Any

import torch

from sidestream import __version__
from sidestream.config import EngineConfig
from sidestream.engine.copies import ALIGNMENT, Arena, Copies, Ledger
from sidestream.engine.loop import EngineLoop, Factories, Limits
from sidestream.engine.memory import DeviceMemory
from sidestream.engine.pages import PagePool
from sidestream.engine.radix import RadixCache
from sidestream.engine.request import Constraint, StopMatcher
from sidestream.engine.runner import Runner
from sidestream.engine.scheduler import Scheduler
from sidestream.engine.sizing import KVSize, longest_context, size_kv_cache
from sidestream.engine.streams import Streams, open_streams
from sidestream.errors import ConfigError, ModelError
from sidestream.frontend import Facts, Frontend, template_of
from sidestream.kernels import cpu
from sidestream.messages import Outbound, Submit
from sidestream.models.decoder import Decoder
from sidestream.models.interpreter import Interpreter
from sidestream.models.loader import LoadedModel, load_model
from sidestream.models.spec import DecoderSpec
from sidestream.text.grammar import Grammars
from sidestream.text.reasoning import reasoning_of
from sidestream.text.stop import StopStringMatcher
from sidestream.text.tokenizer import Tokenizer

log = logging.getLogger("sidestream")

DEFAULT_RUNNING = 256
DEFAULT_CHUNK = {
    "cpu": 512,
    "cuda": 2048,
}  # prompt tokens per step; a step of this many still ends soon enough for those who decode
COMPUTE = {"auto": "as stored", "w8a8": "w8a8 (8 bits, activations too)", "w4a8": "w4a8 (4 bits, activations 8)"}


@dataclass(frozen=True)
class Assembled:
    """An engine that is ready to run, and what its users need to talk to it."""

    loop: EngineLoop
    frontend: Frontend


def assemble(
    config: EngineConfig,
    emit: Callable[[Outbound], None],
    *,
    streams: Streams | None = None,
    constraint: Callable[[Submit], Constraint | None] = lambda _: None,  # in place of grammars
) -> Assembled:
    """Load the model and build the engine. Raises ModelError or ConfigError."""
    if log.level == logging.NOTSET:  # an application that has set a level keeps it
        log.setLevel(config.log_level.upper())
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device, integer=config.quantization != "auto")
    _check_quantization(config.quantization, dtype, device)
    if device.type == "cpu" and cpu.native() is not None:
        cpu.isa()  # sampling is native in every dtype: a wrong name is refused here, not in the first step
    threads = pick_threads(config.threads)
    streams = streams or open_streams(device, threads)
    log.info(
        "sidestream %s · python %s · torch %s · %s",
        __version__,
        platform.python_version(),
        torch.__version__,
        describe(device, threads),
    )
    try:
        return streams.compute.launch(_build, config, emit, streams, constraint, device, dtype).result()
    except BaseException:
        streams.close()
        raise


def _build(
    config: EngineConfig,
    emit: Callable[[Outbound], None],
    streams: Streams,
    constraint: Callable[[Submit], Constraint | None],
    device: torch.device,
    dtype: torch.dtype,
) -> Assembled:
    """Runs on the compute stream: whatever touches torch kernels does."""
    started = time.perf_counter()
    model = load_model(config.model, dtype=dtype, device=device, tokenizer=config.tokenizer)
    spec = model.spec
    decoder = build_interpreter(model, dtype, device, context=longest_context(config, spec), quantization=config.quantization)
    size = size_kv_cache(config, spec, itemsize=dtype.itemsize, device=device, weight_bytes=decoder.weight_bytes)
    _log_model(model, dtype, size, config, time.perf_counter() - started)
    tokenizer = Tokenizer.from_source(
        model.tokenizer, eos_token_ids=model.eos_token_ids, bos_token_id=model.bos_token_id, add_bos=model.add_bos
    )
    running = config.max_running_requests or DEFAULT_RUNNING
    chunk = config.chunked_prefill_size or DEFAULT_CHUNK[device.type]

    memory = DeviceMemory(
        spec, num_pages=size.num_pages, page_size=size.page_size, slots=running, context=size.context, dtype=dtype, device=device
    )
    pool = PagePool(size.num_pages, size.page_size)
    if streams.poison:
        pool.on_free = lambda pages: _ignore(streams.compute.launch(memory.poison, pages))
    # Each tensor starts on a line of its own, so a step of many small ones needs a little more than its bytes.
    block = max(config.arena_memory, 4 * running) + ALIGNMENT * (running + 16)
    arena = Arena(block, pinned=device.type == "cuda", poison=streams.poison)
    copies = Copies(streams.compute, streams.side, arena, Ledger(), hidden_size=spec.hidden_size, itemsize=dtype.itemsize)
    scheduler = Scheduler(
        pool,
        RadixCache(pool, enabled=not config.disable_radix_cache),
        slots=running,
        chunk=chunk,
        arena_bytes=max(config.arena_memory, 4 * running),
        hidden_size=spec.hidden_size,
        itemsize=dtype.itemsize,
        longest_prefix_first=config.schedule_policy == "lpm",
    )
    limits = Limits(size.context, spec.vocab_size, frozenset(model.eos_token_ids))

    def stop_matcher(message: Submit) -> StopMatcher | None:
        sampling = message.sampling
        if not (sampling.stop or sampling.stop_regex):
            return None
        return StopStringMatcher(
            tokenizer,
            message.prompt.tolist(),
            tuple(sampling.stop),
            regexes=tuple(sampling.stop_regex),
            skip_special_tokens=sampling.skip_special_tokens,
            min_new_tokens=sampling.min_new_tokens,
        )

    grammars = Grammars(tokenizer, spec.vocab_size, threads=torch.get_num_threads())

    def constraint_of(message: Submit) -> Constraint | Future[Constraint] | None:
        if message.grammar is None:
            return constraint(message)
        return grammars.constraint(message.grammar)

    def load(path: str) -> Interpreter:
        other = load_model(path, dtype=dtype, device=device)
        _check_same_model(other.spec, spec, path)
        return build_interpreter(other, dtype, device, context=longest_context(config, spec), quantization=config.quantization)

    overlap = pick_overlap(config.overlap, device)
    loop = EngineLoop(
        scheduler,
        Runner(decoder, memory, streams, copies),
        copies,
        limits,
        Factories(stop_matcher, constraint_of, grammars.fill_masks, load),
        emit=emit,
        overlap=overlap,
    )
    facts = Facts(
        model=config.model,
        name=model.name,
        vocab_size=spec.vocab_size,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_parameters=spec.num_parameters,
        context=size.context,
        eos_token_ids=tuple(model.eos_token_ids),
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        itemsize=dtype.itemsize,
        backend=_backend_name(decoder),
        overlap=overlap,
        max_running=running,
        arena_bytes=config.arena_memory,
        kv_tokens=size.num_pages * size.page_size,
        page_size=size.page_size,
    )
    template = template_of(model.chat_template, tokenizer, model.name)
    return Assembled(loop, Frontend(facts, tokenizer, template, grammars, reasoning_of(template.source)))


def _backend_name(decoder: Interpreter) -> str:
    """With the instruction set: the same request may get other numbers with another one."""
    isa = getattr(decoder, "isa", None)
    return type(decoder).__name__ if isa is None else f"{type(decoder).__name__} ({isa})"


def _check_same_model(spec: DecoderSpec, want: DecoderSpec, path: str) -> None:
    """Raises ModelError, naming what differs."""
    for declared in fields(DecoderSpec):
        got, must = getattr(spec, declared.name), getattr(want, declared.name)
        if got != must:
            raise ModelError(
                f"{path}: its {declared.name} is {got}, must be {must}, as in the model that is loaded",
                hint="Only the numbers of the weights may differ; for another model start another engine.",
            )


def build_interpreter(
    model: LoadedModel, dtype: torch.dtype, device: torch.device, *, context: int, quantization: str = "auto"
) -> Interpreter:
    """The native interpreter where it can run the model, else PyTorch's. Raises ConfigError if integer compute needs the native one."""
    if device.type == "cpu" and dtype == torch.bfloat16:
        from sidestream.kernels.cpu.decoder import NativeDecoder, why_not

        reason = why_not(model.spec)
        if reason is None:
            threads = torch.get_num_threads()
            native = NativeDecoder(model.spec, model.weights, context=context, threads=threads, quantization=quantization)
            log.info("cpu     native kernels (%s), weights %s, %.0f MB", native.isa, COMPUTE[quantization], native.weight_bytes / 1e6)
            return native
        if quantization != "auto":
            raise ConfigError(f"quantization: got {quantization}, must be auto for {model.name}: in the native CPU backend {reason}")
        log.info("cpu     the native backend is not used: %s", reason)
    return Decoder(model.spec, model.weights, context=context)


def _check_quantization(quantization: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ConfigError where integer compute is asked for and cannot be had, whatever the model."""
    if quantization == "auto":
        return
    where = "integer compute is part of the native CPU backend"
    name = str(dtype).removeprefix("torch.")
    if device.type != "cpu":
        raise ConfigError(f"quantization: got {quantization}, must be auto with device {device.type}: {where}", hint="Use --device cpu.")
    if dtype != torch.bfloat16:
        hint = "Use --dtype bfloat16, the type of its hidden rows."
        raise ConfigError(f"quantization: got {quantization}, must be auto with dtype {name}: {where}", hint=hint)
    if cpu.native() is None:
        hint = f"Install sidestream again where there is a C++ compiler ({cpu.WHY_NOT})."
        raise ConfigError(f"quantization: got {quantization}, must be auto here: {where}, which is not installed", hint=hint)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device: got cuda, but this torch finds no CUDA device", hint="Use --device cpu, or install a CUDA build of torch."
        )
    return torch.device(name)


def pick_threads(threads: int | None) -> int:
    """None: as many as torch takes. More than there are processors would only wait for each other."""
    most = os.cpu_count() or 1
    if threads is not None and threads > most:
        raise ConfigError(f"threads: got {threads}, must be at most {most} (the processors of this machine)")
    return threads or torch.get_num_threads()


def pick_dtype(name: str, device: torch.device, *, integer: bool = False) -> torch.dtype:
    """auto: bfloat16 on CUDA, with integer products, and on CPUs that have dot products of it or vectors for the native kernels."""
    if name != "auto":
        return getattr(torch, name)  # type: ignore[no-any-return]
    if integer or device.type == "cuda" or torch.cpu._is_avx512_bf16_supported():
        return torch.bfloat16
    # They widen what they read, and a weight of half the size is read in half the time.
    return torch.bfloat16 if cpu.native() is not None and cpu.isa() != "portable" else torch.float32


def pick_overlap(overlap: bool | None, device: torch.device) -> bool:
    """On a CPU the host's work takes a core from the kernels: measured (`benchmarks/overlap.py`), overlap gains nothing there."""
    return device.type == "cuda" if overlap is None else overlap


def describe(device: torch.device, threads: int) -> str:
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"cpu ({threads} threads, {torch.backends.cpu.get_cpu_capability()})"


def _ignore(_: Any) -> None:
    """The result of launched work nobody waits for."""


def _log_model(model: LoadedModel, dtype: torch.dtype, size: KVSize, config: EngineConfig, seconds: float) -> None:
    spec = model.spec
    log.info(
        "model   %s · %s as %s · %.0fM parameters · %.0f MB · context %s · loaded in %.1f s",
        model.name,
        model.format,
        str(dtype).removeprefix("torch."),
        spec.num_parameters / 1e6,
        model.file_bytes / 1e6,
        f"{size.context:,}",
        seconds,
    )
    log.info("kv      %s, radix cache %s", size, "off" if config.disable_radix_cache else "on")
    if size.context < longest_context(config, spec):
        log.warning(
            "context shrunk from %s to %s tokens: the KV cache holds no more; give it more with --kv-memory or --kv-tokens",
            f"{longest_context(config, spec):,}",
            f"{size.context:,}",
        )
