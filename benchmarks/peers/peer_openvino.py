"""OpenVINO GenAI: its continuous batching pipeline with prefix caching."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from install import OPENVINO_FORMATS, openvino_model
from protocol import main

CACHE_GIB, MOST_SEQUENCES = 3, 64


class OpenVino:
    def __init__(self, work: Path, format: str, threads: int) -> None:
        import openvino_genai as genai

        self.version = str(genai.__version__)
        scheduler: Any = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = CACHE_GIB, MOST_SEQUENCES, True
        folder = str(openvino_model(work, format))
        self.pipeline: Any = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})

    def generate(self, prompts: list[list[int]], new: int) -> Sequence[Sequence[int]]:
        import numpy as np
        import openvino
        import openvino_genai as genai

        greedy: Any = genai.GenerationConfig()
        greedy.max_new_tokens, greedy.do_sample, greedy.ignore_eos = new, False, True
        asked = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        return [result.m_generation_ids[0] for result in self.pipeline.generate(asked, [greedy] * len(asked))]

    def close(self) -> None:
        pass


if __name__ == "__main__":
    main("openvino", OPENVINO_FORMATS, OpenVino)
