"""Tokens per second with overlap on and off: the same workload, interleaved, and what `overlap=None` should pick here."""

from __future__ import annotations

import time
from functools import partial

import torch
from common import Spread, greedy, interleaved, parser, prompts, ratios, report, table

from sidestream import Engine
from sidestream.assemble import pick_device, pick_overlap

PROMPT_TOKENS = 32
WORTH = 1.02  # a gain below this is noise


def rate(engine: Engine, streams: int, new: int, repetition: int) -> float:
    """Output tokens per second of `streams` requests at once."""
    engine.flush_cache()
    asked = prompts(f"overlap {repetition}", streams, PROMPT_TOKENS)
    started = time.perf_counter()
    engine.generate(asked, greedy(new), progress=False)
    return streams * new / (time.perf_counter() - started)


def main() -> None:
    options = parser(__doc__).parse_args()
    sizes = {1: 48, 32: 16} if options.quick else {1: 256, 32: 64}
    rows, data, gains = [], {}, []
    with Engine(overlap=True, kv_tokens=32_768) as on, Engine(overlap=False, kv_tokens=32_768) as off:
        for streams, new in sizes.items():
            for engine in (on, off):
                rate(engine, streams, 4, -1)
            rates = interleaved({"on": partial(rate, on, streams, new), "off": partial(rate, off, streams, new)}, options.repetitions)
            gain = ratios(rates["on"], rates["off"])
            gains.append(gain)
            rows.append([streams, f"{PROMPT_TOKENS} + {new}", Spread.of(rates["on"]), Spread.of(rates["off"]), gain])
            data[f"{streams} streams"] = {"new_tokens": new, **rates}
    device = pick_device("auto")
    # On, where it never costs anything and gains somewhere.
    wins = min(gain.median for gain in gains) > 1 / WORTH and max(gain.median for gain in gains) >= WORTH
    picked = pick_overlap(None, device)
    verdict = (
        f"By these numbers `overlap=None` should pick {'on' if wins else 'off'} on this machine ({device.type}, "
        f"{torch.get_num_threads()} threads); it picks {'on' if picked else 'off'}."
    )
    text = table(["streams", "tokens each", "on, tok/s", "off, tok/s", "on / off"], rows)
    report(options, "overlap", f"{text}\n\n{verdict}", {"measured": data, "should_pick": wins, "picks": picked})


if __name__ == "__main__":
    main()
