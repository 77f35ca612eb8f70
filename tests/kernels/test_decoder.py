"""The native interpreter as a whole: right numbers for every shape of model, and the same bits for a position however it is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sidestream.kernels import cpu
from sidestream.kernels.cpu.decoder import NativeDecoder
from sidestream.models.decoder import Decoder
from sidestream.models.interpreter import Interpreter, Spans, Tap
from sidestream.models.quants import SUPPORTED, dequantize_into
from sidestream.models.spec import DecoderSpec, RopeSpec, weight_kind

CONTEXT = 640
KINDS = {kind.name: kind for kind in SUPPORTED.values()}


def make_spec(**fields: Any) -> DecoderSpec:
    sizes: dict[str, Any] = {
        "model_type": "made up",
        "vocab_size": 75,
        "hidden_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 40,
        "norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position": CONTEXT,
    }
    sizes |= fields
    sizes.setdefault("windows", (None,) * sizes["num_layers"])
    sizes.setdefault("rope", RopeSpec(theta=10000.0, dim=sizes["head_dim"]))
    return DecoderSpec(**{"attention_scale": sizes["head_dim"] ** -0.5} | sizes)


class Quantized(NamedTuple):
    type: str
    blocks: Tensor


class Weights(Mapping[str, Tensor]):
    """Random weights as `models.loader.Weights` hands them over: exact in bfloat16, or in blocks where `stored` says so."""

    def __init__(self, spec: DecoderSpec, stored: Callable[[str], str] = lambda _: "BF16", seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.values: dict[str, Tensor] = {}
        self.blocks: dict[str, Quantized] = {}
        for name, shape in spec.weight_shapes().items():
            kind = stored(weight_kind(name)[0]) if len(shape) == 2 else "BF16"
            weight = torch.randn(shape, generator=random)
            weight = (
                1 + 0.2 * weight if "norm" in name else weight * (0.5 if "bias" in name or name == "embed" else 1.4 * shape[-1] ** -0.5)
            )
            if kind == "BF16":
                self.values[name] = weight.bfloat16().float()
                continue
            head = 4 if kind == "Q4_1" else 2
            blocks = torch.randint(0, 256, (*shape[:-1], shape[-1] // 32, KINDS[kind].size), generator=random, dtype=torch.uint8)
            spread = shape[-1] ** -0.5 / {"Q8_0": 70, "Q4_0": 4, "Q4_1": 4}[kind]
            scales = torch.tensor([spread, -8 * spread][: head // 2]).half().view(torch.uint8)
            blocks[..., :head] = scales
            self.values[name] = torch.empty(shape)
            dequantize_into(blocks.flatten(), KINDS[kind], self.values[name])
            self.blocks[name] = Quantized(kind, blocks.flatten(1))

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name]

    def __iter__(self) -> Any:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        return self.values[name].to(dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def quantized(self, name: str) -> Quantized | None:
        return self.blocks.get(name)


@dataclass
class Pool:
    """What the engine's `DeviceMemory` is, with every page full of NaN until somebody owns it."""

    page_size: int
    keys: Tensor
    values: Tensor
    page_table: Tensor
    token_table: Tensor

    @classmethod
    def of(cls, spec: DecoderSpec, page_size: int, slots: int, pages: int, dtype: torch.dtype) -> Pool:
        shape = (spec.num_layers, pages * page_size, spec.num_kv_heads, spec.head_dim)
        keys, table = torch.full(shape, math.nan, dtype=dtype), torch.zeros(slots, -(-CONTEXT // page_size), dtype=torch.int32)
        return cls(page_size, keys, keys.clone(), table, torch.zeros(slots, CONTEXT + 1, dtype=torch.int32))

    def upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array)

    def clear(self, pages: list[int]) -> None:
        for page in pages:
            self.keys[:, page * self.page_size : (page + 1) * self.page_size] = math.nan
            self.values[:, page * self.page_size : (page + 1) * self.page_size] = math.nan


class Rows(NamedTuple):
    """All that a step gives for its tokens, [tokens, ...]."""

    hidden: Tensor
    layers: Tensor  # bfloat16
    logits: Tensor

    def __getitem__(self, index: Any) -> Rows:  # type: ignore[override]
        return Rows(*(part[index] for part in tuple(self)))


def run(decoder: Interpreter, pool: Pool, spans: list[tuple[int, int, int]]) -> Rows:
    """spans: (slot, start, length)."""
    tokens, spec = sum(length for _, _, length in spans), decoder.spec
    rows, layers = np.arange(tokens), tuple(range(spec.num_layers + 1))
    tap = Tap(rows, layers, torch.empty(tokens, len(layers), spec.hidden_size, dtype=decoder.dtype))
    arrays = (np.array(column, np.int64) for column in zip(*spans, strict=True))
    with torch.inference_mode():
        hidden, logits = decoder.forward(Spans(*arrays), pool, [tap], rows)
    assert logits is not None
    return Rows(hidden, tap.out, logits)


def alone(decoder: Interpreter, tokens: list[int], *, page_size: int = 16, piece: int = CONTEXT) -> Rows:
    """One request in pages of its own, its prompt in spans of `piece` tokens."""
    pages = -(-len(tokens) // page_size)
    pool = Pool.of(decoder.spec, page_size, 1, pages + 1, decoder.dtype)
    pool.page_table[0, :pages] = torch.arange(1, pages + 1)
    pool.token_table[0, : len(tokens)] = torch.tensor(tokens)
    parts = [run(decoder, pool, [(0, start, min(piece, len(tokens) - start))]) for start in range(0, len(tokens), piece)]
    return Rows(*(torch.cat(part) for part in zip(*(tuple(part) for part in parts), strict=True)))


def random_tokens(spec: DecoderSpec, count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, spec.vocab_size, count).tolist()  # type: ignore[no-any-return]


def assert_equal_bits(got: Rows, want: Rows, what: str) -> None:
    for name, one, other in zip(Rows._fields, tuple(got), tuple(want), strict=True):
        assert torch.equal(one, other), f"{what}: {name}"  # a NaN equals nothing


SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer, one head": {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "hidden_size": 8, "intermediate_size": 6},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "activation": "gelu_tanh"},
    "windows, norms of heads": {"num_layers": 3, "windows": (7, None, 300), "qk_norm": True, "activation": "gelu", "head_dim": 20},
    "odd widths": {"hidden_size": 33, "intermediate_size": 37, "vocab_size": 33, "head_dim": 6, "num_heads": 3, "num_kv_heads": 1},
    "scales": {"embedding_scale": 3.0, "logit_scale": 0.25, "num_heads": 8, "num_kv_heads": 1, "attention_scale": 0.1},
    "partial rotary": {"rope": RopeSpec(theta=10000.0, dim=8), "num_heads": 2, "num_kv_heads": 2, "vocab_size": 7},
    "wide heads": {"num_heads": 3, "num_kv_heads": 1, "head_dim": 80, "windows": (40, 256)},
    "wider heads": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 128, "num_layers": 1},
    "many heads share a key": {"num_heads": 48, "num_kv_heads": 1, "head_dim": 8, "num_layers": 1},
}
QUANTIZED = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 75}
STORED: dict[str, Callable[[str], str]] = {
    "Q4_0": lambda _: "Q4_0",
    "Q4_1": lambda _: "Q4_1",
    "Q8_0": lambda _: "Q8_0",
    "mixed": lambda kind: {"up": "Q8_0", "gate": "Q4_0", "k": "Q4_1", "v": "BF16", "lm_head": "BF16"}.get(kind.rpartition(".")[2], "Q4_0"),
}


