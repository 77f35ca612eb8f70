"""Every option of the engine, declared once: default, limits, help. Flags, environment variables and docs come from here."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any

from sidestream.errors import ConfigError
from sidestream.options import ENVIRONMENT_PREFIX, Field, Option, checked, did_you_mean, fields_of, read, shown, variable_of

log = logging.getLogger("sidestream")

GIB, MIB = 2**30, 2**20
MAX_PAGE_SIZE = 256
CACHE_HELP = (
    "The default model is kept in the directory SIDESTREAM_CACHE (default: sidestream below XDG_CACHE_HOME, which is ~/.cache "
    "unless set), models of the Hugging Face Hub where HF_HOME says."
)
# Variables that are not options: where models are kept, what the native kernels may use, and what only tests read.
OTHER_VARIABLES = ("SIDESTREAM_CACHE", "SIDESTREAM_CPU_ISA")
TEST_VARIABLES = "SIDESTREAM_TEST_"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options of one engine. Raises ConfigError, naming the field, the value and the limit."""

    model: Annotated[
        str,
        Option("Model: a name (smollm2), a .gguf file, a directory or a Hugging Face repository.", positional=True),
    ] = field(default="smollm2", kw_only=False)
    tokenizer: Annotated[str | None, Option("Tokenizer: a file or a directory. Default: the model's own.", metavar="PATH")] = None
    dtype: Annotated[
        str,
        Option(
            "Type of the arithmetic; auto is bfloat16 on CUDA and on CPUs that have AVX2 or more, else float32.",
            choices=("auto", "float32", "bfloat16", "float16"),
        ),
    ] = "auto"
    quantization: Annotated[
        str,
        Option(
            "Integer compute of the native CPU backend: w8a8 and w4a8 round activations to 8 bits and keep weights in 8 or 4. "
            "auto: weights as they are stored, activations in the type of the arithmetic.",
            choices=("auto", "w8a8", "w4a8"),
        ),
    ] = "auto"
    device: Annotated[str, Option("Where the model runs; auto takes CUDA if there is a GPU.", choices=("auto", "cpu", "cuda"))] = "auto"
    context_length: Annotated[
        int | None,
        Option("Most tokens of prompt and output together. Default: the model's.", low=1, aliases=("--max-model-len",)),
    ] = None
    page_size: Annotated[int, Option("Token positions per page of the KV cache: a power of two.", low=1, high=MAX_PAGE_SIZE)] = 16
    kv_tokens: Annotated[int | None, Option("Size of the KV cache in tokens.", low=1, aliases=("--max-total-tokens",))] = None
    kv_memory: Annotated[
        int | None,
        Option("Size of the KV cache in bytes, such as 2GiB.", low=1, size=True, aliases=("--kv-cache-memory-bytes",)),
    ] = None
    mem_fraction: Annotated[
        float | None,
        Option(
            "Share of the device's memory to use. Default: chosen per device.",
            low=0.0,
            above_low=True,
            high=1.0,
            aliases=("--mem-fraction-static", "--gpu-memory-utilization"),
        ),
    ] = None
    max_running_requests: Annotated[
        int | None, Option("Requests in one batch at most. Default: chosen.", low=1, aliases=("--max-num-seqs",))
    ] = None
    max_queued_requests: Annotated[int, Option("Requests that may wait; more are refused.", low=1)] = 512
    chunked_prefill_size: Annotated[
        int | None,
        Option("Prompt tokens per step at most. Default: chosen.", low=1, aliases=("--max-num-batched-tokens",)),
    ] = None
    schedule_policy: Annotated[
        str,
        Option("Order of the queue: first come first served, or longest cached prefix first.", choices=("fcfs", "lpm")),
    ] = "fcfs"
    disable_radix_cache: Annotated[bool, Option("Do not keep the KV cache of finished requests for later prompts.")] = False
    overlap: Annotated[
        bool | None,
        Option(
            "Launch a step before the results of the last one are processed. Default: by measurement, per device.",
            flag="--overlap-schedule",
            off_flag="--disable-overlap-schedule",
        ),
    ] = None
    threads: Annotated[int | None, Option("CPU threads that compute. Default: chosen.", low=1)] = None
    max_output_bytes: Annotated[
        int,
        Option("Most bytes of hidden states and logprobs one request may ask for, over all its steps.", low=1, size=True),
    ] = 4 * GIB
    arena_memory: Annotated[
        int,
        Option(
            "Host memory that receives the outputs of one step; two steps may be in flight, so twice this at most.",
            low=1,
            size=True,
        ),
    ] = 64 * MIB
    log_level: Annotated[
        str,
        Option("Least severity that is logged; sidestream run takes warning by default.", choices=("debug", "info", "warning", "error")),
    ] = "info"

    def __post_init__(self) -> None:
        for declared in fields_of(EngineConfig):
            try:
                object.__setattr__(self, declared.name, checked(declared, getattr(self, declared.name)))
            except ValueError as error:
                raise ConfigError(f"{declared.name}: {error}") from None
        if self.page_size & (self.page_size - 1):
            limit = f"a power of two between 1 and {MAX_PAGE_SIZE}"
            raise ConfigError(f"page_size: got {self.page_size}, must be {limit}")
        sizes = [name for name in ("kv_tokens", "kv_memory", "mem_fraction") if getattr(self, name) is not None]
        if len(sizes) > 1:
            given = " and ".join(f"{name}={getattr(self, name)}" for name in sizes)
            raise ConfigError(f"{sizes[0]}: got {given}, must be only one of them: each sets the size of the KV cache")

    @classmethod
    def from_env(cls, model: str | None = None, *, environ: Mapping[str, str] = os.environ, **overrides: Any) -> EngineConfig:
        """A configuration from explicit arguments, then `SIDESTREAM_*` variables, then the defaults. Raises ConfigError."""
        warn_of_unknown_variables(environ)
        declared = {item.name: item for item in fields_of(cls)}
        for name, value in overrides.items():
            if name not in declared:
                raise ConfigError(f"{name}: got {shown(value)}, but no such option exists", hint=did_you_mean(name, declared))
        if model is not None:
            overrides["model"] = model
        values = {}
        for item in declared.values():
            if item.name not in overrides:
                values.update(_from_environment(item, environ))
        return cls(**values, **overrides)


