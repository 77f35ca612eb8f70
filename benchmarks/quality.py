"""What lower precision costs: the next-token distributions over a text, against float32 on the same weights.

The text, data/prose.txt, was written for this benchmark, so no model has learnt it. Integer compute is also simulated in float32, to tell
what the rounding of activations costs by itself: with a scale for each 32 values, as it is computed, and with one scale for a row.
`--llamacpp` adds llama.cpp on the same token ids and the same files, the default one and its conversions; peers/install.py makes both.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE / "peers"))

from install import LLAMACPP_VERSION, gguf_file  # noqa: E402
from protocol import python_of  # noqa: E402

TEXT = HERE / "data" / "prose.txt"
CPU = torch.device("cpu")
PAGE = 16
DEFAULT, DEFAULT_FORMAT = "smollm2", "q4_1"
# What each file is computed with: w8a8 would only round a Q4_0 once more, w4a8 take half of the bits of a Q8_0.
MODES = {"q4_1": ("auto", "w8a8", "w4a8"), "q8_0": ("auto", "w8a8"), "q4_0": ("auto", "w4a8")}

Variants = dict[str, Callable[[], Tensor]]


def run(ids: list[int], dtype: torch.dtype, quantization: str = "auto", model: str = DEFAULT) -> Tensor:
    """Logits of every position of the text in one step: [tokens, vocabulary] float32."""
    loaded = load_model(model, dtype=dtype, device=CPU)
    interpreter = build_interpreter(loaded, dtype, CPU, context=len(ids), quantization=quantization)
    pages = -(-len(ids) // PAGE)
    memory = DeviceMemory(loaded.spec, num_pages=pages, page_size=PAGE, slots=1, context=len(ids), dtype=dtype, device=CPU)
    memory.page_table[0, :pages] = torch.arange(1, pages + 1)
    memory.token_table[0, : len(ids)] = torch.tensor(ids)
    spans = Spans(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([len(ids)]))
    with torch.inference_mode():
        logits = interpreter.forward(spans, memory, logit_rows=np.arange(len(ids))).logits
    assert logits is not None
    return logits


def run_transformers(ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = Transformers().model(torch.tensor([ids])).logits[0].float()
    return logits


def run_llamacpp(work: Path, format: str, ids: list[int]) -> Tensor:
    """The same of llama.cpp, in a process of its own."""
    log = work / "logs" / f"logits-llamacpp-{format}.log"
    log.parent.mkdir(exist_ok=True)
    command = [str(python_of(work, "llamacpp")), str(HERE / "peers" / "logits_llamacpp.py"), "--format", format]
    command += ["--work", str(work), "--threads", str(torch.get_num_threads())]
    with log.open("w") as errors:
        done = subprocess.run(command, input=json.dumps(ids).encode(), stdout=subprocess.PIPE, stderr=errors, check=False)
    if done.returncode:
        raise RuntimeError(f"the driver of llama.cpp ended with status {done.returncode}; {log} says why")
    return logits_of(done.stdout, len(ids))


def logits_of(raw: bytes, tokens: int) -> Tensor:
    """What a driver printed, native float32: [tokens, vocabulary]."""
    if not raw or len(raw) % (4 * tokens):
        raise ValueError(f"got {len(raw):,} bytes of logits, must be a multiple of 4 bytes for each of {tokens:,} tokens")
    return torch.frombuffer(bytearray(raw), dtype=torch.float32).view(tokens, -1)


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
    """Perplexity, and against the logits of float32 the agreement of the best token and the mean KL divergence with its standard error."""
    targets = torch.tensor(ids[1:])
    loss = agreement = 0.0
    divergences = []
    for start in range(0, len(targets), 256):
        rows = slice(start, min(start + 256, len(targets)))
        exact, other = (each[rows].double().log_softmax(-1) for each in (reference, logits))
        loss -= float(other.gather(1, targets[rows, None]).sum())
        agreement += float((exact.argmax(-1) == other.argmax(-1)).sum())
        divergences.append((exact.exp() * (exact - other)).sum(-1))
    count, divergence = len(targets), torch.cat(divergences)
    error = float(divergence.std()) / math.sqrt(count)
    return {"perplexity": math.exp(loss / count), "top1": agreement / count, "kl": float(divergence.mean()), "kl_error": error}


def source(format: str, work: Path | None) -> str:
    return str(gguf_file(work, format)) if work else DEFAULT


def variants(ids: list[int], format: str, work: Path | None) -> Variants:
    """What is compared with float32 on a file. Only the default one, and then without llama.cpp, needs no `work`."""
    model = source(format, work)

    def simulated(group: int | None) -> Tensor:
        with rounded_activations(group):
            return run(ids, torch.float32)

    made: Variants = {
        "auto (bfloat16)" if mode == "auto" else mode: partial(run, ids, torch.bfloat16, mode, model) for mode in MODES[format]
    }
    if work:
        made[f"llama.cpp {LLAMACPP_VERSION}"] = partial(run_llamacpp, work, format, ids)
    if format == DEFAULT_FORMAT:
        made["transformers, bfloat16"] = partial(run_transformers, ids)
        made["simulated: 8-bit activations, a scale for each 32"] = partial(simulated, 32)
        made["simulated: 8-bit activations, a scale for each row"] = partial(simulated, None)
    return made


def llamacpp_work(text: str) -> Path:
    work = Path(text).resolve()
    if not python_of(work, "llamacpp").exists():
        raise argparse.ArgumentTypeError(f"llama.cpp is not installed in {work}. Run peers/install.py --peers llamacpp --work {work}")
    return work


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--llamacpp", type=llamacpp_work, metavar="DIR", help="also llama.cpp, which peers/install.py put there")
    options = made.parse_args()
    loaded = load_model(DEFAULT, dtype=torch.float32, device=CPU)
    tokenizer = Tokenizer.from_source(
        loaded.tokenizer, eos_token_ids=loaded.eos_token_ids, bos_token_id=loaded.bos_token_id, add_bos=loaded.add_bos
    )
    ids = tokenizer.encode(TEXT.read_text())[: 256 if options.quick else None]
    results: dict[str, dict[str, dict[str, float]]] = {}
    for format in MODES if options.llamacpp else [DEFAULT_FORMAT]:
        reference = run(ids, torch.float32, model=source(format, options.llamacpp))
        results[format] = {"float32": compare(reference, reference, ids)}
        for name, variant in variants(ids, format, options.llamacpp).items():
            results[format][name] = compare(variant(), reference, ids)
    rows = [
        [format, name, f"{r['perplexity']:.3f}", f"{100 * r['top1']:.1f} %", f"{r['kl']:.5f} ± {r['kl_error']:.5f}"]
        for format, measured in results.items()
        for name, r in measured.items()
    ]
    head = ["file", "computed as", "perplexity", "same best token", "mean KL to float32, ± standard error"]
    text = f"{short(len(ids))} tokens of data/prose.txt, once each: these numbers do not vary.\n\n{table(head, rows)}"
    report(options, "quality", text, {"tokens": len(ids), "results": results})


if __name__ == "__main__":
    main()