@pytest.mark.parametrize("name", SPECS)
def test_every_shape_of_model_gives_the_numbers_of_float32(native: ModuleType, use_isa: str, name: str) -> None:
    assert_right(make_spec(**SPECS[name]), lambda _: "BF16")


@pytest.mark.parametrize("stored", STORED)
def test_quantized_models_give_the_numbers_of_float32(native: ModuleType, use_isa: str, stored: str) -> None:
    assert_right(make_spec(**QUANTIZED), STORED[stored])


def assert_right(spec: DecoderSpec, stored: Callable[[str], str]) -> None:
    """No further from the PyTorch interpreter in float32 than the same in bfloat16, in every layer."""
    weights = Weights(spec, stored)
    tokens = random_tokens(spec, 290, 1)
    exact = alone(Decoder(spec, weights, context=CONTEXT), tokens)
    theirs = alone(Decoder(spec, {name: weights.read(name, torch.bfloat16) for name in weights}, context=CONTEXT), tokens)
    ours = alone(NativeDecoder(spec, weights, context=CONTEXT, threads=1), tokens)
    for name, want, got, other in zip(Rows._fields, tuple(exact), tuple(ours), tuple(theirs), strict=True):
        assert got.isfinite().all()
        if name == "layers":
            want, got, other = (part.transpose(0, 1).flatten(1) for part in (want, got, other))
        else:
            want, got, other = (part.flatten()[None] for part in (want, got, other))
        for layer in range(len(want)):
            norm = want[layer].norm()
            error, allowed = ((part[layer].float() - want[layer]).norm() / norm for part in (got, other))
            assert error <= 1.1 * allowed + 0.002, f"{name}, layer {layer}: {error:.4f}, PyTorch's is {allowed:.4f}"
            assert error < 0.1, "the test would not notice an error"


