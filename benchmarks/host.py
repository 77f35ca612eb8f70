"""Host work of a step without a model: planning, launching, processing, by number of running requests.

The forward is a stub that returns tokens (and logprobs, and rows) from memory; scheduler, batch planning, the conditional copies and the
processing of results are the engine's own, driven by hand in one thread. The launch includes what the compute stream does in Python on
the host's behalf: the rows of the batch, the arena, the copies. Detokenizing is not part of a step and is measured apart.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from common import FIRST_ID, LAST_ID, parser, prompts, report, table

from sidestream import SamplingParams
from sidestream.answers import Choice, Prompt, deltas
from sidestream.engine.batch import Batch
from sidestream.engine.copies import Arena, Copies, GenerationBatchResult, Ledger
from sidestream.engine.loop import EngineLoop, Factories, Limits
from sidestream.engine.outputs import LogitsProcessorOutput, LogprobBlock, ScorePlan
from sidestream.engine.pages import PagePool
from sidestream.engine.radix import RadixCache
from sidestream.engine.runner import Masks, Runner
from sidestream.engine.scheduler import Scheduler
from sidestream.engine.streams import CpuEvent, Event, Launched, Streams
from sidestream.messages import Finish, Outbound, StepOutputs, Submit
from sidestream.models.interpreter import Spans
from sidestream.models.loader import load_model
from sidestream.models.spec import DecoderSpec
from sidestream.params import OutputParams, OutputPlan
from sidestream.text.detokenizer import OutputText
from sidestream.text.tokenizer import Tokenizer

T = TypeVar("T")

TARGET_US = 1000.0  # a step of 256 greedy requests without outputs
RUNNING = (1, 32, 256)
WARM_UP = 40
PAGE_SIZE, CHUNK, ARENA = 16, 2048, 64 << 20
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # sampling parameters, outputs
    "greedy": ({"temperature": 0.0}, {}),
    "random, top-p": ({"temperature": 0.8, "top_p": 0.9, "seed": 1}, {}),
    "greedy, 5 logprobs": ({"temperature": 0.0}, {"top_logprobs_num": 5}),
    'greedy, "last" row': ({"temperature": 0.0}, {"return_hidden_states": "last"}),
}


class InlineStream:
    """Work is done where it is launched: one thread, the same every time."""

    def launch(self, fn: Callable[..., T], *args: Any) -> Launched[T]:
        return Launched[T]().run(fn, *args)

    def record(self) -> Event:
        event = CpuEvent()
        event.complete()
        return event

    def wait(self, event: Event) -> None:
        event.synchronize()

    def close(self) -> None:
        pass


@dataclass
class _SpecOnly:
    """As much of a decoder as the loop looks at."""

    spec: DecoderSpec


class NullRunner(Runner):
    """Returns tensors made beforehand in place of a forward and its sampling."""

    def __init__(self, spec: DecoderSpec, streams: Streams, copies: Copies, rows: int) -> None:
        self.decoder = _SpecOnly(spec)  # type: ignore[assignment]
        self.streams = streams
        self.copies = copies
        self._tokens = torch.randint(FIRST_ID, LAST_ID, (rows,), dtype=torch.int32)
        self._floats = torch.zeros(100 * rows)
        self._ids = torch.zeros(100 * rows, dtype=torch.int32)
        self._hidden = torch.zeros(rows, 1, spec.hidden_size, dtype=torch.bfloat16)

    def _run_batch(self, batch: Batch, masks: Masks | None) -> GenerationBatchResult:
        Spans(batch.slots, batch.starts, batch.lengths)
        batch.sampled_rows()
        taps = batch.outputs.taps
        copied = tuple(self._hidden[: len(group.rows)] for group in taps.copied) if taps else ()
        result = GenerationBatchResult(
            logits_output=LogitsProcessorOutput(self._block(batch.outputs.next_token), None, copied or None),
            next_token_ids=self._tokens[: len(batch.sampled)] if batch.sampled else None,
            copies=self.copies,
            kept_hidden_states=tuple(self._hidden[: len(group.rows)] for group in taps.kept) if taps else (),
            forward_tokens=batch.num_tokens,
            sampled_rows=len(batch.sampled),
            final_bytes=sum(rows.nbytes for rows in copied),
        )
        result.copy_to_cpu(return_logprob=batch.return_logprob, return_hidden_states=batch.return_hidden_states)
        return result

    def _block(self, wanted: ScorePlan | None) -> LogprobBlock | None:
        if wanted is None:
            return None
        top = len(wanted.top_index)
        return LogprobBlock(self._floats[: len(wanted.rows)], self._floats[:top] if top else None, self._ids[:top] if top else None)


def no_factory(_: object) -> Any:
    """These requests have neither stops nor grammars, and nobody loads other weights."""


def build(spec: DecoderSpec, running: int, tokens: int) -> tuple[EngineLoop, queue.SimpleQueue[Outbound]]:
    """An engine loop as `assemble` makes it, with room for `running` requests of `tokens` tokens, without a model."""
    stream = InlineStream()
    streams = Streams(stream, stream)
    copies = Copies(stream, stream, Arena(ARENA, pinned=False), Ledger(), hidden_size=spec.hidden_size, itemsize=2)
    pool = PagePool(running * (tokens // PAGE_SIZE + 2), PAGE_SIZE)
    scheduler = Scheduler(pool, RadixCache(pool), slots=running, chunk=CHUNK, arena_bytes=ARENA, hidden_size=spec.hidden_size, itemsize=2)
    outbox: queue.SimpleQueue[Outbound] = queue.SimpleQueue()
    loop = EngineLoop(
        scheduler,
        NullRunner(spec, streams, copies, max(running, CHUNK)),
        copies,
        Limits(spec.max_position, spec.vocab_size, frozenset((2,))),
        Factories(no_factory, no_factory, lambda *_: {}, no_factory),
        emit=outbox.put,
        overlap=False,
    )
    return loop, outbox


def open_choice(key: int, ids: list[int], params: SamplingParams, plan: OutputPlan, tokenizer: Tokenizer | None) -> Choice:
    """The asking side of a request, as `prepare` makes it. Only text needs the tokenizer, only rows the sizes."""
    prompt = Prompt(
        rid=str(key),
        ids=ids,
        sampling=params,
        plan=plan,
        max_tokens=params.max_new_tokens,
        hidden_size=0,
        compute_dtype="bfloat16",
        tokenizer=tokenizer,  # type: ignore[arg-type]
        events=queue.SimpleQueue(),
    )
    return Choice(prompt, 0, key)


def measure(spec: DecoderSpec, running: int, mode: str, steps: int) -> np.ndarray:
    """Microseconds of plan, launch, process, and of handing the tokens to their requests on the asking side. [steps, 4]"""
    sampling, outputs = MODES[mode]
    longest = 48 + WARM_UP + steps + running
    loop, outbox = build(spec, running, longest)
    params = SamplingParams(max_new_tokens=longest - 48, **sampling)
    asked = [prompts(f"host {key}", 1, 16 + key % 32)[0] for key in range(running)]  # pages are not all full in the same step
    plan = OutputParams(**outputs)
    choices: dict[int, Choice] = {}
    for key, ids in enumerate(asked):
        checked = plan.check(vocab_size=spec.vocab_size, num_layers=spec.num_layers, prompt_len=len(ids))
        choices[key] = open_choice(key, ids, params, checked, None)
        loop.inbox.put(Submit(key, str(key), 0, np.asarray(ids, np.int32), params, checked))
    loop.ingest(wait=False)
    times = np.empty((steps, 5), np.int64)
    recorded = -WARM_UP
    while recorded < steps:
        now = time.perf_counter_ns
        t = [now()]
        batch = loop.scheduler.next_batch()
        assert batch is not None
        t.append(now())
        launched = loop.runner.run_batch(batch)
        t.append(now())
        loop.process_batch_result(batch, launched)
        t.append(now())
        while not outbox.empty():
            message = outbox.get()
            if isinstance(message, StepOutputs):
                for key, delta in deltas(message).items():
                    choices[key].take(delta)
        t.append(now())
        if len(batch.sampled) == running:
            if recorded >= 0:
                times[recorded] = t
            recorded += 1
    return np.diff(times, axis=1) / 1000


def measure_text(tokenizer: Tokenizer, tokens: int) -> dict[str, float]:
    """Microseconds per token of making text: a whole answer at its end, and token by token for a stream."""
    params = SamplingParams(max_new_tokens=tokens)
    ids = prompts("text", 1, tokens)[0]
    plan = OutputParams().check(vocab_size=LAST_ID, num_layers=1, prompt_len=4)
    choice = open_choice(0, ids[:4], params, plan, tokenizer)
    choice.token_ids, choice.finish = ids, Finish("length", None, None, False, {})
    started = time.perf_counter_ns()
    choice.output()
    whole = time.perf_counter_ns() - started
    text = OutputText(tokenizer, ids[:4])
    started = time.perf_counter_ns()
    for token in ids:
        text.feed((token,))
    streamed = time.perf_counter_ns() - started
    return {"whole answer": whole / tokens / 1000, "token by token": streamed / tokens / 1000}


def main() -> None:
    options = parser(__doc__).parse_args()
    steps = 200 if options.quick else 500
    model = load_model("smollm2", dtype=torch.bfloat16, device=torch.device("cpu"))
    tokenizer = Tokenizer.from_source(
        model.tokenizer, eos_token_ids=model.eos_token_ids, bos_token_id=model.bos_token_id, add_bos=model.add_bos
    )
    rows, data, target = [], [], 0.0
    for mode in MODES:
        for running in RUNNING:
            # The best of the repetitions: whatever else the machine does can only add.
            runs = [measure(model.spec, running, mode, steps) for _ in range(options.repetitions)]
            best = min(runs, key=lambda run: float(np.median(run[:, :3].sum(1))))
            total = best[:, :3].sum(1)
            middle = float(np.median(total))
            phases = np.median(best, axis=0).tolist()
            p99 = float(np.percentile(total, 99))
            plan, launch, process, route = (f"{value:.0f}" for value in phases)
            rows.append([mode, running, plan, launch, process, f"**{middle:.0f}**", f"{p99:.0f}", f"{middle / running:.2f}", route])
            data.append({"mode": mode, "running": running, "phases_us": phases, "median_us": middle, "p99_us": p99})
            if (mode, running) == ("greedy", 256):
                target = middle
    text_us = measure_text(tokenizer, 4096)
    head = ["requests", "running", "plan", "launch", "process", "step, median", "step, p99", "per request", "asking side"]
    verdict = f"Target: at most {TARGET_US:.0f} µs for 256 greedy requests without outputs. Measured: {target:.0f} µs."
    words = ", ".join(f"{name} {value:.1f}" for name, value in text_us.items())
    text = (
        f"Microseconds, of {steps} steps; the best repetition. *Asking side* is the receiving thread, which hands tokens to their "
        f"requests.\n\n{table(head, rows)}\n\n{verdict} Detokenizing, µs per token: {words}."
    )
    report(options, "host", text, {"steps": steps, "measured": data, "text_us_per_token": text_us})


if __name__ == "__main__":
    main()
