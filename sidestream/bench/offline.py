"""`sidestream bench offline`: tokens per second of an engine without a server, held against the roofline of the same minutes."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from sidestream import Engine, Output, SamplingParams, __version__
from sidestream.bench.machine import processor
from sidestream.bench.roofline import Costs, Limits
from sidestream.bench.spread import Spread, short
from sidestream.bench.work import CASES, Work, timed
from sidestream.errors import ConfigError
from sidestream.kernels import cpu
from sidestream.kernels.cpu.decoder import NativeDecoder

LARGEST_BUFFER = 2**31  # bytes: far beyond every cache, a larger one would tell no more
HEAD = ("work", "requests of prompt + new", "s", "tok/s", "roofline, tok/s", "share of it")


class Result(NamedTuple):
    """One workload, and the seconds that it cannot beat; None where there is no roofline."""

    name: str
    work: Work
    seconds: list[float]
    bound: float | None

    @property
    def rate(self) -> Spread:
        return Spread.of([self.work.tokens / seconds for seconds in self.seconds])

    @property
    def roofline(self) -> float | None:
        return None if self.bound is None else self.work.tokens / self.bound

    @property
    def share(self) -> Spread | None:
        return None if self.bound is None else Spread.of([self.bound / seconds for seconds in self.seconds])


class Bench:
    """An engine and what its model costs. Raises ConfigError if a workload does not fit the engine's context."""

    def __init__(self, engine: Engine, works: dict[str, Work]) -> None:
        self.engine, self.works = engine, works
        for name, work in works.items():
            if work.prompt + work.new > engine.context_length:
                raise ConfigError(
                    f"--cases: got {name}, which takes {work.prompt + work.new:,} tokens, must be at most the context of "
                    f"{engine.context_length:,}",
                    hint="Choose others with --cases, or state a larger --kv-tokens if the cache is what limits the context.",
                )
        runner = engine._parts.loop.runner
        decoder = runner.decoder
        self.vocab_size = decoder.spec.vocab_size
        self.dtype = str(decoder.dtype).removeprefix("torch.")
        self.device = decoder.device
        self.costs: Costs | None = None
        self.threads = engine.config.threads or torch.get_num_threads()
        self.compute = runner.streams.compute
        self.measured: list[Limits] = []  # before each workload of each repetition
        if isinstance(decoder, NativeDecoder):
            self.costs = Costs(decoder.spec, decoder.step_bytes, decoder.dtype.itemsize)
            self.threads = decoder.threads

    def run(self, repetitions: int) -> list[Result]:
        """Every workload in turn, then again: so that a machine that drifts does not favour one of them."""
        seconds: dict[str, list[float]] = {name: [] for name in self.works}
        for work in self.works.values():
            self._time(work.warm_up(), "warm-up")
        for repetition in range(repetitions):
            for name, work in self.works.items():
                if self.costs is not None:
                    self.measured.append(self._limits(self.costs))
                seconds[name].append(self._time(work, f"repetition {repetition}"))
        return [Result(name, work, seconds[name], self._bound(work)) for name, work in self.works.items()]

    @property
    def limits(self) -> Limits | None:
        """The best that was measured: what else the machine does can only make a limit seem lower."""
        return Limits(*map(max, zip(*self.measured, strict=True))) if self.measured else None

    def _bound(self, work: Work) -> float | None:
        return None if self.costs is None or self.limits is None else self.limits.seconds(self.costs.steps(work))

    def _limits(self, costs: Costs) -> Limits:
        """Measured by the engine's own threads, while it has nothing to do."""
        bandwidth = self.compute.launch(cpu.memory_read_gbs, buffer_bytes(costs), self.threads).result()
        return Limits(bandwidth * 1e9, self.compute.launch(cpu.dot_gflops, self.threads).result() * 1e9)

    def _time(self, work: Work, seed: str) -> float:
        return timed(work, seed, self._generate, self.engine.flush_cache, self.vocab_size)

    def _generate(self, prompts: list[list[int]], new: int) -> list[Sequence[int]]:
        greedy = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
        answers = self.engine.generate(prompts, greedy, progress=False)
        assert isinstance(answers, list)
        return [answer.token_ids for answer in answers if isinstance(answer, Output)]

    def machine(self) -> dict[str, Any]:
        native = self.costs is not None
        return {
            "processor": processor() if self.device.type == "cpu" else torch.cuda.get_device_name(self.device),
            "cores": os.cpu_count(),
            "threads": self.threads,
            "instruction_set": cpu.isa() if native else torch.backends.cpu.get_cpu_capability(),
            "backend": "native" if native else "torch",
            "sidestream": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }

    def model(self) -> dict[str, Any]:
        described: dict[str, Any] = {"name": self.engine._frontend.facts.name, "dtype": self.dtype}
        if self.costs is not None:
            described |= {
                "bytes_per_step": self.costs.weight_bytes,
                "kv_bytes_per_token": self.costs.kv_bytes(self.costs.spec.num_layers),
                "flop_per_token": self.costs.token_flop + self.costs.head_flop,
            }
        return described


