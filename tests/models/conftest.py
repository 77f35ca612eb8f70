"""Small Llama models for tests: GGUF files by gguf's own writer, directories by transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS, VOCAB = 64, 4, 2, 16, 96, 2, 40


def _interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of q and k."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _llama_tensors(seed: int = 0, *, tied: bool = True, bias: bool = False) -> dict[str, np.ndarray]:
    """Random weights under GGUF names, rows of q and k in the order of Hugging Face."""
    random = np.random.default_rng(seed)
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (queries, HIDDEN),
            f"blk.{i}.attn_k.weight": (keys, HIDDEN),
            f"blk.{i}.attn_v.weight": (keys, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, queries),
            f"blk.{i}.ffn_gate.weight": (FFN, HIDDEN),
            f"blk.{i}.ffn_up.weight": (FFN, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, FFN),
        }
        if bias:
            shapes |= {f"blk.{i}.attn_{name}.bias": (size,) for name, size in
                       (("q", queries), ("k", keys), ("v", keys), ("output", HIDDEN))}  # fmt: skip
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def _write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    *,
    kind: Type = Type.F32,
    metadata: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    architecture: str = "llama",
) -> dict[str, np.ndarray]:
    """Write a file with matrices of type `kind`; returns the float32 values it stands for (rows of q and k in HF's order)."""
    writer = gguf.GGUFWriter(path, architecture)
    fields: dict[str, Any] = {
        "llama.block_count": LAYERS, "llama.context_length": 128,
        "llama.embedding_length": HIDDEN, "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": KV_HEADS, "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.dimension_count": HEAD_DIM, "llama.vocab_size": VOCAB,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB)],
        "tokenizer.ggml.token_type": [1] * VOCAB, "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    for key, value in (fields | (metadata or {})).items():
        if key in without:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    expected = {}
    for name, values in tensors.items():
        heads = HEADS if "attn_q." in name else KV_HEADS if "attn_k." in name else None
        stored = values if heads is None else _interleave(values, heads)
        raw_type = kind if values.ndim == 2 else Type.F32
        raw = gguf.quants.quantize(np.ascontiguousarray(stored), raw_type)
        writer.add_tensor(name, raw, raw_dtype=raw_type)
        # Quantisation is by row, so it commutes with the permutation.
        expected[name] = gguf.quants.dequantize(gguf.quants.quantize(values, raw_type), raw_type).reshape(values.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _save_llama(directory: Path, *, dtype: torch.dtype = torch.float32, shard: str = "1GB", **fields: Any) -> LlamaForCausalLM:
    """Save a random model, with a tokenizer.json that holds no more than added tokens."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 128,
    }
    model = LlamaForCausalLM(LlamaConfig(**(sizes | fields))).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)  # norms and biases too
    model.save_pretrained(directory, max_shard_size=shard)
    (directory / "tokenizer.json").write_text('{"added_tokens": [{"id": 7, "content": "</s>"}, {"id": 8, "content": "x"}]}')
    return model


# As fixtures, because with --import-mode=importlib one test file cannot import from another.
@pytest.fixture(scope="session")
def llama_tensors() -> Callable[..., dict[str, np.ndarray]]:
    return _llama_tensors


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., dict[str, np.ndarray]]:
    return _write_gguf


@pytest.fixture(scope="session")
def save_llama() -> Callable[..., LlamaForCausalLM]:
    return _save_llama
