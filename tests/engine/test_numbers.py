"""Right numbers: tokens, logprobs and rows are those of transformers in float32; bfloat16 loses no more than transformers does."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sidestream import Engine, Output, SamplingParams
from sidestream.engine.memory import DeviceMemory
from sidestream.kernels import cpu
from sidestream.kernels.cpu.decoder import NativeDecoder
from sidestream.models import llama
from sidestream.models.decoder import Decoder
from sidestream.models.interpreter import Interpreter, Spans
from sidestream.models.loader import LoadedModel, load_model
from sidestream.models.spec import stored_name
from sidestream.text.tokenizer import Tokenizer

CPU = torch.device("cpu")
TEXTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Water boils at a lower temperature on a mountain because",
    "The three primary colours are",
    "SELECT name FROM users WHERE",
    "In 1969, the first human being",
    "Příliš žluťoučký kůň",
    "Q: What is the largest planet?\nA:",
    "import numpy as np\n\nx = np.",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "Ingredients: two eggs, a cup of flour,",
    '{"name": "Ada", "age":',
    "Shakespeare wrote",
    "A prime number is a number that",
    "Il était une fois",
    "# Installation\n\nRun the following command:\n\n```",
    "To be, or not to be, that is the question:",
]
PROSE = """The history of the lighthouse is longer than that of the town. It was built of grey stone on the last rock of the peninsula,
where the current turns and ships from the south meet the wind for the first time. For two hundred years a keeper and his family lived
there, carried the oil up the stairs each evening, and wrote down the weather in a book. When the lamp was replaced by an electric one,
the books were given to the library, where nobody opened them until a student of physics asked for old measurements of temperature.
She found that the keepers had noted more than the weather: the price of fish, the names of visitors, and once a recipe for bread.

An engine that answers many questions at the same time has to decide, at every step, whose turn it is. If it always takes the oldest
request, a long one delays everybody; if it always takes the shortest, a long one may never end. A common solution is to cut the long
ones into pieces, so that each step does a little of everything. The price is bookkeeping: every piece must find the results of the
pieces before it, and nothing may be lost when the memory is given to somebody else. The reward is that the answers come at a steady
pace, and that nobody notices how busy the machine really is. Good design hides the work; great design makes the work unnecessary.

"You are late," said the woman at the counter, without looking up. "The last train to the coast left at nine." Martin put down his two
bags, one of which was ticking quietly, and asked whether there was a hotel. There was, she said, but it was closed for the winter, and
the owner had gone to his sister in Lisbon. He thanked her and sat down on the bench below the clock, where an old man was already
asleep with a newspaper over his face. Outside it began to snow. After an hour the old man woke, folded his newspaper four times,
and offered him half of a sandwich, which was the kindest thing that had happened to him since Tuesday.

