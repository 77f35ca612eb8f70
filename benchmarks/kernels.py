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


def stepper(
    model: Interpreter, memory: DeviceMemory, rows: int, steps: int, clock: Callable[[], float] = time.perf_counter
) -> Callable[[int], float]:
    """Best milliseconds of `steps` steps of `rows` rows: whatever else the machine does can only add."""
    spans = Spans(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([rows]))
    wanted = np.arange(rows)

    def run(_: int) -> float:
        times = []
        for _ in range(steps):
            started = clock()
            model.forward(spans, memory, logit_rows=wanted)
            times.append(clock() - started)
        return 1000 * min(times)

    return run


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--processor-time", action="store_true", help="on one thread, of the processor: for a machine that others use too")
    options = made.parse_args()
    clock = time.process_time if options.processor_time else time.perf_counter
    if options.processor_time:
        torch.set_num_threads(1)  # threads that wait for each other spin
    loaded = load_model("smollm2", dtype=torch.bfloat16, device=CPU)
    models = {name: build_interpreter(loaded, torch.bfloat16, CPU, context=max(ROWS), quantization=name) for name in QUANTIZATIONS}
    pages = max(ROWS) // 16
    memory = DeviceMemory(loaded.spec, num_pages=pages, page_size=16, slots=1, context=max(ROWS), dtype=torch.bfloat16, device=CPU)
    memory.page_table[0, :pages] = torch.arange(1, pages + 1)
    memory.token_table[0] = torch.randint(100, 40_000, memory.token_table[0].shape, generator=torch.Generator().manual_seed(0))
    rows, data = [], {}
    for count in ROWS:
        steps = max(2, (32 if options.quick else 128) // count)
        runs = {name: stepper(model, memory, count, steps, clock) for name, model in models.items()}
        interleaved(runs, 1)  # warm-up
        times = interleaved(runs, options.repetitions)
        faster = [ratios(times["auto"], times[name]) for name in QUANTIZATIONS[1:]]
        rows.append([count, *(Spread.of(times[name]) for name in QUANTIZATIONS), *faster])
        data[count] = times
    head = ["rows", *(f"{name}, ms" for name in QUANTIZATIONS), *(f"auto / {name}" for name in QUANTIZATIONS[1:])]
    megabytes = ", ".join(f"{name} {short(model.weight_bytes / 1e6)} MB" for name, model in models.items())
    kind = "Processor time" if options.processor_time else "Wall time"
    text = f"{kind}, threads: {torch.get_num_threads()}. Packed weights: {megabytes}.\n\n{table(head, rows)}"
    report(options, "kernels", text, {"milliseconds": data})


if __name__ == "__main__":
    main()
