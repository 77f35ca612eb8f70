"""llama.cpp's logits of every position of a text, from its library: the server does not tell them.

`python logits_llamacpp.py --work DIR [--format q4_1] [--threads N] <ids.json >logits`: token ids in, float32 [tokens, vocabulary] out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from ctypes import CDLL, POINTER, Structure, c_char_p, c_float, c_int8, c_int32, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from install import FORMATS, LLAMACPP_VERSION, gguf_file
from protocol import DEFAULT_WORK

# Structures as llama.h has them in LLAMACPP_VERSION. They are made by the library with its defaults and handed back whole, so only what
# is set here needs a name.


class ModelParams(Structure):
    _fields_ = (("rest", c_uint64 * 10),)


class ContextParams(Structure):
    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch_to_n_outputs_max_per_seq", c_uint32 * 5),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type_to_attention_type", c_int32 * 4),
        ("flash_attn_type", c_int32),
        ("rest", c_uint64 * 13),
    )


class Batch(Structure):
    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", c_void_p),  # none: one sequence from position 0
        ("n_seq_id", c_void_p),
        ("seq_id", c_void_p),
        ("logits", POINTER(c_int8)),
    )


FUNCTIONS: dict[str, tuple[Any, Sequence[Any]]] = {
    "llama_backend_init": (None, ()),
    "llama_model_default_params": (ModelParams, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelParams)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_context_default_params": (ContextParams, ()),
    "llama_init_from_model": (c_void_p, (c_void_p, ContextParams)),
    "llama_decode": (c_int32, (c_void_p, Batch)),
    "llama_get_logits": (c_void_p, (c_void_p,)),
}


def open_library(path: Path) -> CDLL:
    library = CDLL(str(path))
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def logits(library: CDLL, model: Path, ids: Sequence[int], threads: int) -> memoryview:
    """Of all positions: float32 [tokens, vocabulary]. It stays the library's: nothing is freed before the process ends."""
    library.llama_backend_init()
    loaded = library.llama_model_load_from_file(os.fsencode(model), library.llama_model_default_params())
    if not loaded:
        sys.exit(f"llama.cpp {LLAMACPP_VERSION} did not load {model}")
    params = library.llama_context_default_params()
    params.n_ctx = params.n_batch = len(ids)
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = 1  # on, as in the server's driver
    context = library.llama_init_from_model(loaded, params)
    if not context:
        sys.exit(f"llama.cpp {LLAMACPP_VERSION} made no context of {len(ids)} tokens")
    batch = Batch(len(ids), (c_int32 * len(ids))(*ids), None, None, None, None, (c_int8 * len(ids))(*[1] * len(ids)))
    if status := library.llama_decode(context, batch):
        sys.exit(f"llama_decode of {len(ids)} tokens gave status {status}")
    count = len(ids) * library.llama_vocab_n_tokens(library.llama_model_get_vocab(loaded))
    return memoryview((c_float * count).from_address(library.llama_get_logits(context)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help=f"of the weights (default: {FORMATS[0]})")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, metavar="DIR", help="where install.py put everything")
    options = parser.parse_args()
    work = options.work.resolve()
    library = open_library(work / "llamacpp" / "build" / "bin" / "libllama.so")
    sys.stdout.buffer.write(logits(library, gguf_file(work, options.format), json.load(sys.stdin), options.threads))


if __name__ == "__main__":
    main()
