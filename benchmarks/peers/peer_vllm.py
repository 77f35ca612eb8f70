"""vLLM on a CPU: offline, every thread bound to a core; with tcmalloc and Intel's OpenMP, as its documentation asks, where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from install import checkpoint
from protocol import main

CACHE_GIB, CONTEXT = 4, 4096


class Vllm:
    def __init__(self, work: Path, format: str, threads: int) -> None:
        import vllm

        self.version = str(vllm.__version__)
        self.engine: Any = vllm.LLM(model=str(checkpoint(work)), dtype="bfloat16", max_model_len=CONTEXT, disable_log_stats=True)

    def generate(self, prompts: list[list[int]], new: int) -> Sequence[Sequence[int]]:
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        answers = self.engine.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False)
        return [answer.outputs[0].token_ids for answer in answers]

    def close(self) -> None:
        del self.engine


def environment(work: Path, threads: int) -> Mapping[str, str]:
    """Without the binding it uses one core of two."""
    preloaded = [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"), *(work / "vllm" / "lib").glob("libiomp5.so")]
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "LD_PRELOAD": ":".join(map(str, preloaded)),
    }


if __name__ == "__main__":  # vLLM starts its engine in a process that imports this file again
    main("vllm", ["bf16"], Vllm, environment)