To bake it, heat the oven to 220 degrees and put a small bowl of water on the lowest shelf. Mix 500 g of flour with 350 ml of water,
10 g of salt and a little yeast, let it rest for an hour, then fold it from all four sides every 30 minutes. The dough is ready when it
keeps the print of a finger. Bake for 25 minutes, lower the heat to 190 degrees, and bake for another 20. If the bottom sounds hollow,
it is done: 1 loaf, about 8 slices, 240 calories each. In 1998, a survey of 1,204 households in Denmark, Norway and Sweden found that
62% of them baked at least once a month; by 2015 it was only 31%, although sales of flour had risen by a tenth."""
LOGPROB, ROW = 1e-4, 1e-3


def reference_of(model: LoadedModel, dtype: torch.dtype) -> LlamaForCausalLM:
    """transformers' model with these very weights (that they are what transformers itself loads is tested with the loader)."""
    spec = model.spec
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.norm_eps,
        max_position_embeddings=spec.max_position,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
    )
    with torch.device("meta"):
        made = LlamaForCausalLM(config)
    state = {stored_name(llama.HUGGINGFACE_NAMES, name): weight.to(dtype) for name, weight in model.weights.items()}
    keys = made.load_state_dict(state, strict=False, assign=True)
    assert keys.missing_keys == ["lm_head.weight"] and not keys.unexpected_keys
    made.tie_weights()
    made.model.rotary_emb = LlamaRotaryEmbedding(config)  # its tables are no part of the state
    return made.eval()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """On a busy machine a team of threads waits for its slowest member all the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loaded(default_model: Path) -> LoadedModel:
    model = load_model(str(default_model), dtype=torch.float32, device=CPU)
    assert model.spec.tie_word_embeddings and model.spec.rope.scaling == "none"
    return model


@pytest.fixture(scope="module")
def tokenizer(loaded: LoadedModel) -> Tokenizer:
    return Tokenizer.from_source(
        loaded.tokenizer, eos_token_ids=loaded.eos_token_ids, bos_token_id=loaded.bos_token_id, add_bos=loaded.add_bos
    )


# float32


def answers_of(model: Path, prompts: list[list[int]], layers: int, asked_ids: list[int], **options: Any) -> list[Output]:
    settings = {"dtype": "float32", "device": "cpu", "threads": 1, "log_level": "warning"} | options
    with Engine(str(model), **settings) as engine:
        answers = engine.generate(
            prompts,
            SamplingParams(max_new_tokens=64, temperature=0.0, ignore_eos=True),
            logprob_start_len=0,
            top_logprobs_num=5,
            token_ids_logprob=asked_ids,
            return_hidden_states=True,
            hidden_states_layers=list(range(layers + 1)),
        )
    assert isinstance(answers, list)
    return answers


def assert_right(answers: Sequence[Output], prompts: Sequence[list[int]], reference: LlamaForCausalLM, asked_ids: list[int]) -> None:
    """Teacher-force the reference over our tokens, a few answers at a time, and compare everything."""
    for first in range(0, len(prompts), 5):
        some = range(first, min(first + 5, len(prompts)))
        sequences = [torch.tensor(prompts[i] + list(answers[i].token_ids)) for i in some]
        # What follows a position does not change it, so padding needs no mask.
        padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)[:, :-1]
        with torch.inference_mode():
            theirs = reference(padded, output_hidden_states=True)
        for row, i in enumerate(some):
            length = len(sequences[row]) - 1
            states = torch.stack([layer[row, :length] for layer in theirs.hidden_states], 1)  # [positions, layers, hidden]
            assert_equal(answers[i], prompts[i], theirs.logits[row, :length], states, asked_ids)


def assert_equal(answer: Output, prompt: list[int], logits: Tensor, rows: Tensor, asked_ids: list[int]) -> None:
    """logits, rows: the reference's at every position that has a row."""
    ids = prompt + list(answer.token_ids)
    assert len(answer.token_ids) == 64
    best = logits.topk(5, -1)
    normaliser = logits.logsumexp(-1, keepdim=True)  # row p scores token p+1
    for step, token in enumerate(answer.token_ids, len(prompt) - 1):
        first, second = best.values[step, :2].tolist()
        names = best.indices[step, :2].tolist()
        tied = token == names[1] and first - second <= LOGPROB
        assert token == names[0] or tied, f"position {step + 1}: {token}, the reference has {names}, {first - second:.2g} apart"

    assert answer.logprobs is not None
    got = [*answer.logprobs.input, *answer.logprobs.output]
    assert got[0] is None and len(got) == len(ids)
    close(got[1:], (logits.gather(1, torch.tensor(ids[1:])[:, None]) - normaliser)[:, 0], LOGPROB)
    tops = [*answer.logprobs.input_top, *answer.logprobs.output_top]
    assert tops[0] is None and len(tops) == len(ids)
    values = [[value for value, _ in top] for top in tops[1:]]
    close(values, best.values - normaliser, LOGPROB)
    # The values belong to the ids they stand beside.
    close(values, logits.gather(1, torch.tensor([[token for _, token in top] for top in tops[1:]])) - normaliser, LOGPROB)
    asked = [*answer.logprobs.input_ids, *answer.logprobs.output_ids]
    assert asked[0] is None and len(asked) == len(ids)
    assert all([token for _, token in row] == asked_ids for row in asked[1:])
    close([[value for value, _ in row] for row in asked[1:]], logits[:, asked_ids] - normaliser, LOGPROB)

    states = answer.hidden_states
    assert states is not None and list(states.positions) == list(range(len(ids) - 1))
    assert states.data.shape == rows.shape and states.data.dtype == torch.float32
    relative = (states.data - rows).norm(dim=-1) / rows.norm(dim=-1)
    assert relative.max() <= ROW, f"hidden rows differ by {relative.max():.2g}"


def close(got: Sequence[Any], want: Tensor, limit: float) -> None:
    difference = (torch.tensor(got, dtype=torch.float64) - want).abs().max()
    assert difference <= limit, f"{difference:.2g}"


