"""What hidden states cost: bytes, memory and step time when nobody asks, when some do, and when nothing is gated.

*Gating off* is what an engine without gates does: the final row of every position is kept and copied in every step, whoever asked. It
is built here, around the product's runner. Three views:

* one engine as it is: bytes, device memory of a step's results, step time;
* peak memory of a process of its own for each variant;
* a side stream that is a simulated link of a stated rate, for what a GPU would see: here host and device share their memory, and a
  copy is over before it could be waited for.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from common import Spread, greedy, interleaved, parser, prompts, ratios, report, short, table

from sidestream import Engine
from sidestream.assemble import Assembled, assemble
from sidestream.engine.batch import Batch
from sidestream.engine.copies import GenerationBatchResult
from sidestream.engine.loop import EngineLoop
from sidestream.engine.outputs import TapGroup, TapPlan
from sidestream.engine.questions import ANSWERS
from sidestream.engine.runner import Masks, Runner
from sidestream.engine.streams import CpuStream, Launched, Streams

T = TypeVar("T")

CHUNK = 2048
ALL_LAYERS = list(range(31))
UNGATED = "gating off"
VARIANTS: dict[str, dict[str, Any]] = {
    "off": {},
    '"last"': {"return_hidden_states": "last"},
    "all rows, 1 layer": {"return_hidden_states": True},
    "all rows, 31 layers": {"return_hidden_states": True, "hidden_states_layers": ALL_LAYERS},
    UNGATED: {},
}
LINKED = ("off", '"last"', UNGATED)
LINKS = {"25 GB/s": 25e9, "2 GB/s": 2e9}
SPIN_SECONDS = 1e-4  # a sleep is no more exact than this


class Work(NamedTuple):
    """Requests that run at once. Only steps of `step_tokens` tokens are timed: decode steps, or full chunks of a prompt."""

    requests: int
    prompt: int
    new: int
    step_tokens: int


class Run(NamedTuple):
    """What one run of a workload took."""

    step_ms: float  # median
    copied_bytes: float  # of hidden states, per timed step
    held_bytes: int  # most that the results of one step held on the device
    wait_us: float  # host time per step in waiting for `copy_done`


class Step(NamedTuple):
    """One step as it ended."""

    tokens: int
    ended: float
    copied_bytes: int  # of hidden states


class WatchedRunner(Runner):
    """Notes when steps end and what their results hold; `ungated`, it adds every position's final row to every step."""

    ungated = False

    def watch(self) -> None:
        self.steps: list[Step] = []
        self.held_bytes = 0

    def run_batch(self, batch: Batch, masks: Masks | None = None) -> Launched[GenerationBatchResult]:
        return super().run_batch(self._with_all_rows(batch) if self.ungated else batch, masks)

    def _with_all_rows(self, batch: Batch) -> Batch:
        taps = batch.outputs.taps or TapPlan()
        everything = TapGroup(np.arange(batch.num_tokens), (self.decoder.spec.num_layers,), "model")
        return replace(batch, outputs=replace(batch.outputs, taps=replace(taps, copied=(*taps.copied, everything))))

    def _run_batch(self, batch: Batch, masks: Masks | None) -> GenerationBatchResult:
        if not self.steps:
            self.steps.append(Step(0, time.perf_counter(), 0))
        result = super()._run_batch(batch, masks)
        # What the side stream still reads, and what waits on the device for a "last" row.
        held = sum(tensor.nbytes for tensor in (*result.sources, *result.kept_hidden_states))
        self.held_bytes = max(self.held_bytes, held)
        copied = sum(rows.nbytes for rows in result.logits_output.hidden_states or ())
        self.steps.append(Step(batch.num_tokens, time.perf_counter(), copied))
        return result


class SimulatedLink(CpuStream):
    """A side stream whose copies end no sooner than a link of `rate` bytes per second would let them."""

    rate = math.inf
    _free_at = 0.0

    def launch(self, fn: Callable[..., T], *args: Any) -> Launched[T]:
        return super().launch(self._over_link, fn, *args)

    def _over_link(self, fn: Callable[..., T], target: torch.Tensor, source: torch.Tensor) -> T:
        self._free_at = max(self._free_at, time.perf_counter()) + source.nbytes / self.rate
        value = fn(target, source)
        left = self._free_at - time.perf_counter()
        if left > SPIN_SECONDS:
            time.sleep(left - SPIN_SECONDS)
        while time.perf_counter() < self._free_at:
            pass
        return value