# However it is computed.

ANYTHING: dict[str, Any] = {
    "name": st.sampled_from(sorted(SPECS)),
    "stored": st.sampled_from(["BF16", "BF16", *STORED]),
    "page_bits": st.integers(0, 8),
    "threads": st.sampled_from([1, 1, 1, 2]),
    "seed": st.integers(0, 2**32 - 1),
}
FUZZ: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@settings(max_examples=4, **FUZZ)
@given(**ANYTHING)
def test_a_position_has_the_same_bits_however_it_is_computed(native: ModuleType, use_isa: str, **traffic: Any) -> None:
    run_traffic(**traffic)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=150, **FUZZ)
@given(**ANYTHING)
def test_the_same_at_length(native: ModuleType, use_isa: str, **traffic: Any) -> None:
    run_traffic(**traffic)


def run_traffic(name: str, stored: str, page_bits: int, threads: int, seed: int) -> None:
    spec = make_spec(**SPECS[name]) if stored == "BF16" else make_spec(**QUANTIZED, windows=(None, 50))
    decoder = NativeDecoder(spec, Weights(spec, STORED.get(stored, lambda _: "BF16")), context=CONTEXT, threads=1)
    Traffic(decoder, 2**page_bits, np.random.default_rng(seed)).run(threads)


class Traffic:
    """Requests that come and go, some with the beginning of another, in pages dealt at random; every row is compared with the solo run."""

    def __init__(self, decoder: NativeDecoder, page_size: int, random: np.random.Generator) -> None:
        self.decoder, self.page_size, self.random = decoder, page_size, random
        self.slots = 6
        self.pool = Pool.of(decoder.spec, page_size, self.slots, self.slots * -(-CONTEXT // page_size) + 1, decoder.dtype)
        self.free = list(random.permutation(np.arange(len(self.pool.keys[0]) // page_size)))
        self.owners: dict[int, int] = {}  # of a page: requests that use it
        self.live: dict[int, tuple[list[int], Rows, int]] = {}  # slot: tokens, what is right, positions computed

    def admit(self, slot: int) -> None:
        spec, size, random = self.decoder.spec, self.page_size, self.random
        length = int(random.choice([random.integers(1, 40), random.integers(230, 290), random.integers(500, CONTEXT)]))
        tokens, pages, done = random.integers(0, spec.vocab_size, length).tolist(), [], 0
        if self.live and random.random() < 0.6:
            other = int(random.choice(list(self.live)))
            theirs, _, computed = self.live[other]
            done = min(computed, length - 1) // size * size
            tokens[:done] = theirs[:done]
            pages = self.pool.page_table[other, : done // size].tolist()
        pages += [self.free.pop() for _ in range(-(-length // size) - len(pages))]
        for page in pages:
            self.owners[page] = self.owners.get(page, 0) + 1
        self.pool.page_table[slot] = 0
        self.pool.page_table[slot, : len(pages)] = torch.tensor(pages)
        self.pool.token_table[slot] = -1
        self.pool.token_table[slot, :length] = torch.tensor(tokens)
        self.live[slot] = tokens, alone(self.decoder, tokens), done

    def release(self, slot: int) -> None:
        tokens, _, _ = self.live.pop(slot)
        for page in self.pool.page_table[slot, : -(-len(tokens) // self.page_size)].tolist():
            self.owners[page] -= 1
            if not self.owners[page]:
                self.pool.clear([page])
                self.free.insert(0, page)

    def run(self, threads: int) -> None:
        random = self.random
        for step in range(15):
            for slot in set(range(self.slots)) - set(self.live):
                if random.random() < 0.5:
                    self.admit(slot)
            spans = []
            for slot in random.permutation(list(self.live)):
                tokens, _, done = self.live[slot]
                left = len(tokens) - done
                length = int(random.choice([1, 1, min(left, 2), min(left, random.integers(1, 60)), left]))
                if random.random() < 0.85:
                    spans.append((int(slot), done, length))
            if not spans:
                continue
            self.decoder.threads = threads
            got, at = run(self.decoder, self.pool, spans), 0
            self.decoder.threads = 1
            for slot, start, length in spans:
                tokens, want, _ = self.live[slot]
                assert_equal_bits(
                    got[at : at + length], want[start : start + length], f"step {step}: {start} to {start + length} of slot {slot}"
                )
                at += length
                self.live[slot] = tokens, want, start + length
                if start + length == len(tokens):
                    self.release(slot)


def test_many_rows_over_one_prefix(native: ModuleType, use_isa: str) -> None:
    """More rows share the pages of a part than one tile of attention takes, and they end in different parts."""
    spec = make_spec(windows=(None, 100))
    decoder = NativeDecoder(spec, Weights(spec), context=CONTEXT, threads=1)
    common, slots, size = random_tokens(spec, 512, 2), 100, 4
    pool = Pool.of(spec, size, slots, 128 + slots * 32 + 1, torch.bfloat16)
    want, lengths = [], []
    for slot in range(slots):
        length = 513 + slot % 3 * 30
        tokens = common + random_tokens(spec, length - 512, slot)
        pool.token_table[slot, :length] = torch.tensor(tokens)
        pool.page_table[slot, :128] = torch.arange(1, 129)
        pool.page_table[slot, 128:] = 129 + 32 * slot + torch.arange(32)
        want.append(alone(decoder, tokens, page_size=64))
        lengths.append(length)
    run(decoder, pool, [(0, 0, 512)])
    run(decoder, pool, [(slot, 512, length - 513) for slot, length in enumerate(lengths) if length > 513])
    got = run(decoder, pool, [(slot, length - 1, 1) for slot, length in enumerate(lengths)])
    for slot in range(slots):
        assert_equal_bits(got[slot : slot + 1], want[slot][-1:], f"slot {slot}")


def test_two_threads_give_the_bits_of_one(native: ModuleType, use_isa: str) -> None:
    spec = make_spec(**QUANTIZED)
    weights = Weights(spec, STORED["mixed"])
    one, two = (NativeDecoder(spec, weights, context=CONTEXT, threads=threads) for threads in (1, 2))
    tokens = random_tokens(spec, 300, 3)
    assert_equal_bits(alone(two, tokens), alone(one, tokens), "two threads")
    hidden = alone(one, tokens).hidden
    assert torch.equal(two.logits(hidden), one.logits(hidden))


def test_logits_apart_are_those_of_the_forward(native: ModuleType, use_isa: str) -> None:
    spec = make_spec(**SPECS["odd widths"], logit_scale=0.5)
    decoder = NativeDecoder(spec, Weights(spec), context=CONTEXT, threads=1)
    rows = alone(decoder, random_tokens(spec, 40, 4))
    for count in (1, 3, 40):
        assert torch.equal(decoder.logits(rows.hidden[:count]), rows.logits[:count])


# What is not finite.


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "place", ["embed", "layers.0.q", "layers.0.k", "layers.0.v", "layers.0.gate", "layers.1.down", "final_norm", "lm_head"]
)
def test_a_weight_that_is_not_finite_shows(native: ModuleType, use_isa: str, bad: float, place: str) -> None:
    """In the rows in which it does in PyTorch, token by token; in no earlier row, whatever is computed together."""
    spec = make_spec()
    weights = Weights(spec)
    weights.values[place] = weights.values[place].clone()
    weights.values[place].view(-1)[5] = bad
    # Token 0, whose row of the embedding is the one that is not finite, comes late.
    tokens = [token or 1 for token in random_tokens(spec, 30, 6)]
    tokens[10] = 0
    decoder = NativeDecoder(spec, weights, context=CONTEXT, threads=1)
    ours, theirs = alone(decoder, tokens), alone(Decoder(spec, weights, context=CONTEXT), tokens, piece=1)
    assert torch.equal(ours.logits.isfinite().all(1), theirs.logits.isfinite().all(1))
    for piece in (1, 3):
        again = alone(decoder, tokens, page_size=4, piece=piece)
        for one, other in zip(tuple(again), tuple(ours), strict=True):
            assert torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def test_a_token_that_is_none_spoils_nobody(native: ModuleType, use_isa: str) -> None:
    """The row of a request that has ended by surprise: its token is -1."""
    spec = make_spec()
    decoder = NativeDecoder(spec, Weights(spec), context=CONTEXT, threads=1)
    tokens = random_tokens(spec, 20, 7)
    pool = Pool.of(spec, 16, 2, 5, torch.bfloat16)
    pool.page_table[:, :2] = torch.tensor([[1, 2], [3, 4]])
    pool.token_table[0, :20], pool.token_table[1] = torch.tensor(tokens), -1
    got = run(decoder, pool, [(1, 0, 3), (0, 0, 20)])
    assert_equal_bits(got[3:], alone(decoder, tokens), "beside it")


# What is refused.


def test_wrong_calls_are_refused(native: ModuleType) -> None:
    spec = make_spec()
    decoder = NativeDecoder(spec, Weights(spec), context=32, threads=1)
    pool = Pool.of(spec, 16, 2, 5, torch.bfloat16)
    for spans, message in [
        ([(2, 0, 1)], "slots: got values from 2 to 2, must be from 0 to 1"),
        ([(0, 0, 0)], "lengths be at least 1"),
        ([(0, -1, 1)], "starts must not be negative"),
        ([(0, 30, 3)], "ends at position 33, the tables have room for 32"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(decoder, pool, spans)
    for wrong, message in [
        (replace(pool, page_size=3), "page_size: got 3"),
        (replace(pool, page_size=512), "page_size: got 512"),
        (replace(pool, keys=pool.keys.float()), "keys: got .* torch.float32"),
        (replace(pool, values=pool.values[:1]), "values: got"),
        (replace(pool, token_table=pool.token_table.long()), "token_table: got .* torch.int64"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(decoder, wrong, [(0, 0, 1)])
    with pytest.raises(ValueError, match=r"hidden: got \(1, 47\)"):
        decoder.logits(torch.zeros(1, 47, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="k: got 4, must be from 1 to 3"):
        cpu.top_k(torch.zeros(1, 3), 4)
    with pytest.raises(ValueError, match=r"logits: got \(3,\)"):
        cpu.greedy(torch.zeros(3), -1, -2)
