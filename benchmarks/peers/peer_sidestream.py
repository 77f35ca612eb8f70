"""Ours. Engine options can be set with SIDESTREAM_* variables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from install import FORMATS, gguf_file
from protocol import main


class Sidestream:
    def __init__(self, work: Path, format: str, threads: int) -> None:
        from sidestream import Engine, __version__

        self.version = __version__
        self.engine = Engine(str(gguf_file(work, format)), dtype="bfloat16", device="cpu", threads=threads, log_level="info")

    def generate(self, prompts: list[list[int]], new: int) -> Sequence[Sequence[int]]:
        from sidestream import SamplingParams

        greedy = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
        answers = self.engine.generate(prompts, greedy, progress=False)
        assert isinstance(answers, list)
        return [answer.token_ids for answer in answers]

    def close(self) -> None:
        self.engine.close()


if __name__ == "__main__":
    main("sidestream", FORMATS, Sidestream)