def wait_for(loop: EngineLoop, count: str) -> None:
    """Hold the engine until `count` requests are there: every run has the same steps."""
    while len(loop.requests) < int(count):
        loop.ingest(wait=False)
        time.sleep(0.001)


ANSWERS["wait_for"] = wait_for


class WatchedEngine(Engine):
    """An engine with a `WatchedRunner`, and with a simulated link if one is given."""

    def __init__(self, link: SimulatedLink | None = None) -> None:
        self.link = link
        # Prefixes are not kept: every run computes the same.
        super().__init__(overlap=True, chunked_prefill_size=CHUNK, arena_memory="256MiB", kv_tokens=16_384, disable_radix_cache=True)

    def _assemble(self) -> Assembled:
        streams = Streams(CpuStream(threads=torch.get_num_threads()), self.link) if self.link else None
        parts = assemble(self.config, self._outbox.put, streams=streams)
        plain = parts.loop.runner
        self.runner = WatchedRunner(plain.decoder, plain.memory, plain.streams, plain.copies)
        self.runner.watch()
        parts.loop.runner = self.runner
        return parts

    def measure(self, work: Work, variant: str, repetition: int = 0) -> Run:
        """Run a workload in one variant. The engine is idle before and after."""
        before = self.stats()
        self.runner.watch()
        self.runner.ungated = variant == UNGATED
        asked = prompts(f"copies {repetition}", work.requests, work.prompt)
        self._router.ask("wait_for", str(work.requests), lambda *_: None)
        self.generate(asked, greedy(work.new), progress=False, **VARIANTS[variant])
        after = self.stats()
        pairs = [(last, step) for last, step in pairwise(self.runner.steps) if step.tokens == work.step_tokens]
        waited = after["d2h"]["wait_seconds"] - before["d2h"]["wait_seconds"]
        copied = after["d2h"]["hidden"]["copied_bytes"] - before["d2h"]["hidden"]["copied_bytes"]
        assert copied == sum(step.copied_bytes for step in self.runner.steps), "the ledger counts other bytes"
        return Run(
            median(step.ended - last.ended for last, step in pairs) * 1e3,
            sum(step.copied_bytes for _, step in pairs) / len(pairs),
            self.runner.held_bytes,
            waited / (after["steps"] - before["steps"]) * 1e6,
        )

    def __enter__(self) -> WatchedEngine:
        return self


def workloads(quick: bool) -> dict[str, Work]:
    """Decode steps of 32 requests, and steps of a whole chunk of a prompt."""
    return {
        "decode, 32 requests": Work(32, 16, 16 if quick else 64, 32),
        "prefill, chunk of 2,048": Work(1 if quick else 2, CHUNK, 1, CHUNK),
    }


def measure_all(quick: bool, repetitions: int) -> dict[str, dict[str, list[Run]]]:
    with WatchedEngine() as engine:
        measured = {}
        for name, work in workloads(quick).items():
            engine.measure(work._replace(new=min(work.new, 2)), "off")
            measured[name] = interleaved({variant: partial(engine.measure, work, variant) for variant in VARIANTS}, repetitions)
        return measured


def measure_links(quick: bool, repetitions: int) -> dict[str, dict[str, list[Run]]]:
    link = SimulatedLink("link", threads=1)
    with WatchedEngine(link) as engine:

        def run(work: Work, rate: float, variant: str, repetition: int) -> Run:
            link.rate = rate
            return engine.measure(work, variant, repetition)

        measured = {}
        for name, work in workloads(True).items():  # waits differ little from step to step
            engine.measure(work._replace(new=min(work.new, 2)), "off")
            for label, rate in LINKS.items():
                runs = {variant: partial(run, work, rate, variant) for variant in LINKED}
                measured[f"{name}, {label}"] = interleaved(runs, 1 if quick else repetitions)
        return measured


# Peak memory


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def print_memory(variant: str) -> None:
    """In a process of its own: bytes by which the peak of a workload exceeds what the warm engine holds."""
    peaks = {}
    with WatchedEngine() as engine:
        for name, work in workloads(True).items():
            engine.measure(work, "off")  # weights, KV pages and the intermediates of the forward are resident now
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
            resident = _status_bytes("VmRSS")
            engine.measure(work, variant)
            peaks[name] = {"above_idle": _status_bytes("VmHWM") - resident, "peak": _status_bytes("VmHWM")}
    print(json.dumps(peaks))


def measure_memory(variant: str, _: int) -> dict[str, dict[str, int]]:
    command = [sys.executable, __file__, "--memory", variant]
    # glibc keeps freed memory; above this size it gives it back, so that resident memory is memory in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    peaks: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return peaks


