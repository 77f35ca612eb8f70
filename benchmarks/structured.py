"""Tokens per second with all, half and none of the streams constrained by a JSON Schema, with overlap on and off, and what masks cost.

The schema's list never ends, so every stream has the same number of tokens. `host` is the time of a step in which masks are filled, in
milliseconds, and `steps` how many a stream of those tokens takes: tokens that the schema leaves no choice of need no step of their own.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from common import Spread, interleaved, parser, prompts, ratios, report, table

from sidestream import Engine, SamplingParams

PROMPT_TOKENS = 32
TARGET = 0.85  # of the rate without grammars, with all streams constrained
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 3, "maxLength": 40},
            "kind": {"enum": ["city", "village", "river", "mountain"]},
            "height": {"type": "number"},
            "visited": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,12}$"}, "maxItems": 3},
        },
        "required": ["name", "kind", "height", "visited", "tags"],
        "additionalProperties": False,
    },
}
SHARES = {"none": 0.0, "half": 0.5, "all": 1.0}


def run(engine: Engine, streams: int, share: float, new: int, repetition: int) -> dict[str, float]:
    """Of one batch: output tokens per second, steps, and milliseconds per step for the masks."""
    engine.flush_cache()
    asked = prompts(f"structured {repetition}", streams, PROMPT_TOKENS)
    sampling = [
        SamplingParams(
            max_new_tokens=new,
            temperature=1.0,
            seed=repetition * 1000 + place,
            ignore_eos=True,
            json_schema=SCHEMA if place < share * streams else None,
        )
        for place in range(streams)
    ]
    before = engine.stats()
    started = time.perf_counter()
    outputs = engine.generate(asked, sampling, progress=False)
    seconds = time.perf_counter() - started
    after = engine.stats()
    tokens = sum(output.completion_tokens for output in (outputs if isinstance(outputs, list) else [outputs]))
    assert tokens == streams * new, "every stream has its tokens"
    steps = after["steps"] - before["steps"]
    masks = after["step_seconds"]["mask"] - before["step_seconds"]["mask"]
    return {"rate": tokens / seconds, "steps": steps, "mask_ms": 1000 * masks / steps}


def main() -> None:
    options = parser(__doc__).parse_args()
    sizes = {1: 64, 32: 32} if options.quick else {1: 256, 32: 128}
    rows, data = [], {}
    with Engine(overlap=True, kv_tokens=32_768) as on, Engine(overlap=False, kv_tokens=32_768) as off:
        engines = {"on": on, "off": off}
        for streams, new in sizes.items():
            for engine in engines.values():
                run(engine, streams, 1.0, 8, -1)
            cases = {
                f"{overlap} {name}": partial(run, engine, streams, share, new)
                for overlap, engine in engines.items()
                for name, share in SHARES.items()
                if share != 0.5 or streams > 1
            }
            told = interleaved(cases, options.repetitions)
            rates = {case: [each["rate"] for each in runs] for case, runs in told.items()}
            for case, runs in told.items():
                overlap, share_name = case.split()
                masks, steps = (Spread.of([each[name] for each in runs]) for name in ("mask_ms", "steps"))
                rows.append(
                    [streams, overlap, share_name, Spread.of(rates[case]), ratios(rates[case], rates[f"{overlap} none"]), masks, steps]
                )
            data[f"{streams} streams"] = {"new_tokens": new, **told}
    text = table(["streams", "overlap", "constrained", "tok/s", "of none", "masks, ms per step", "steps"], rows)
    report(options, "structured", f"{text}\n\nTarget: all constrained at least {TARGET:g} of none.", {"measured": data})


if __name__ == "__main__":
    main()
