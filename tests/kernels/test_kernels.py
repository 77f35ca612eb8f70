"""Each kernel against float64, over odd shapes, and the same bits for a row whatever is computed beside it."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from sidestream.kernels import cpu
from sidestream.kernels.cpu.decoder import ROW_TYPES, STORED
from sidestream.models.quants import SUPPORTED, dequantize_into

KINDS = {kind.name: kind for kind in SUPPORTED.values()}
EPSILON = 2.0**-24  # float32 rounds to a relative error of this


def generator(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(n * 1009**i for i, n in enumerate(seed)))


def stored_matrix(stored: str, rows: int, cols: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """A random matrix as a file holds it, and its values in float64."""
    if stored == "BF16":
        weight = torch.randn(rows, cols, generator=random).to(torch.bfloat16)
        weight[::7] *= 1e-6
        weight[1::7] *= 1e6
        weight[:, ::5] = 0
        return weight, weight.double()
    kind = KINDS[stored]
    blocks = torch.randint(0, 256, (rows, cols // 32, kind.size), generator=random, dtype=torch.uint8)
    scales = torch.randn(rows, cols // 32, 2 if stored == "Q4_1" else 1, generator=random).to(torch.float16)
    scales[::7] *= 2.0**-14  # some of them below the smallest normal half
    scales[1::7] *= 2.0**12
    scales[2::7] = 0
    count = scales.shape[2] * 2
    blocks[:, :, :count] = scales.view(torch.uint8).view(rows, cols // 32, count)
    if stored == "Q8_0":
        blocks[::3, :, 2::3] = 128  # -128
        blocks[:, ::2, 9] = 127
    values = torch.empty(rows, cols)
    dequantize_into(blocks.flatten(), kind, values)
    return blocks, values.double()


def padded_rows(rows: int, cols: int, random: torch.Generator) -> Tensor:
    x = torch.zeros(rows, -(-cols // 32) * 32, dtype=torch.bfloat16)
    x[:, :cols] = torch.randn(rows, cols, generator=random)
    x[:, : cols // 2] *= 100
    return x


def matmul(native: ModuleType, isa: str, stored: str, weight: Tensor, shape: tuple[int, int], x: Tensor) -> Tensor:
    # One more row: what lies behind the output must stay as it was.
    out = torch.full((len(x) + 1, shape[0]), 7.0)
    native.matmul(isa, 0, STORED[stored], weight.data_ptr(), *shape, x.data_ptr(), len(x), out.data_ptr())
    assert (out[-1] == 7).all()
    return out[:-1]


SHAPES = {
    "BF16": [(1, 1), (5, 3), (33, 2), (64, 31), (100, 33), (31, 48), (95, 250), (32, 577)],
    "Q4_0": [(1, 32), (33, 64), (95, 96), (130, 608)],
    "Q4_1": [(1, 32), (33, 64), (95, 96), (130, 608)],
    "Q8_0": [(1, 32), (33, 64), (95, 96), (130, 608)],
}


@pytest.mark.parametrize(("stored", "shape"), [(stored, shape) for stored, shapes in SHAPES.items() for shape in shapes])
def test_matmul(native: ModuleType, isa: str, stored: str, shape: tuple[int, int]) -> None:
    random = generator(*shape)
    weight, values = stored_matrix(stored, *shape, random)
    x = padded_rows(33, shape[1], random)
    all_rows = matmul(native, isa, stored, weight, shape, x)
    wide = x[:, : shape[1]].double()
    # Q4 is summed as s (128 + q), and what is too much taken away afterwards: small weights of a large scale lose some digits.
    weights = values.abs()
    if stored.startswith("Q4"):
        count = 4 if stored == "Q4_1" else 2
        scales = weight[:, :, :count].contiguous().view(torch.float16).double()
        weights = weights + 143 * scales[:, :, :1].abs().repeat_interleave(32, 1).view(shape)
    allowed = 8 * EPSILON * math.sqrt(shape[1] + 8) * (wide.abs() @ weights.T) + 1e-35
    assert ((all_rows - wide @ values.T).abs() <= allowed).all()
    for rows in range(1, 33):
        assert torch.equal(matmul(native, isa, stored, weight, shape, x[:rows]), all_rows[:rows]), f"{rows} rows"
    for row in range(33):
        assert torch.equal(matmul(native, isa, stored, weight, shape, x[row : row + 1]), all_rows[row : row + 1]), f"row {row}"


@pytest.mark.parametrize("stored", list(SHAPES))
def test_rows_of_a_long_prompt_have_the_bits_of_one_alone(native: ModuleType, isa: str, stored: str) -> None:
    shape, rows = (70, 288), 301  # more than one block of rows
    weight, _ = stored_matrix(stored, *shape, generator(6))
    x = padded_rows(rows, shape[1], generator(7))
    together = matmul(native, isa, stored, weight, shape, x)
    for row in [*range(0, rows, 13), rows - 1]:
        assert torch.equal(matmul(native, isa, stored, weight, shape, x[row : row + 1]), together[row : row + 1]), f"row {row}"


@pytest.mark.parametrize("stored", ["BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_subnormal_numbers_are_the_same_in_every_tile(native: ModuleType, isa: str, stored: str) -> None:
    """The matrix unit takes them for zero. Behind a group of them, products of usual size are rounded."""
    shape = (64, 128)
    weight, _ = stored_matrix(stored, *shape, generator(12))
    for scale in (1e-37, 1e-38, 1e-39, 1e-40):
        x = torch.randn(33, 128, generator=generator(13))
        x[:, :32] *= scale
        x[::2] *= scale
        x = x.to(torch.bfloat16)
        all_rows = matmul(native, isa, stored, weight, shape, x)
        for rows in (1, 2, 12):
            parts = [matmul(native, isa, stored, weight, shape, part.contiguous()) for part in x.split(rows)]
            assert torch.equal(torch.cat(parts), all_rows), f"{rows} rows, scale {scale}"


def test_every_stored_integer_is_read(native: ModuleType, isa: str) -> None:
    """One column at a time, so that the output is the weight itself."""
    for stored, count in (("Q8_0", 256), ("Q4_0", 16), ("Q4_1", 16)):
        rows, head = 256, 4 if stored == "Q4_1" else 2
        blocks = torch.zeros(rows, KINDS[stored].size, dtype=torch.uint8)
        blocks[:, :head] = torch.tensor([0.5, 3.0][: head // 2], dtype=torch.float16).view(torch.uint8)
        numbers = torch.arange(rows)[:, None] + 37 * torch.arange(KINDS[stored].size - head)
        blocks[:, head:] = (numbers % 256).to(torch.uint8)
        values = torch.empty(rows, 32)
        dequantize_into(blocks.flatten(), KINDS[stored], values)
        assert len(values.unique()) == count
        eye = torch.eye(32, dtype=torch.bfloat16)
        for rows_together in (32, 1):  # expanded panels, and not
            parts = [matmul(native, isa, stored, blocks, (rows, 32), part.contiguous()) for part in eye.split(rows_together)]
            assert torch.equal(torch.cat(parts).T, values), stored


@pytest.mark.parametrize("stored", ["BF16", "Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_row(native: ModuleType, isa: str, stored: str, bad: float) -> None:
    shape = (70, 96)
    weight, _ = stored_matrix(stored, *shape, generator(3))
    for rows in (2, 5, 20):
        x = padded_rows(rows, 96, generator(4))
        clean = matmul(native, isa, stored, weight, shape, x)
        x[1, 40] = bad
        spoilt = matmul(native, isa, stored, weight, shape, x)
        others = [row for row in range(rows) if row != 1]
        assert torch.equal(spoilt[others], clean[others])
        assert (~spoilt[1].isfinite()).any()


@pytest.mark.parametrize(
    ("stored", "shape"),
    [("BF16", (70, 48)), ("BF16", (33, 7)), ("Q4_0", (40, 64)), ("Q4_1", (40, 64)), ("Q8_0", (40, 64))],
)
def test_embed_gives_the_rows_themselves(native: ModuleType, isa: str, stored: str, shape: tuple[int, int]) -> None:
    weight, values = stored_matrix(stored, *shape, generator(5))
    out = torch.full((shape[0] + 1, (shape[1] + 31) // 32 * 32), 7.0)
    native.embed(isa, 0, STORED[stored], weight.data_ptr(), *shape, out.data_ptr())
    assert torch.equal(out[:-1, : shape[1]].double(), values) and (out[:-1, shape[1] :] == 0).all() and (out[-1] == 7).all()


def one_row(kind: str, n: int, random: torch.Generator) -> Tensor:
    x = torch.randn(n, generator=random) * 10
    if kind == "ties":
        x = x.round()
    elif kind == "equal":
        x[:] = -3.5
    elif kind == "masked":
        x[torch.rand(n, generator=random) < 0.7] = -math.inf
    elif kind == "all masked":
        x[:] = -math.inf
    elif kind == "NaN":
        x[torch.rand(n, generator=random) < 0.3] = math.nan
        x[n // 2] = 1.0
    elif kind == "huge":
        x *= 1e37
    return x


LENGTHS = [1, 2, 3, 7, 8, 15, 16, 17, 31, 100, 1023, 1025, 5000]
ROW_KINDS = ["normal", "ties", "equal", "masked", "all masked", "NaN", "huge"]


def test_admit(use_isa: str) -> None:
    random = np.random.default_rng(5)
    for n in LENGTHS:
        x = torch.from_numpy(random.standard_normal((5, n), np.float32))
        words = random.integers(0, 2**32, (5, -(-n // 32)), np.uint32)
        words[:, ::3] = 0xFFFFFFFF
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :n].astype(bool)
        got = cpu.admit(x, torch.from_numpy(words.view(np.int32)))
        assert torch.equal(got, x.masked_fill(torch.from_numpy(~bits), -torch.inf))
    with pytest.raises(ValueError, match="masks"):
        cpu.admit(torch.zeros(2, 33), torch.zeros(2, 1, dtype=torch.int32))


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_greedy_and_top_k(use_isa: str, kind: str) -> None:
    random = generator(6)
    for n in LENGTHS:
        x = torch.stack([one_row(kind, n, random) for _ in range(5)])
        # Stable, so of equal ones the lower id is first; NaN goes last.
        order = torch.from_numpy(np.argsort(-x.numpy(), axis=1, kind="stable"))
        best = x.amax(-1)  # NaN if one is
        assert torch.equal(cpu.greedy(x, -7, -8).long(), torch.where(best.isfinite(), order[:, 0], torch.where(best.isneginf(), -7, -8)))
        for k in sorted({1, min(5, n), min(100, n), n}):
            values, ids = cpu.top_k(x, k)
            want = x.gather(1, order[:, :k])
            real = ~want.isnan()
            assert torch.equal(ids[real].long(), order[:, :k][real]) and torch.equal(values[real], want[real])
            assert (values[~real] == -math.inf).all()
    assert cpu.greedy(torch.tensor([[1.0, math.nan], [1.0, math.inf], [-math.inf, -math.inf], [1.0, 1.0]]), -1, -2).tolist() == [
        -2,
        -2,
        -1,
        0,
    ]


@pytest.mark.parametrize("kind", [kind for kind in ROW_KINDS if kind != "NaN"])
def test_logsumexp(use_isa: str, kind: str) -> None:
    random = generator(7)
    for n in LENGTHS:
        x = torch.stack([one_row(kind, n, random) for _ in range(5)])
        got, want = cpu.logsumexp(x), x.double().logsumexp(-1)
        close = (got - want).abs() <= 2e-7 * want.abs() + 2e-7
        assert (close | (got == want)).all(), n
        assert all(torch.equal(cpu.logsumexp(x[i : i + 1]), got[i : i + 1]) for i in range(5))


def test_logsumexp_of_infinity(use_isa: str) -> None:
    assert cpu.logsumexp(torch.tensor([[0.0, math.inf, -math.inf], [-math.inf] * 3])).tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize("n", [1, 8, 20, 31, 32, 48, 576])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_rms_norm(native: ModuleType, isa: str, n: int, scale: float) -> None:
    padded = -(-n // 32) * 32
    x, weight, out = torch.zeros(padded), torch.zeros(padded), torch.full((padded + 1,), 7.0, dtype=torch.bfloat16)
    x[:n], weight[:n] = torch.randn(n, generator=generator(n)) * scale, torch.randn(n, generator=generator(n, 1))
    native.rms_norm(isa, x.data_ptr(), weight.data_ptr(), 1e-6, n, out.data_ptr())
    wide = x[:n].double()
    want = wide / (wide.square().mean() + 1e-6).sqrt() * weight[:n].double()
    assert ((out[:n] - want).abs() <= 2.0**-8 * 1.001 * want.abs() + 1e-37).all()
    assert (out[n:padded] == 0).all() and out[-1] == 7


@pytest.mark.parametrize(("head_dim", "rotary"), [(8, 8), (16, 16), (20, 20), (64, 64), (80, 32), (96, 96), (128, 128), (22, 6)])
@pytest.mark.parametrize("normed", [False, True])
def test_rope(native: ModuleType, isa: str, head_dim: int, rotary: int, normed: bool) -> None:
    random = generator(head_dim)
    x, weight = torch.randn(head_dim, generator=random), torch.randn(head_dim, generator=random)
    angles = torch.rand(rotary // 2, generator=random) * 100
    cos, sin, out = angles.cos(), angles.sin(), torch.full((head_dim + 1,), 7.0, dtype=torch.bfloat16)
    norm = weight.data_ptr() if normed else 0
    native.rope(isa, x.data_ptr(), norm, 1e-5, cos.data_ptr(), sin.data_ptr(), rotary, head_dim, out.data_ptr())
    wide = x.double()
    if normed:
        wide = wide / (wide.square().mean() + 1e-5).sqrt() * weight.double()
    a, b, rest = wide[: rotary // 2], wide[rotary // 2 : rotary], wide[rotary:]
    want = torch.cat([a * cos - b * sin, b * cos + a * sin, rest])
    assert ((out[:-1] - want).abs() <= 2.0**-8 * 1.001 * want.abs() + 1e-5).all() and out[-1] == 7


@pytest.mark.parametrize("dtype", list(ROW_TYPES), ids=str)
def test_convert(native: ModuleType, isa: str, dtype: torch.dtype) -> None:
    """As torch rounds it, to the bit, over all exponents; a number too small to be normal may become zero."""
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=generator(9), dtype=torch.int64).to(torch.int32)
    special = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, 65504.0, 65519.0, 65520.0, 65536.0, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 6.1e-5, -1e-7]
    )
    x = torch.cat([special, bits.view(torch.float32)[bits.view(torch.float32).isfinite()], torch.randn(1000, generator=generator(8))])
    for n in (*range(1, 40), len(x)):
        out = torch.full((n + 1,), 7.0, dtype=dtype)
        native.convert(isa, x.data_ptr(), n, ROW_TYPES[dtype], out.data_ptr())
        got, want = out[:n], x[:n].to(dtype)
        flushed = (got == 0) & (want.abs() < 2.0**-126)
        assert (torch.signbit(got) == torch.signbit(want)).all()
        assert ((got == want) | flushed).all() and out[n] == 7
    nan = torch.tensor([math.nan] * 3)
    out = torch.zeros(3, dtype=dtype)
    native.convert(isa, nan.data_ptr(), 3, ROW_TYPES[dtype], out.data_ptr())
    assert out.isnan().all()


class Cache:
    """Keys and values of one request in pages that lie anywhere; whatever is not its own is NaN."""

    def __init__(self, length: int, heads: int, dim: int, page_size: int, random: torch.Generator) -> None:
        pages = -(-length // page_size)
        self.page_size, self.stride = page_size, heads * dim
        self.table = torch.randperm(2 * pages + 1, generator=random)[:pages].to(torch.int32)
        rows = (self.table.long()[:, None] * page_size + torch.arange(page_size)).flatten()[:length]
        self.keys = torch.full(((2 * pages + 1) * page_size, heads, dim), math.nan, dtype=torch.bfloat16)
        self.values = self.keys.clone()
        self.keys[rows] = torch.randn(length, heads, dim, generator=random).to(torch.bfloat16)
        self.values[rows] = torch.randn(length, heads, dim, generator=random).to(torch.bfloat16)
        self.own = self.keys[rows].double(), self.values[rows].double()

    def attend(self, native: ModuleType, isa: str, head: int, q: Tensor, first: Tensor, last: Tensor, scale: float) -> Tensor:
        out = torch.full((len(q) + 1, q.shape[1]), 7.0, dtype=torch.bfloat16)
        keys, values = self.keys[0, head].data_ptr(), self.values[0, head].data_ptr()
        kv = (keys, values, self.stride, self.table.data_ptr(), self.page_size.bit_length() - 1)
        native.attend(isa, kv, q.shape[1], q.data_ptr(), len(q), (first.data_ptr(), last.data_ptr()), scale, out.data_ptr())
        assert (out[-1] == 7).all()
        return out[:-1]


@pytest.mark.parametrize("dim", [8, 16, 20, 64, 80, 96, 128])
@pytest.mark.parametrize("window", [0, 1, 5, 40, 300])
def test_attention(native: ModuleType, isa: str, dim: int, window: int) -> None:
    random = generator(dim, window)
    for case, length in enumerate([1, 2, 31, 33, 255, 256, 257, 270, 511, 513, 700]):
        page_size, head = 2 ** ((case + dim) % 9), case % 3
        cache = Cache(length, 3, dim, page_size, random)
        count = min(48 if case % 2 else 192, length)
        last = torch.arange(length - count, length, dtype=torch.int32)
        first = (last - window + 1).clamp(min=0) if window else torch.zeros_like(last)
        q, scale = (torch.randn(count, dim, generator=random) * 3).to(torch.bfloat16), dim**-0.5
        got = cache.attend(native, isa, head, q, first, last, scale)
        scores = q.double() @ cache.own[0][:, head].T * scale
        at = torch.arange(length)
        hidden = (at < first[:, None]) | (at > last[:, None])
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        values = cache.own[1][:, head]
        # The weights and the result are rounded to bfloat16.
        allowed = 2.0**-8 * 1.05 * (weights @ values.abs() + (weights @ values).abs()) + 1e-5
        assert ((got - weights @ values).abs() <= allowed).all(), (length, page_size)
        for i in {0, count // 2, count - 1}:
            one = slice(i, i + 1)
            assert torch.equal(cache.attend(native, isa, head, q[one].contiguous(), first[one].clone(), last[one].clone(), scale), got[one])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("window", [0, 20])
def test_a_key_or_value_that_is_not_finite_shows_where_it_is_seen(native: ModuleType, isa: str, bad: float, window: int) -> None:
    length, random = 300, generator(14, window)
    last = torch.arange(length - 48, length, dtype=torch.int32)
    first = (last - window + 1).clamp(min=0) if window else torch.zeros_like(last)
    q = torch.randn(48, 32, generator=random).abs().to(torch.bfloat16)
    # One position, and all of the first part.
    for positions in (range(3, 4), range(280, 281), range(299, 300), range(256)):
        cache = Cache(length, 1, 32, 16, random)
        at = [int(cache.table[position // 16]) * 16 + position % 16 for position in positions]
        clean = cache.attend(native, isa, 0, q, first, last, 0.2)
        sees = (first < positions.stop) & (last >= positions.start)
        for tensor in (cache.keys, cache.values):
            before = tensor[at]
            tensor[at] = bad
            spoilt = cache.attend(native, isa, 0, q, first, last, 0.2)
            tensor[at] = before
            assert not spoilt[sees].isfinite().any() and torch.equal(spoilt[~sees], clean[~sees]), positions


def test_attention_over_large_scores(native: ModuleType, isa: str) -> None:
    """The largest score of all is in any of the parts, and far above the others."""
    random = generator(11)
    for place in (0, 255, 256, 400, 600):
        cache = Cache(601, 1, 32, 16, random)
        q = torch.full((1, 32), 30.0, dtype=torch.bfloat16)
        row = int(cache.table[place // 16]) * 16 + place % 16
        cache.keys[row] = 30.0
        got = cache.attend(native, isa, 0, q, torch.tensor([0], dtype=torch.int32), torch.tensor([600], dtype=torch.int32), 1.0)
        assert torch.equal(got[0], cache.values[row, 0])