# Results


def size(bytes_: float) -> str:
    """Bytes as a reader wants them."""
    for unit in ("B", "kB", "MB"):
        if bytes_ < 1000:
            return f"{bytes_:.3g} {unit}"
        bytes_ /= 1000
    return f"{bytes_:.3g} GB"


def main_table(measured: dict[str, dict[str, list[Run]]], memory: dict[str, list[dict[str, dict[str, int]]]]) -> str:
    rows = []
    for name, variants in measured.items():
        plain = [run.step_ms for run in variants[UNGATED]]
        for variant, runs in variants.items():
            steps = [run.step_ms for run in runs]
            peak = Spread.of([process[name]["above_idle"] / 1e6 for process in memory[variant]])
            rows.append([name, variant, size(runs[0].copied_bytes), size(runs[0].held_bytes), peak, Spread.of(steps), ratios(steps, plain)])
    head = ["work", "hidden states", "copied per step", "held by a step", "peak above idle, MB", "step, ms", "step / gating off"]
    return table(head, rows)


def link_table(linked: dict[str, dict[str, list[Run]]]) -> str:
    rows = []
    for name, variants in linked.items():
        for variant, runs in variants.items():
            waits = Spread.of([run.wait_us for run in runs])
            rows.append([name, variant, size(runs[0].copied_bytes), waits, Spread.of([run.step_ms for run in runs])])
    return table(["work, simulated link", "hidden states", "copied per step", "host waited per step, µs", "step, ms"], rows)


def draw(file: Path, measured: dict[str, dict[str, list[Run]]], memory: dict[str, list[dict[str, dict[str, int]]]]) -> None:
    """Bars: bytes copied and held per step, peak memory, and time, for each workload."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(measured), 4, figsize=(14, 2.3 * len(measured)), sharey=True, layout="constrained")
    for line, (name, variants) in zip(axes, measured.items(), strict=True):
        columns = {
            "copied per step, kB": [runs[0].copied_bytes / 1e3 for runs in variants.values()],
            "held on the device, kB": [runs[0].held_bytes / 1e3 for runs in variants.values()],
            "process peak above idle, MB": [median([p[name]["above_idle"] / 1e6 for p in memory[v]]) for v in variants],
            "step, ms": [median([run.step_ms for run in runs]) for runs in variants.values()],
        }
        for axis, (label, values) in zip(line, columns.items(), strict=True):
            colours = ["#c44e52" if variant == UNGATED else "#4c72b0" for variant in variants]
            bars = axis.barh(list(variants), values, color=colours)
            axis.bar_label(bars, [short(value) for value in values], padding=3, fontsize=8)
            if "kB" in label:
                axis.set_xscale("symlog")
            axis.margins(x=0.3)
            axis.set_title(label, fontsize=9)
            axis.tick_params(labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel(name, fontsize=9)
    axes[0][0].invert_yaxis()  # shared by all
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--picture", type=Path, metavar="FILE", help="draw the bytes, the memory and the step times")
    made.add_argument("--memory", choices=VARIANTS, help=argparse.SUPPRESS)
    return made.parse_args()


def main() -> None:
    options = arguments()
    if options.memory is not None:
        print_memory(options.memory)
        return
    memory = interleaved({variant: partial(measure_memory, variant) for variant in VARIANTS}, 1 if options.quick else options.repetitions)
    measured = measure_all(options.quick, options.repetitions)
    linked = measure_links(options.quick, options.repetitions)
    text = (
        f"{main_table(measured, memory)}\n\n"
        "On a CPU a copy is a few microseconds of a step: times within the noise of each other are expected; bytes and memory are what "
        "gating saves. *Held by a step* counts the device tensors that a step's results keep alive, tokens included: on a GPU, memory "
        "the next step does not have. *Peak above idle* is that of a fresh process over its warm engine, the rows handed to the caller "
        "included; host memory that is written only at the end of a forward hides behind the forward's own peak.\n\n"
        "The same with a **simulated** link between device and host, on a side stream of its own. What *off* waits for is the copy of "
        "the tokens, a change of threads:\n\n"
        f"{link_table(linked)}"
    )
    data = {"runs": {n: {v: [r._asdict() for r in runs] for v, runs in m.items()} for n, m in (measured | linked).items()}}
    report(options, "copies", text, {**data, "memory": memory})
    if options.picture is not None:
        draw(options.picture, measured, memory)


if __name__ == "__main__":
    main()