def test_default_model(default_model: Path, loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    prompts = [tokenizer.encode(text) for text in TEXTS]
    assert len(prompts) == 20
    asked = [0, 2, 49151]
    answers = answers_of(default_model, prompts, loaded.spec.num_layers, asked, kv_tokens=4096)
    reference = reference_of(loaded, torch.float32)
    assert_right(answers, prompts, reference, asked)


VARIANTS: dict[str, dict[str, Any]] = {
    "llama3": {
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "yarn, biases": {
        "num_key_value_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
        },
    },
    "linear, biases, one key head, tied": {
        "num_key_value_heads": 1,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5},
    },
    "wide heads, each with its key": {
        "num_key_value_heads": 8,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
}


def save_tiny(directory: Path, fields: dict[str, Any], exact_in: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(7)
    sizes = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    model = LlamaForCausalLM(LlamaConfig(**(sizes | fields))).eval()
    for name, parameter in model.named_parameters():  # large enough that no part of the model could be left out unnoticed
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
        else:
            torch.nn.init.normal_(parameter, std=0.5 if "embed" in name or name.endswith("bias") else 0.2)
        parameter.data = parameter.data.to(exact_in).float()
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("name", VARIANTS)
def test_tiny_models(tmp_path: Path, tiny_llama: Path, name: str) -> None:
    reference = save_tiny(tmp_path, VARIANTS[name])
    shutil.copy(tiny_llama / "tokenizer.json", tmp_path)
    random = np.random.default_rng(3)
    prompts = [random.integers(2, 320, length).tolist() for length in [1, 2, 5, 90, *random.integers(3, 60, 16).tolist()]]
    assert len(prompts) == 20
    answers = answers_of(tmp_path, prompts, 3, [0, 319], kv_tokens=4096, page_size=8, chunked_prefill_size=48)
    assert_right(answers, prompts, reference, [0, 319])
    assert min(len(set(answer.token_ids)) for answer in answers) > 10, "the model repeats itself: it would not notice an error"


# bfloat16

needs_native = pytest.mark.skipif(cpu.native() is None, reason=f"no native backend: {cpu.WHY_NOT}")


@needs_native
@pytest.mark.parametrize("name", VARIANTS)
def test_tiny_models_on_the_native_backend(tmp_path: Path, tiny_llama: Path, name: str) -> None:
    """No further from transformers in float32 than transformers in bfloat16: rows of every layer, and logprobs."""
    reference = save_tiny(tmp_path, VARIANTS[name], torch.bfloat16)
    half = copy.deepcopy(reference).to(torch.bfloat16)
    half.model.rotary_emb = reference.model.rotary_emb  # its frequencies stay float32
    shutil.copy(tiny_llama / "tokenizer.json", tmp_path)
    random = np.random.default_rng(3)
    prompts = [random.integers(2, 320, length).tolist() for length in [1, 2, 5, 90, *random.integers(3, 60, 8).tolist()]]
    options = {"kv_tokens": 4096, "page_size": 8, "chunked_prefill_size": 48, "dtype": "bfloat16"}
    answers = answers_of(tmp_path, prompts, 3, [0, 319], **options)
    lost: list[Tensor] = []  # by answer: [layers + 1] squares, of our rows and logprobs and of transformers'
    allowed: list[Tensor] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor(prompt + list(answer.token_ids))
        with torch.inference_mode():
            exact, theirs = (model(ids[None, :-1], output_hidden_states=True) for model in (reference, half))

        def logprobs_of(logits: Tensor, ids: Tensor = ids) -> Tensor:
            return logits[0].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]

        assert answer.hidden_states is not None and answer.logprobs is not None
        states = torch.stack([layer[0] for layer in exact.hidden_states], 1)  # [positions, layers, hidden]
        scale = states.square().mean((0, 2))
        ours = (answer.hidden_states.data.float() - states).square().mean((0, 2)) / scale
        half_states = torch.stack([layer[0].float() for layer in theirs.hidden_states], 1)
        wanted = logprobs_of(exact.logits)
        got = torch.tensor([*answer.logprobs.input, *answer.logprobs.output][1:])
        lost.append(torch.cat([ours, (got - wanted).square().mean()[None]]))
        half_rows = (half_states - states).square().mean((0, 2)) / scale
        allowed.append(torch.cat([half_rows, (logprobs_of(theirs.logits) - wanted).square().mean()[None]]))
    ours, limit = (torch.stack(squares).mean(0).sqrt() for squares in (lost, allowed))
    print(f"{name}: {ours.tolist()}, transformers {limit.tolist()}")
    assert (ours <= 1.1 * limit + 1e-6).all()
    assert ours[:-1].max() < 0.05 and ours[-1] < 0.5, "the test would not notice an error"


class Paged:
    """A decoder with a page table and a cache by hand: texts side by side, `page` positions a page, pages dealt in turn."""

    def __init__(self, model: LoadedModel, dtype: torch.dtype, texts: Tensor, page: int = 16, native: bool = False) -> None:
        spec = model.spec
        self.decoder: Interpreter
        if native:
            self.decoder = NativeDecoder(spec, model.weights, context=512, threads=1)
        else:
            self.decoder = Decoder(spec, {name: weight.to(dtype) for name, weight in model.weights.items()}, context=512)
        count, length = texts.shape
        pages = -(-length // page)
        self.memory = DeviceMemory(spec, num_pages=pages * count, page_size=page, slots=count, context=512, dtype=dtype, device=CPU)
        self.memory.page_table[:, :pages] = 1 + torch.arange(pages * count, dtype=torch.int32).view(pages, count).T
        self.memory.token_table[:, :length] = texts
        self.count = count

    def forward(self, start: int, end: int) -> Tensor:
        """Logprobs [texts, end - start, vocabulary] of one step over these positions of every text."""
        count, length = self.count, end - start
        spans = Spans(np.arange(count), np.full(count, start), np.full(count, length))
        with torch.inference_mode():
            hidden, _ = self.decoder.forward(spans, self.memory)
            return self.decoder.logits(hidden).log_softmax(-1).view(count, length, -1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [1, 320, 1024])  # less than a piece, not a multiple of it, and four of them
def test_logits_of_half_precision_are_float32(loaded: LoadedModel, dtype: torch.dtype, device: str, vocabulary: int) -> None:
    weights = {name: weight.to(device, dtype) for name, weight in loaded.weights.items()}
    decoder = Decoder(loaded.spec, weights | {"lm_head": weights["embed"][:vocabulary]}, context=8)
    head, generator = decoder.weights["lm_head"].double(), torch.Generator().manual_seed(1)
    for rows in (1, 5):
        hidden = torch.randn(rows, loaded.spec.hidden_size, generator=generator).to(device, dtype)
        logits = decoder.logits(hidden)
        assert logits.dtype == torch.float32 and logits.shape == (rows, vocabulary)
        allowed = 1e-6 * (hidden.double().abs() @ head.abs().T)  # rounding to bfloat16 alone exceeds it many times
        assert ((logits - hidden.double() @ head.T).abs() <= allowed).all()


def divergence(reference: Tensor, other: Tensor) -> Tensor:
    """Kullback-Leibler divergence of each position."""
    return (reference.double().exp() * (reference.double() - other.double())).sum(-1)


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_native)], ids=["torch", "native"])
def test_bfloat16_loses_no_more_than_transformers(loaded: LoadedModel, tokenizer: Tokenizer, native: bool) -> None:
    ids = tokenizer.encode(PROSE)
    texts = torch.tensor(ids[: 8 * 72]).view(8, 72)
    with torch.inference_mode():
        exact = reference_of(loaded, torch.float32)(texts).logits.log_softmax(-1)
        theirs = reference_of(loaded, torch.bfloat16)(texts).logits.float().log_softmax(-1)
    paged = Paged(loaded, torch.bfloat16, texts, native=native)
    # The first part of each text as a prompt, the rest token by token: both ways through the attention.
    ours = torch.cat([paged.forward(0, 40), *(paged.forward(p, p + 1) for p in range(40, 72))], 1)
    lost, allowed = divergence(exact, ours), divergence(exact, theirs)
    halves = [f"{part.mean():.6f}" for part in (lost[:, :40], allowed[:, :40], lost[:, 40:], allowed[:, 40:])]
    print(
        f"KL to float32: sidestream {lost.mean():.6f}, transformers {allowed.mean():.6f}, ratio {lost.mean() / allowed.mean():.3f}; "
        f"prompts {halves[0]} and {halves[1]}, tokens {halves[2]} and {halves[3]}"
    )
    assert 1e-6 < allowed.mean() < 0.1, "the reference itself is off"
    # The native backend takes the quantised weights as they are; PyTorch's are rounded to bfloat16, as the reference's.
    assert lost.mean() <= (0.3 if native else 0.9) * allowed.mean(), "transformers rounds its logits to bfloat16, and we do not"
    assert (ours.argmax(-1) == exact.argmax(-1)).float().mean() > 0.95
