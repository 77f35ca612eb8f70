"""Last-layer hidden states of every position of many texts, ours side by side with `AutoModel` of transformers, which has no LM head.

The texts are random token ids of mixed lengths, asked for all at once. Transformers gets them sorted by length and padded, in batches of
each size of `--batch-sizes`; the best of them counts. Both return a tensor of rows for each text.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import Spread, greedy, interleaved, parser, prompts, ratios, report, table
from offline import TOLERANCE, Transformers
from torch import Tensor

from sidestream import Engine
from sidestream.models import hub

SHORTEST, LONGEST = 20, 500  # tokens
TEXTS, QUICK_TEXTS = 96, 32
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
INTEGER = ("w4a8", "w8a8")
# How ours computes: the model it loads (None: the checkpoint of transformers, in bfloat16), and the target.
OURS = {"auto": ("smollm2", 1.8), "bf16": (None, 1.8), "w4a8": ("smollm2", 3.0), "w8a8": ("smollm2", 3.0)}

Texts = list[list[int]]


def texts(count: int, repetition: int) -> Texts:
    lengths = random.Random(f"lengths {repetition}")
    return [prompts(f"extraction {repetition} {text}", 1, lengths.randint(SHORTEST, LONGEST))[0] for text in range(count)]


def run_ours(engine: Engine, asked: Texts) -> list[Tensor]:
    """Rows of each text: [tokens, hidden]."""
    answers: Any = engine.generate(asked, greedy(0), return_hidden_states=True, progress=False)
    return [answer.hidden_states.data[:, 0] for answer in answers]


@torch.inference_mode()
def run_transformers(model: Any, size: int, asked: Texts) -> list[Tensor]:
    """The same by padded batches of `size` texts."""
    order = sorted(range(len(asked)), key=lambda text: len(asked[text]))
    rows: list[Tensor] = [torch.empty(0)] * len(asked)
    for start in range(0, len(order), size):
        batch = order[start : start + size]
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(asked[text]) for text in batch], batch_first=True)
        lengths = torch.tensor([len(asked[text]) for text in batch])
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        hidden = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).last_hidden_state
        for text, states in zip(batch, hidden, strict=True):
            rows[text] = states[: len(asked[text])].clone()
    return rows


def timed(run: Callable[[Texts], list[Tensor]], before: Callable[[], object], count: int, repetition: int) -> float:
    """Tokens per second."""
    asked = texts(count, repetition)
    before()
    started = time.perf_counter()
    rows = run(asked)
    seconds = time.perf_counter() - started
    assert [len(each) for each in rows] == [len(text) for text in asked]
    return sum(map(len, asked)) / seconds


def check_same_model(run: Callable[[Texts], list[Tensor]], model: Any) -> None:
    asked = texts(4, -1)
    for ours, theirs in zip(run(asked), run_transformers(model, 4, asked), strict=True):
        cosine = torch.cosine_similarity(ours.float(), theirs.float(), -1).median().item()
        assert cosine > TOLERANCE, f"ours and transformers' rows have a cosine of {cosine:.4f}"


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES, metavar="N", help="of transformers; the best counts")
    made.add_argument("--modes", nargs="+", choices=OURS, default=list(OURS), help="of ours (default: all)")
    options = made.parse_args()
    count = QUICK_TEXTS if options.quick else TEXTS
    theirs = Transformers()
    model = theirs.model.model
    with tempfile.TemporaryDirectory() as checkpoint, contextlib.ExitStack() as engines:
        theirs.model.save_pretrained(checkpoint)
        runs: dict[str, Callable[[int], float]] = {}
        for mode in options.modes:
            source, _ = OURS[mode]
            quantization = mode if mode in INTEGER else "auto"
            engine = engines.enter_context(Engine(source or checkpoint, tokenizer=str(hub.pull("smollm2")), quantization=quantization))
            run = partial(run_ours, engine)
            check_same_model(run, model)
            runs[mode] = partial(timed, run, engine.flush_cache, count)
        for size in options.batch_sizes:
            runs[f"{size}"] = partial(timed, partial(run_transformers, model, size), lambda: None, count)
        rates = interleaved(runs, options.repetitions)
    best = max(options.batch_sizes, key=lambda size: statistics.median(rates[f"{size}"]))
    ours = [[mode, Spread.of(rates[mode]), ratios(rates[mode], rates[f"{best}"]), f"≥ {OURS[mode][1]}"] for mode in options.modes]
    batches = [[size, Spread.of(rates[f"{size}"])] for size in options.batch_sizes]
    text = f"{count} texts of {SHORTEST} to {LONGEST} tokens, tokens/s.\n\n"
    text += table(["ours", "tok/s", f"of transformers {theirs.version}, {best} at once", "target"], ours)
    text += "\n\n" + table(["transformers, texts at once", "tok/s"], batches)
    report(options, "extraction", text, {"rates": rates})


if __name__ == "__main__":
    main()
