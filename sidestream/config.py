"""Every option of the engine and of the server, declared once: default, limits, help. Flags, variables and docs come from here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from sidestream.errors import ConfigError
from sidestream.options import Field, Option, checked, did_you_mean, fields_of, shown, variable_of
from sidestream.sources import build, gather, read_file, warn_of_unknown_variables
from sidestream.text.reasoning import NAMES as REASONING_FORMATS
from sidestream.text.tools.format import NAMES as TOOL_FORMATS

GIB, MIB = 2**30, 2**20
MAX_PAGE_SIZE = 256
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 30000
KEY = re.compile(r"[!-~]+")  # what a header of HTTP carries unchanged
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
CACHE_HELP = (
    "The default model is kept in the directory SIDESTREAM_CACHE (default: sidestream below XDG_CACHE_HOME, which is ~/.cache "
    "unless set), models of the Hugging Face Hub where HF_HOME says."
)
CONFIG_HELP = "SIDESTREAM_CONFIG names a file of options, .toml or .yaml; flags and variables go before it."


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options of one engine. Raises ConfigError, naming the field, the value and the limit."""

    model: Annotated[
        str,
        Option(
            "Model: a name (smollm2), a .gguf file, a directory or a Hugging Face repository.",
            positional=True,
            aliases=("--model-path", "--model"),
        ),
    ] = field(default="smollm2", kw_only=False)
    tokenizer: Annotated[
        str | None,
        Option("Tokenizer: a file or a directory. Default: the model's own.", metavar="PATH", aliases=("--tokenizer-path",)),
    ] = None
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
    page_size: Annotated[
        int,
        Option("Token positions per page of the KV cache: a power of two.", low=1, high=MAX_PAGE_SIZE, aliases=("--block-size",)),
    ] = 16
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
    disable_radix_cache: Annotated[
        bool,
        Option("Do not keep the KV cache of finished requests for later prompts.", aliases=("--no-enable-prefix-caching",)),
    ] = False
    overlap: Annotated[
        bool | None,
        Option(
            "Launch a step before the results of the last one are processed. Default: by measurement, per device.",
            flag="--overlap-schedule",
            off_flag="--disable-overlap-schedule",
            aliases=("--async-scheduling",),
            off_aliases=("--no-async-scheduling",),
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
        Option(
            "Least severity that is logged; run, bench and chat take warning by default.", choices=("debug", "info", "warning", "error")
        ),
    ] = "info"

    def __post_init__(self) -> None:
        _normalise(self)
        if self.page_size & (self.page_size - 1):
            limit = f"a power of two between 1 and {MAX_PAGE_SIZE}"
            raise ConfigError(f"page_size: got {self.page_size}, must be {limit}")
        sizes = [name for name in ("kv_tokens", "kv_memory", "mem_fraction") if getattr(self, name) is not None]
        if len(sizes) > 1:
            given = " and ".join(f"{name}={getattr(self, name)}" for name in sizes)
            raise ConfigError(f"{sizes[0]}: got {given}, must be only one of them: each sets the size of the KV cache")

    @classmethod
    def from_env(cls, model: str | None = None, *, environ: Mapping[str, str] = os.environ, **overrides: Any) -> EngineConfig:
        """A configuration from explicit arguments, then `SIDESTREAM_*` variables, the file they name, the defaults. Raises ConfigError."""
        names = [field.name for field in fields_of(cls)]
        for name, value in overrides.items():
            if name not in names:
                raise ConfigError(f"{name}: got {shown(value)}, but no such option exists", hint=did_you_mean(name, names))
        return configured(overrides if model is None else overrides | {"model": model}, environ=environ, only=(cls,)).engine


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The options of one server, besides those of its engine. Raises ConfigError, naming the field, the value and the limit."""

    host: Annotated[str, Option("Address to listen on; 0.0.0.0 for all of this machine's.", metavar="ADDRESS")] = DEFAULT_HOST
    port: Annotated[int, Option("Port to listen on; 0 takes any free one.", low=0, high=65535)] = DEFAULT_PORT
    uds: Annotated[str | None, Option("Unix domain socket to listen on, in place of host and port.", metavar="PATH")] = None
    api_key: Annotated[
        Sequence[str],
        Option("Key that every request must carry. May be repeated; the variable takes several, with commas.", metavar="KEY", secret=True),
    ] = field(default=(), repr=False)
    admin_api_key: Annotated[
        str | None,
        Option("Key of the routes that change the server; without one they answer to this machine only.", metavar="KEY", secret=True),
    ] = field(default=None, repr=False)
    cors_origin: Annotated[
        Sequence[str],
        Option(
            "Origin whose pages may call the server from a browser, or * for all. May be repeated.",
            metavar="ORIGIN",
            aliases=("--allowed-origins",),
        ),
    ] = ()
    served_model_name: Annotated[str | None, Option("Name of the model in requests and answers. Default: its own.", metavar="NAME")] = None
    chat_template: Annotated[str | None, Option("File with a chat template. Default: the model's own.", metavar="FILE")] = None
    tool_call_parser: Annotated[
        str,
        Option(
            "How the model writes tool calls; auto: as its chat template teaches, none: they are text.", choices=TOOL_FORMATS, hidden=True
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Option(
            "How the model marks its reasoning; auto: as its chat template does, none: it is text.", choices=REASONING_FORMATS, hidden=True
        ),
    ] = "auto"
    hidden_states: Annotated[
        str, Option("Most that a request may ask of hidden states: none, its last row, or all.", choices=("off", "last", "full"))
    ] = "full"
    max_body_size: Annotated[int, Option("Most bytes of a request's body.", low=1, size=True)] = 64 * MIB
    shutdown_timeout: Annotated[
        float,
        Option("Seconds that open requests get to end when the server is told to stop.", low=0.0, above_low=True),
    ] = 30.0
    metrics_compat: Annotated[
        str | None, Option("Name the metrics as another engine does, for dashboards made for it.", choices=("sglang", "vllm"))
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        Option("Where traces of requests are sent, by OTLP over HTTP.", metavar="URL", aliases=("--otlp-traces-endpoint",)),
    ] = None
    log_format: Annotated[str, Option("Lines for people, or one JSON object per line.", choices=("text", "json"))] = "text"
    config: Annotated[str | None, Option("File of options, .toml or .yaml; flags and variables go before it.", metavar="FILE")] = None

    def __post_init__(self) -> None:
        _normalise(self)
        changed = [name for name, default in (("host", DEFAULT_HOST), ("port", DEFAULT_PORT)) if getattr(self, name) != default]
        if self.uds is not None:
            _refuse_beside_uds(changed)
        keys = [("api_key", key) for key in self.api_key] + [("admin_api_key", self.admin_api_key or "x")]
        for name, key in keys:
            if not KEY.fullmatch(key):
                raise ConfigError(f"{name}: got a key that no header can carry, must be visible ASCII characters without spaces")
        for origin in self.cors_origin:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ConfigError(f"cors_origin: got {shown(origin)}, must be an origin such as https://example.com, or *")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"otlp_endpoint: got {shown(self.otlp_endpoint)}, must be a URL such as http://localhost:4318")
        if self.chat_template is not None:
            _check_readable("chat_template", self.chat_template)


class Configured(NamedTuple):
    """The options of an engine and of the server around it, and of each one that is not left to its default, where it comes from."""

    engine: EngineConfig
    serve: ServeConfig
    sources: Mapping[str, str]  # by name: a variable or a file; empty for an explicit argument


def configured(
    explicit: Mapping[str, Any], *, environ: Mapping[str, str] = os.environ, only: Sequence[type] = (EngineConfig, ServeConfig)
) -> Configured:
    """Explicit values, then `SIDESTREAM_*` variables, then the file of `config`, then the defaults. Raises ConfigError.

    Declarations that are not in `only` keep their defaults.
    """
    declared = declared_options()
    warn_of_unknown_variables(declared, environ)
    path = explicit.get("config") or environ.get(variable_of("--config"))
    file = read_file(Path(path), [each for each in declared if each.name != "config"]) if path else {}
    given = {each: gather(fields_of(each), explicit, environ, file) for each in only}
    server = given.get(ServeConfig, {})
    if "uds" in server and server["uds"].value is not None:
        beside = [(name, server[name].source) for name in ("host", "port") if name in server]
        _refuse_beside_uds([f"{name} (from {source})" if source else name for name, source in beside])
    made = {each: build(each, values) for each, values in given.items()}
    sources = {name: source for values in given.values() for name, (_, source) in values.items()}
    return Configured(made.get(EngineConfig) or EngineConfig(), made.get(ServeConfig) or ServeConfig(), sources)


def declared_options() -> tuple[Field, ...]:
    """Every option that a flag, a variable or a file may set."""
    return (*fields_of(EngineConfig), *fields_of(ServeConfig))


def _normalise(config: object) -> None:
    for declared in fields_of(type(config)):
        try:
            object.__setattr__(config, declared.name, checked(declared, getattr(config, declared.name)))
        except ValueError as error:
            raise ConfigError(f"{declared.name}: {error}") from None


def _refuse_beside_uds(given: Sequence[str]) -> None:
    if given:
        raise ConfigError(f"uds: got {' and '.join(given)} too, must be alone: a server listens on one or the other")


def _check_readable(name: str, path: str) -> None:
    try:
        Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"{name}: {path} cannot be read: {reason}") from None
