"""A checkpoint that takes microseconds per token, with a context long enough for every workload."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 128


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bench") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    vocabulary = {"</s>": 1} | {f"w{i}": i for i in range(VOCAB) if i != 1}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0")).save(str(directory / "tokenizer.json"))
    return directory
