"""What every test shares: the default model, a tiny one, and which tests run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    # Beside other test processes one thread each: teams that share cores wait for one another.
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The file of the default model, fetched once per machine."""
    from sidestream.models.hub import pull

    return pull("smollm2")


LAYERS, HIDDEN, VOCAB, CONTEXT = 4, 64, 320, 512
START, END = "<|start|>", "<|end|>"
TEXT = """The quick brown fox jumps over the lazy dog. Once upon a time there was a small engine that answered many questions
at once, and each answer was the same as if it had been asked alone. Příliš žluťoučký kůň úpěl ďábelské ódy. 안녕하세요 세계 😀🎉"""


def _tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE: 256 bytes, two special tokens, and merges up to the size of the vocabulary."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[START, END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    made.train_from_iterator([TEXT], trainer)
    assert made.get_vocab_size() == VOCAB
    return made


def _let_it_end(model: LlamaForCausalLM, end: int) -> None:
    """Give the end token the output row of a token that the model produces now and then."""
    prompts = torch.arange(12 * 6).view(12, 6) % (VOCAB - 2) + 2
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        produced = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=24, do_sample=False, pad_token_id=0, use_cache=True
        )[:, prompts.shape[1] :]

    def rank(token: int) -> tuple[int, int]:
        """Rows that would end with it after some tokens: a third of them is best."""
        first = [row.tolist().index(token) for row in produced if token in row.tolist()]
        return abs(sum(place > 3 for place in first) - 4) + sum(place <= 3 for place in first), token

    chosen = min(set(produced.flatten().tolist()), key=rank)
    with torch.no_grad():
        head = model.lm_head.weight
        head[[end, chosen]] = head[[chosen, end]]
    model.generation_config.eos_token_id = end


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as transformers writes it: random weights in float32, large enough that greedy decoding does not repeat itself."""
    directory = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    torch.manual_seed(1)
    tokenizer = _tokenizer()
    end = tokenizer.token_to_id(END)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=end,
        bos_token_id=None,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
        else:
            torch.nn.init.normal_(parameter, std=1.0 if "embed" in name else 0.3 if "lm_head" in name else 0.15)
    _let_it_end(model, end)
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
