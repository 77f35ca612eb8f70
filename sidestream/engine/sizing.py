"""How much memory the KV cache gets: from a budget the user states, or a default, to a number of pages."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from sidestream.config import EngineConfig
from sidestream.errors import ConfigError
from sidestream.models.spec import DecoderSpec

GIB = 2**30
DEFAULT_CPU_FRACTION = 0.5  # of the memory that is available, for the KV cache
DEFAULT_CUDA_FRACTION = 0.85  # of the GPU's memory, for weights and KV cache together
DEFAULT_FULL_REQUESTS = 16  # on a CPU no more than this many requests of full length, however much memory there is


@dataclass(frozen=True)
class KVSize:
    num_pages: int
    page_size: int
    context: int  # longest request that fits
    bytes: int
    reason: str

    def __str__(self) -> str:
        tokens = self.num_pages * self.page_size
        size = f"{tokens:,} tokens in pages of {self.page_size} = {self.bytes / GIB:.2f} GiB ({self.reason})"
        return f"{size} = {tokens / self.context:.1f} requests of {self.context:,}"


def longest_context(config: EngineConfig, spec: DecoderSpec) -> int:
    """Positions of the longest request that is wanted. Raises ConfigError beyond what the model was made for."""
    if config.context_length is not None and config.context_length > spec.max_position:
        raise ConfigError(f"context_length: got {config.context_length}, must be at most {spec.max_position} (what the model was made for)")
    return config.context_length or spec.max_position


def size_kv_cache(
    config: EngineConfig, spec: DecoderSpec, *, itemsize: int, device: torch.device, weight_bytes: int, loaded: bool = True
) -> KVSize:
    """weight_bytes: of the weights, in memory if `loaded`. Raises ConfigError, with the arithmetic, when not even one page fits."""
    per_token, wanted = spec.kv_bytes_per_token(itemsize), longest_context(config, spec)
    if config.kv_tokens is not None:
        tokens, reason = config.kv_tokens, "kv_tokens"
    elif config.kv_memory is not None:
        tokens, reason = config.kv_memory // per_token, "kv_memory"
    else:
        budget, reason = _memory_budget(config, device, weight_bytes, 0 if loaded else weight_bytes)
        tokens = budget // per_token
        if config.mem_fraction is None and device.type == "cpu":
            tokens = min(tokens, DEFAULT_FULL_REQUESTS * wanted)
    num_pages = tokens // config.page_size
    if num_pages < 1:
        field = next((name for name in ("kv_tokens", "kv_memory", "mem_fraction") if getattr(config, name) is not None), None)
        got = f"{field}: got {getattr(config, field)}" if field else f"KV cache: {reason}"
        raise ConfigError(
            f"{got}, which gives {tokens} tokens of {per_token} bytes, must be at least one page of {config.page_size}",
            hint=f"State at least --kv-tokens {config.page_size}, or a smaller --page-size.",
        )
    context = min(wanted, num_pages * config.page_size)
    return KVSize(num_pages, config.page_size, context, num_pages * config.page_size * per_token, reason)


def _memory_budget(config: EngineConfig, device: torch.device, weight_bytes: int, to_come: int) -> tuple[int, str]:
    """to_come: bytes of weights that are not in memory yet."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        fraction = config.mem_fraction or DEFAULT_CUDA_FRACTION
        # What is not free is the weights' and other processes'.
        return max(0, int(free - to_come - total * (1 - fraction))), f"{fraction:.0%} of {total / GIB:.1f} GiB less what is used"
    available = max(0, available_memory() - to_come)
    if config.mem_fraction is not None:
        budget = int((available + weight_bytes) * config.mem_fraction) - weight_bytes
        return max(0, budget), f"{config.mem_fraction:.0%} of {available / GIB:.1f} GiB less weights"
    return int(available * DEFAULT_CPU_FRACTION), f"of {available / GIB:.1f} GiB available"


def available_memory() -> int:
    """Bytes a process can still take without swapping: MemAvailable on Linux, else all physical memory."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
