"""What lower precision costs: the next-token distributions over a text, against float32 on the same weights.

The text, data/prose.txt, was written for this benchmark, so no model has learnt it. Integer compute is also simulated in float32, to tell
what the rounding of activations costs by itself: with a scale for each 32 values, as it is computed, and with one scale for a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from common import parser, report, short, table
from offline import Transformers
from torch import Tensor
from torch.nn import functional as F

from sidestream.assemble import build_interpreter
from sidestream.engine.memory import DeviceMemory
from sidestream.models.interpreter import Spans
from sidestream.models.loader import load_model
from sidestream.text.tokenizer import Tokenizer

TEXT = Path(__file__).resolve().parent / "data" / "prose.txt"
CPU = torch.device("cpu")
PAGE = 16


def run(ids: list[int], dtype: torch.dtype, quantization: str = "auto") -> Tensor:
    """Logits of every position of the text in one step: [tokens, vocabulary] float32."""
    loaded = load_model("smollm2", dtype=dtype, device=CPU)
    model = build_interpreter(loaded, dtype, CPU, context=len(ids), quantization=quantization)
    pages = -(-len(ids) // PAGE)
    memory = DeviceMemory(loaded.spec, num_pages=pages, page_size=PAGE, slots=1, context=len(ids), dtype=dtype, device=CPU)
    memory.page_table[0, :pages] = torch.arange(1, pages + 1)
    memory.token_table[0, : len(ids)] = torch.tensor(ids)
    spans = Spans(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([len(ids)]))
    with torch.inference_mode():
        logits = model.forward(spans, memory, logit_rows=np.arange(len(ids))).logits
    assert logits is not None
    return logits


def run_transformers(ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = Transformers().model(torch.tensor([ids])).logits[0].float()
    return logits


@contextmanager
def rounded_activations(group: int | None) -> Iterator[None]:
    """Within it, products round their input to 8 bits, with a scale for each `group` values; None: for the row."""
    linear = F.linear

    def rounded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        groups = x.view(len(x), -1, group or x.shape[1])
        scale = (groups.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
        return linear(((groups / scale).round() * scale).view_as(x), weight, bias)

    with patch.object(F, "linear", rounded):
        yield


def compare(logits: Tensor, reference: Tensor, ids: list[int]) -> dict[str, float]:
    """Perplexity, and against the logits of float32 the agreement of the best token and the mean KL divergence."""
    targets = torch.tensor(ids[1:])
    loss = agreement = divergence = 0.0
    for start in range(0, len(targets), 256):
        rows = slice(start, min(start + 256, len(targets)))
        exact, other = (each[rows].double().log_softmax(-1) for each in (reference, logits))
        loss -= float(other.gather(1, targets[rows, None]).sum())
        agreement += float((exact.argmax(-1) == other.argmax(-1)).sum())
        divergence += float((exact.exp() * (exact - other)).sum())
    count = len(targets)
    return {"perplexity": math.exp(loss / count), "top1": agreement / count, "kl": divergence / count}


def main() -> None:
    options = parser(__doc__).parse_args()
    loaded = load_model("smollm2", dtype=torch.float32, device=CPU)
    tokenizer = Tokenizer.from_source(
        loaded.tokenizer, eos_token_ids=loaded.eos_token_ids, bos_token_id=loaded.bos_token_id, add_bos=loaded.add_bos
    )
    ids = tokenizer.encode(TEXT.read_text())[: 256 if options.quick else None]

    def simulated(group: int | None) -> Tensor:
        with rounded_activations(group):
            return run(ids, torch.float32)

    variants: dict[str, Callable[[], Tensor]] = {
        "auto (bfloat16)": lambda: run(ids, torch.bfloat16),
        "w8a8": lambda: run(ids, torch.bfloat16, "w8a8"),
        "w4a8": lambda: run(ids, torch.bfloat16, "w4a8"),
        "transformers, bfloat16": lambda: run_transformers(ids),
        "simulated: 8-bit activations, a scale for each 32": lambda: simulated(32),
        "simulated: 8-bit activations, a scale for each row": lambda: simulated(None),
    }
    reference = run(ids, torch.float32)
    results = {"float32": compare(reference, reference, ids)}
    for name, variant in variants.items():
        results[name] = compare(variant(), reference, ids)
    rows = [[name, f"{r['perplexity']:.3f}", f"{100 * r['top1']:.1f} %", f"{r['kl']:.5f}"] for name, r in results.items()]
    head = ["computed as", "perplexity", "same best token", "mean KL to float32"]
    text = f"{short(len(ids))} tokens of data/prose.txt, once each: these numbers do not vary.\n\n{table(head, rows)}"
    report(options, "quality", text, {"tokens": len(ids), "results": results})


if __name__ == "__main__":
    main()
