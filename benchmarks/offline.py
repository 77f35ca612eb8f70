"""Tokens per second of the engine on fixed workloads, alone or side by side with transformers on the same weights.

Prompts are random token ids, output is greedy and of fixed length, caches start empty. `--outputs` adds what logprobs and hidden states
cost; `--transformers` runs the same with a static batch in transformers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from common import Spread, greedy, interleaved, parser, prompts, ratios, report, table

from sidestream import Engine
from sidestream.assemble import pick_device, pick_dtype
from sidestream.models.llama import HUGGINGFACE_NAMES
from sidestream.models.loader import load_model
from sidestream.models.spec import stored_name

OUTPUTS: dict[str, dict[str, Any]] = {
    "5 logprobs": {"top_logprobs_num": 5},
    '"last" row': {"return_hidden_states": "last"},
    "all rows, 1 layer": {"return_hidden_states": True},
}
BATCH = "32 at once"
WITH_HIDDEN = "output_hidden_states"
TOLERANCE = 0.99  # cosine of one row between the two


class Work(NamedTuple):
    requests: int
    prompt: int
    shared: int  # leading prompt tokens that all have
    new: int
    counts: str  # which tokens the rate counts: "prompt" or "output"

    def rate(self, seconds: float) -> float:
        return self.requests * (self.prompt if self.counts == "prompt" else self.new) / seconds

    def asked(self, repetition: int) -> list[list[int]]:
        return prompts(f"offline {repetition}", self.requests, self.prompt, shared=self.shared)

    def __str__(self) -> str:
        own = f"{self.shared} shared + {self.prompt - self.shared}" if self.shared else str(self.prompt)
        return f"{self.requests} of {own} + {self.new}"


FULL = {
    "single stream": Work(1, 128, 0, 256, "output"),
    "prefill": Work(1, 2048, 0, 1, "prompt"),
    BATCH: Work(32, 128, 0, 128, "output"),
    "shared prefix": Work(32, 1056, 1024, 32, "output"),
}
QUICK = {
    "single stream": Work(1, 128, 0, 32, "output"),
    "prefill": Work(1, 2048, 0, 1, "prompt"),
    BATCH: Work(32, 128, 0, 16, "output"),
    "shared prefix": Work(32, 160, 128, 16, "output"),
}


def run_ours(engine: Engine, work: Work, outputs: dict[str, Any], repetition: int) -> float:
    """Seconds from the prompts to all outputs."""
    engine.flush_cache()
    asked = work.asked(repetition)
    started = time.perf_counter()
    engine.generate(asked, greedy(work.new), progress=False, **outputs)
    return time.perf_counter() - started


class Transformers:
    """The same weights in transformers: eager, SDPA attention, one static batch."""

    def __init__(self) -> None:
        import transformers

        logging: Any = transformers.logging
        fields: dict[str, Any] = {"attn_implementation": "sdpa", "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
        logging.set_verbosity_error()
        loaded = load_model("smollm2", dtype=pick_dtype("auto", pick_device("cpu")), device=torch.device("cpu"))
        spec = loaded.spec
        config = transformers.LlamaConfig(
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_hidden_layers=spec.num_layers,
            num_attention_heads=spec.num_heads,
            num_key_value_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rms_norm_eps=spec.norm_eps,
            max_position_embeddings=spec.max_position,
            tie_word_embeddings=spec.tie_word_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
            **fields,
        )
        with torch.device("meta"):
            self.model: Any = transformers.LlamaForCausalLM(config)
        state = {stored_name(HUGGINGFACE_NAMES, name): weight for name, weight in loaded.weights.items()}
        self.model.load_state_dict(state, strict=False, assign=True)
        self.model.train(False)
        self.model.tie_weights()
        self.model.model.rotary_emb = type(self.model.model.rotary_emb)(config)  # its buffer is no weight
        assert not [name for name, parameter in self.model.named_parameters() if parameter.is_meta]
        self.version = transformers.__version__

    @torch.inference_mode()
    def run(self, work: Work, hidden: bool, repetition: int) -> float:
        ids = torch.tensor(work.asked(repetition))
        started = time.perf_counter()
        answer = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=work.new,
            min_new_tokens=work.new,
            output_hidden_states=hidden,
            return_dict_in_generate=hidden,
        )
        if hidden:
            torch.cat([step[-1] for step in answer.hidden_states], 1)  # what ours returns: the last layer of all positions
        return time.perf_counter() - started

    @torch.inference_mode()
    def last_row(self, ids: list[int]) -> torch.Tensor:
        row: torch.Tensor = self.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]
        return row.float()


def check_same_model(engine: Engine, theirs: Transformers) -> None:
    """Both must compute the same before their speed is compared."""
    ids = prompts("check", 1, 64)[0]
    answer: Any = engine.generate(ids, greedy(0), return_hidden_states="last", progress=False)
    row = answer.hidden_states.data[0, 0].float()
    cosine = torch.cosine_similarity(row, theirs.last_row(ids), 0).item()
    assert cosine > TOLERANCE, f"ours and transformers' rows have a cosine of {cosine:.4f}"


def tables(works: dict[str, Work], seconds: dict[str, list[float]], version: str | None) -> str:
    """Rates of the workloads; then what outputs cost on the batch workload."""
    rows = []
    for name, work in works.items():
        ours = [work.rate(value) for value in seconds[name]]
        row = [name, work, work.counts, Spread.of(seconds[name]), Spread.of(ours)]
        if version:
            theirs = [work.rate(value) for value in seconds[f"transformers {name}"]]
            row += [Spread.of(theirs), ratios(ours, theirs)]
        rows.append(row)
    head = [
        "work",
        "requests of prompt + new tokens",
        "counted",
        "s",
        "tok/s",
        *([f"transformers {version}, tok/s", "ratio"] if version else []),
    ]
    made = [table(head, rows)]
    costs = []
    for prefix, names in (("", OUTPUTS), ("transformers ", (WITH_HIDDEN,))):
        for name in names:
            key = f"{prefix}{BATCH}, {name}"
            if key in seconds:
                rates = [works[BATCH].rate(value) for value in seconds[key]]
                # Throughput without the output over throughput with it, side by side: seconds the other way round.
                costs.append([f"{prefix}{name}", Spread.of(rates), ratios(seconds[prefix + BATCH], seconds[key])])
    if costs:
        made.append(f"Outputs, on *{BATCH}*:\n\n{table(['output', 'tok/s', 'throughput / without'], costs)}")
    return "\n\n".join(made)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--work", nargs="+", choices=FULL, default=list(FULL), help="which of the workloads")
    made.add_argument("--outputs", action="store_true", help=f"also measure logprobs and hidden states, on {BATCH!r}")
    made.add_argument("--transformers", action="store_true", help="also run transformers (needs the `test` extra)")
    options = made.parse_args()
    works = {name: work for name, work in (QUICK if options.quick else FULL).items() if name in options.work}
    theirs = Transformers() if options.transformers else None
    with Engine() as engine:
        if theirs:
            check_same_model(engine, theirs)
        runs: dict[str, Callable[[int], float]] = {}
        for name, work in works.items():
            runs[name] = partial(run_ours, engine, work, {})
            if theirs:
                runs[f"transformers {name}"] = partial(theirs.run, work, False)
            if name != BATCH:
                continue
            if theirs and options.outputs:
                runs[f"transformers {BATCH}, {WITH_HIDDEN}"] = partial(theirs.run, work, True)
            if options.outputs:
                runs |= {f"{BATCH}, {output}": partial(run_ours, engine, work, asked) for output, asked in OUTPUTS.items()}
        warm = Work(8, 64, 0, 4, "output")
        run_ours(engine, warm, {}, -1)
        if theirs:
            theirs.run(warm, False, -1)
        seconds = interleaved(runs, options.repetitions)
    report(options, "offline", tables(works, seconds, theirs.version if theirs else None), {"seconds": seconds})


if __name__ == "__main__":
    main()