def buffer_bytes(costs: Costs) -> int:
    """The bandwidth that bounds a step is that of a buffer as large as the weights: a large cache may hold both."""
    return min(costs.weight_bytes, LARGEST_BUFFER)


def works_of(cases: Iterable[str]) -> dict[str, Work]:
    """The workloads of some cases, in the order in which the cases are declared."""
    chosen = set(cases)
    return {name: work for case, works in CASES.items() if case in chosen for name, work in works.items()}


def as_json(bench: Bench, results: Sequence[Result]) -> dict[str, Any]:
    def spread(of: Spread | None) -> dict[str, float] | None:
        return None if of is None else of._asdict()

    limits = None
    if bench.limits is not None:
        limits = {
            "bandwidth_bytes_per_second": bench.limits.bandwidth,
            "compute_flop_per_second": bench.limits.compute,
            "measured": [measured._asdict() for measured in bench.measured],
        }
    return {
        "machine": bench.machine(),
        "model": bench.model(),
        "limits": limits,
        "works": [
            {
                "name": result.name,
                **asdict(result.work),
                "seconds": result.seconds,
                "tokens_per_second": spread(result.rate),
                "roofline_seconds": result.bound,
                "roofline_tokens_per_second": result.roofline,
                "share": spread(result.share),
            }
            for result in results
        ],
    }


def as_text(bench: Bench, results: Sequence[Result]) -> tuple[list[str], list[tuple[str, ...]], list[str]]:
    """What stands above the table, its rows, and what stands below it."""
    machine, model = bench.machine(), bench.model()
    above = [
        f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, {machine['instruction_set']}, "
        f"{'native kernels' if machine['backend'] == 'native' else 'PyTorch'}",
        f"{model['name']} in {model['dtype']} · sidestream {machine['sidestream']} · torch {machine['torch']} · "
        f"{len(results[0].seconds)} repetitions: median (least..most)",
    ]
    rows: list[tuple[str, ...]] = []
    for result in results:
        share = result.share
        percent = "-" if share is None else f"{share.median:.0%} ({share.low:.0%}..{share.high:.0%})"
        roofline = "-" if result.roofline is None else short(result.roofline)
        rows.append((result.name, str(result.work), str(Spread.of(result.seconds)), str(result.rate), roofline, percent))
    if bench.costs is None:
        return above, rows, ["No roofline: it is that of the native CPU kernels, and PyTorch computes here."]
    bandwidth = Spread.of([measured.bandwidth / 1e9 for measured in bench.measured])
    compute = Spread.of([measured.compute / 1e9 for measured in bench.measured])
    below = [
        f"The machine, measured before each work: reads {bandwidth} GB/s from a buffer of {short(buffer_bytes(bench.costs) / 1e6)} MB, "
        f"as large as the packed weights (a large cache may serve both); computes {compute} GFLOP/s in bfloat16 dot products.",
        f"The model: a step reads {short(model['bytes_per_step'] / 1e6)} MB of weights and {short(model['kv_bytes_per_token'] / 1e3)} kB "
        f"per token of context; a token takes {short(model['flop_per_token'] / 1e9)} GFLOP and attention. "
        "No step is faster than max(bytes / bandwidth, FLOP / rate), with the most of each.",
    ]
    return above, rows, below
