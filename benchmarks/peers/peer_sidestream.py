"""Ours; w4a8 and w8a8 are integer compute on the default file. Engine options can be set with SIDESTREAM_* variables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from install import FORMATS, gguf_file
from protocol import main

INTEGER = ("w4a8", "w8a8")


class Sidestream:
    def __init__(self, work: Path, format: str, threads: int) -> None:
        from sidestream import Engine, __version__

        self.version = __version__
        model, quantization = (gguf_file(work, "q4_1"), format) if format in INTEGER else (gguf_file(work, format), "auto")
        self.engine = Engine(str(model), dtype="bfloat16", device="cpu", threads=threads, quantization=quantization, log_level="info")

    def generate(self, prompts: list[list[int]], new: int) -> Sequence[Sequence[int]]:
        from sidestream import SamplingParams

        greedy = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
        answers = self.engine.generate(prompts, greedy, progress=False)
        assert isinstance(answers, list)
        return [answer.token_ids for answer in answers]

    def close(self) -> None:
        self.engine.close()


if __name__ == "__main__":
    main("sidestream", FORMATS + INTEGER, Sidestream)
