"""Milliseconds of a step of the native backend by number of rows: weights as they are stored against integer compute.

A step is one span from position 0 with the logits of every row: all matrices of the model, and attention over so few keys that it hardly
counts. Variants run in turn; a ratio is taken between neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from common import Spread, interleaved, parser, ratios, report, short, table

from sidestream.assemble import build_interpreter
from sidestream.engine.memory import DeviceMemory
from sidestream.models.interpreter import Interpreter, Spans
from sidestream.models.loader import load_model

QUANTIZATIONS = ("auto", "w8a8", "w4a8")
ROWS = (1, 4, 32, 256)
CPU = torch.device("cpu")


def stepper(model: Interpreter, memory: DeviceMemory, rows: int, steps: int) -> Callable[[int], float]:
    """Best milliseconds of `steps` steps of `rows` rows: whatever else the machine does can only add."""
    spans = Spans(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([rows]))
    wanted = np.arange(rows)

    def run(_: int) -> float:
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            model.forward(spans, memory, logit_rows=wanted)
            times.append(time.perf_counter() - started)
        return 1000 * min(times)

    return run


def main() -> None:
    options = parser(__doc__).parse_args()
    loaded = load_model("smollm2", dtype=torch.bfloat16, device=CPU)
    models = {name: build_interpreter(loaded, torch.bfloat16, CPU, context=max(ROWS), quantization=name) for name in QUANTIZATIONS}
    pages = max(ROWS) // 16
    memory = DeviceMemory(loaded.spec, num_pages=pages, page_size=16, slots=1, context=max(ROWS), dtype=torch.bfloat16, device=CPU)
    memory.page_table[0, :pages] = torch.arange(1, pages + 1)
    memory.token_table[0] = torch.randint(100, 40_000, memory.token_table[0].shape, generator=torch.Generator().manual_seed(0))
    rows, data = [], {}
    for count in ROWS:
        steps = max(3, (32 if options.quick else 128) // count)
        runs = {name: stepper(model, memory, count, steps) for name, model in models.items()}
        interleaved(runs, 1)  # warm-up
        times = interleaved(runs, options.repetitions)
        faster = [ratios(times["auto"], times[name]) for name in QUANTIZATIONS[1:]]
        rows.append([count, *(Spread.of(times[name]) for name in QUANTIZATIONS), *faster])
        data[count] = times
    head = ["rows", *(f"{name}, ms" for name in QUANTIZATIONS), *(f"auto / {name}" for name in QUANTIZATIONS[1:])]
    megabytes = ", ".join(f"{name} {short(model.weight_bytes / 1e6)} MB" for name, model in models.items())
    text = f"Threads: {torch.get_num_threads()}. Packed weights: {megabytes}.\n\n{table(head, rows)}"
    report(options, "kernels", text, {"milliseconds": data})


if __name__ == "__main__":
    main()