def warn_of_unknown_variables(environ: Mapping[str, str] = os.environ) -> None:
    """A misspelt variable would set nothing, silently."""
    for variable in environ:
        if variable.startswith(ENVIRONMENT_PREFIX) and not variable.startswith(TEST_VARIABLES):
            _warn_if_unknown(variable)


@cache  # once per process
def _warn_if_unknown(variable: str) -> None:
    flags = [flag for item in fields_of(EngineConfig) for flag in (item.flag, item.option.off_flag) if flag is not None]
    known = [*map(variable_of, flags), *OTHER_VARIABLES]
    if variable not in known:
        log.warning("%s is set, but there is no such variable. %s", variable, did_you_mean(variable, known) or "See docs/options.md.")


def _from_environment(item: Field, environ: Mapping[str, str]) -> dict[str, Any]:
    """`{name: value}` when the environment sets the option, else `{}`. Raises ConfigError, naming the variable."""
    found: dict[str, Any] = {}
    sources = [(variable_of(item.flag), True)]
    if item.option.off_flag is not None:
        sources.append((variable_of(item.option.off_flag), False))
    for variable, straight in sources:
        text = environ.get(variable, "")
        if not text:  # a variable that is set but empty counts as not set
            continue
        try:
            value = read(item, text)
        except ValueError as error:
            raise ConfigError(f"{variable}: {error}") from None
        value = value if straight else not value
        if found and found[item.name] != value:
            raise ConfigError(f"{variable}: got {text}, which contradicts {sources[0][0]}={environ[sources[0][0]]}")
        found[item.name] = value
    return found
