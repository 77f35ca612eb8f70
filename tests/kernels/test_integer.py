"""Integer compute: 8-bit activations times 4- and 8-bit weights, by itself and in an engine."""

from __future__ import annotations

import logging

import gguf
import numpy as np
import pytest
import torch

from sidestream import Engine, SamplingParams
from sidestream.assemble import pick_dtype
from sidestream.errors import ConfigError
from sidestream.kernels import cpu
from sidestream.kernels.cpu.decoder import STORED
from sidestream.models.quants import SUPPORTED, dequantize_into

native = cpu.native()
pytestmark = pytest.mark.skipif(native is None, reason="the native extension is not built")
ISAS = native.supported() if native else []

KINDS = {kind.name: kind for kind in SUPPORTED.values()}
INT8, INT4 = 1, 2


def padded(n: int) -> int:
    return (n + 31) // 32 * 32


def stored_matrix(kind: str, outputs: int, cols: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A random matrix as a file stores it, and its values in float32. Blocks hold every integer their type can."""
    rng = np.random.default_rng(seed)
    if kind == "BF16":
        rows = torch.from_numpy(rng.standard_normal((outputs, cols), np.float32)).bfloat16()
        return rows, rows.float()
    blocks = rng.integers(0, 256, (outputs * cols // 32, KINDS[kind].size), np.uint8)
    scales = 4 if kind == "Q4_1" else 2
    blocks[:, :scales] = rng.uniform(0.01, 0.1, (len(blocks), scales // 2)).astype(np.float16).view(np.uint8)
    values = torch.empty(outputs, cols)
    dequantize_into(torch.from_numpy(blocks.reshape(-1)), KINDS[kind], values)
    return torch.from_numpy(blocks), values


def activations(rows: int, cols: int, seed: int = 1) -> torch.Tensor:
    """[rows, cols to 32] bfloat16, with an outlier in each row; zero beyond cols."""
    x = torch.randn(rows, padded(cols), generator=torch.Generator().manual_seed(seed))
    x[:, 3] *= 50
    x[:, cols:] = 0
    return x.bfloat16()


def quantized(x: torch.Tensor, isa: str = "portable") -> tuple[torch.Tensor, ...]:
    rows, cols = x.shape
    groups = cols // 32
    values, offsets = torch.empty(rows, cols, dtype=torch.int8), torch.empty(rows, groups, dtype=torch.int32)
    scales, sums = torch.empty(rows, groups), torch.empty(rows, groups)
    native.quantize(isa, x.data_ptr(), rows, cols, *(each.data_ptr() for each in (values, scales, sums, offsets)))
    return values, scales, sums, offsets


def product(isa: str, packing: int, kind: str, weight: torch.Tensor, outputs: int, cols: int, x: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(x), outputs), torch.nan)
    x = x.contiguous()
    native.matmul(isa, packing, STORED[kind], weight.data_ptr(), outputs, cols, x.data_ptr(), len(x), out.data_ptr())
    return out


def packed_values(packing: int, kind: str, weight: torch.Tensor, outputs: int, cols: int, isa: str = "portable") -> torch.Tensor:
    """The matrix that is computed with, in float32: [outputs, cols to 32]."""
    rows = torch.empty(outputs, padded(cols))
    native.embed(isa, packing, STORED[kind], weight.data_ptr(), outputs, cols, rows.data_ptr())
    return rows


def test_activations_are_rounded_in_groups_of_32(isa):
    x = activations(7, 192)
    x[2, 32:64] = 0
    values, scales, sums, offsets = quantized(x, isa)
    groups = x.float().view(7, 6, 32)
    most = groups.abs().amax(-1)
    torch.testing.assert_close(scales, most / 127)
    want = groups * torch.where(most > 0, 127 / most, 0.0)[..., None]
    assert (values.view(7, 6, 32) - want).abs().max() <= 0.5 + 1e-4
    assert values.view(7, 6, 32)[2, 1].abs().max() == 0 and scales[2, 1] == 0
    assert (values.abs().view(7, 6, 32).amax(-1)[most > 0] == 127).all(), "the whole range is used"
    total = values.view(7, 6, 32).sum(-1, dtype=torch.int32)
    assert torch.equal(offsets, -8 * total)
    assert torch.equal(sums, scales * total)
    for one, other in zip((values, scales, sums, offsets), quantized(x), strict=True):
        assert torch.equal(one, other), "the same bits on every instruction set"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(isa, bad):
    x = activations(2, 64)
    x[1, 40] = bad
    weight, _ = stored_matrix("Q4_1", 32, 64)
    out = product(isa, INT4, "Q4_1", weight, 32, 64, x)
    assert out[0].isfinite().all() and out[1].isnan().all()


@pytest.mark.parametrize(
    ("kind", "packing", "computed"),
    [("Q4_0", INT4, "Q4_0"), ("Q4_1", INT4, "Q4_1"), ("Q8_0", INT8, "Q8_0")],
)
def test_blocks_are_kept(kind, packing, computed, isa):
    weight, values = stored_matrix(kind, 37, 96)
    assert torch.equal(packed_values(packing, kind, weight, 37, 96, isa), values)


@pytest.mark.parametrize("kind", ["BF16", "Q4_0", "Q4_1"])
def test_what_becomes_8_bits_loses_half_a_step_at_most(kind):
    weight, values = stored_matrix(kind, 37, 96)
    got = packed_values(INT8, kind, weight, 37, 96).view(37, 3, 32)
    groups = values.view(37, 3, 32)
    step = groups.abs().amax(-1, keepdim=True) / 127
    assert ((got - groups).abs() <= step * (0.5 + 127 * 2**-11)).all()  # the scale is a half


@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
def test_what_becomes_4_bits_loses_less_than_by_extremes(kind):
    weight, values = stored_matrix(kind, 64, 1024)
    got = packed_values(INT4, kind, weight, 64, 1024)
    by_extremes = torch.from_numpy(
        gguf.quants.dequantize(
            gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType.Q4_1),
            gguf.GGMLQuantizationType.Q4_1,
        )
    )
    ratio = ((got - values).square().sum() / (by_extremes - values).square().sum()).item()
    assert ratio < 0.92


def test_a_constant_group_is_kept_in_4_bits():
    weight = torch.full((32, 64), 0.375, dtype=torch.bfloat16)
    weight[:, 32:] = 0
    assert torch.equal(packed_values(INT4, "BF16", weight, 32, 64), weight.float())


SHAPES = [(1, 32, 1), (2, 64, 33), (5, 96, 32), (7, 576, 70), (13, 1536, 40), (33, 160, 97)]  # rows, cols, outputs


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "BF16"])
@pytest.mark.parametrize("packing", [INT8, INT4])
def test_products_are_those_of_the_rounded_operands(isa, kind, packing):
    shapes = SHAPES + ([(3, 50, 20)] if kind == "BF16" else [])  # files may have such widths
    for rows, cols, outputs in shapes:
        weight, _ = stored_matrix(kind, outputs, cols)
        x = activations(rows, cols)
        values, scales, _, _ = quantized(x)
        rounded = (values.view(rows, -1, 32).double() * scales[..., None].double()).view(rows, -1)
        w = packed_values(packing, kind, weight, outputs, cols).double()
        want, scale = rounded @ w.T, rounded.abs() @ w.abs().T
        got = product(isa, packing, kind, weight, outputs, cols, x)
        assert ((got - want).abs() <= 4e-7 * scale).all(), (rows, cols, outputs)


@pytest.mark.parametrize(("kind", "packing"), [("Q4_0", INT4), ("Q4_1", INT4), ("Q8_0", INT8)])
def test_a_row_has_the_same_bits_in_any_company(isa, kind, packing):
    outputs, cols = 70, 288
    weight, _ = stored_matrix(kind, outputs, cols)
    x = activations(33, cols)
    alone = torch.cat([product(isa, packing, kind, weight, outputs, cols, x[i : i + 1]) for i in range(33)])
    for rows in range(2, 34):
        assert torch.equal(product(isa, packing, kind, weight, outputs, cols, x[:rows]), alone[:rows]), rows
    assert torch.equal(product(isa, packing, kind, weight, outputs, cols, x[11:]), alone[11:])
    many = activations(301, cols)  # more than one block of rows
    together = product(isa, packing, kind, weight, outputs, cols, many)
    for row in [*range(0, 301, 25), 300]:
        assert torch.equal(product(isa, packing, kind, weight, outputs, cols, many[row : row + 1]), together[row : row + 1]), row


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_largest_integers_do_not_overflow(kind):
    """Every product of a group at its extreme: 255 * 127 twice exceeds 16 bits."""
    blocks = np.full((2 * 32, KINDS[kind].size), 0x80 if kind == "Q8_0" else 0xFF, np.uint8)
    blocks[:, : 4 if kind == "Q4_1" else 2] = np.array([1.0, 0.0][: 2 if kind == "Q4_1" else 1], np.float16).view(np.uint8)
    if kind == "Q8_0":
        blocks[32:, 2:] = 127
    weight = torch.from_numpy(blocks)
    x = torch.full((1, 64), 127.0).bfloat16()
    want = torch.tensor([-128.0] * 16 + [127.0] * 16 if kind == "Q8_0" else [15.0] * 32) * 127 * 64
    for isa in ISAS:
        assert torch.equal(product(isa, INT8 if kind == "Q8_0" else INT4, kind, weight, 32, 64, x)[0], want), isa


# In an engine.

PROMPTS = ["The capital of France is", "Once upon a time", "Repeat after me: one two three four five", "Water boils at a temperature of"]


@pytest.fixture(scope="module", params=["w8a8", "w4a8"])
def engine(request, default_model):
    with Engine(str(default_model), quantization=request.param, threads=2, kv_tokens=4096, device="cpu", log_level="warning") as opened:
        yield opened


def test_greedy_text_is_sensible(engine):
    output = engine.generate(PROMPTS[0], SamplingParams(max_new_tokens=1, temperature=0.0))
    assert output.text == " Paris"
    counted = engine.generate("1, 2, 3, 4,", SamplingParams(max_new_tokens=4, temperature=0.0))
    assert counted.text == " 5, "


def test_a_request_has_the_same_bits_alone_and_in_a_batch(engine):
    params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    asked = {"return_hidden_states": True, "hidden_states_layers": [0, 7, -1], "logprob_start_len": 0, "top_logprobs_num": 3}
    together = engine.generate(PROMPTS * 3, params, **asked)
    for prompt, batched in zip(PROMPTS, together, strict=False):
        alone = engine.generate(prompt, params, **asked)
        assert alone.token_ids == batched.token_ids
        assert alone.logprobs == batched.logprobs
        assert torch.equal(alone.hidden_states.data, batched.hidden_states.data)


def test_chunks_and_threads_change_no_bit(default_model, engine):
    prompt, params = list(range(100, 190)), SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
    asked = {"return_hidden_states": True, "logprob_start_len": 0}
    whole = engine.generate(prompt, params, **asked)
    options = {"quantization": engine.config.quantization, "threads": 1, "kv_tokens": 1024, "page_size": 4, "chunked_prefill_size": 7}
    with Engine(str(default_model), device="cpu", log_level="warning", **options) as other:
        pieces = other.generate(prompt, params, **asked)
    assert pieces.token_ids == whole.token_ids and pieces.logprobs == whole.logprobs
    assert torch.equal(pieces.hidden_states.data, whole.hidden_states.data)


def test_the_log_says_what_is_used(default_model, caplog):
    with caplog.at_level(logging.INFO, "sidestream"):
        with Engine(str(default_model), quantization="w4a8", kv_tokens=512, device="cpu"):
            pass
    line = next(message for message in caplog.messages if "native kernels" in message)
    assert line == f"cpu     native kernels ({cpu.isa()}), weights w4a8 (4 bits, activations 8), 97 MB"


# Where it cannot be had.


def test_integer_compute_is_bfloat16_where_the_type_is_left_open():
    assert pick_dtype("auto", torch.device("cpu"), integer=True) == torch.bfloat16
    assert pick_dtype("float32", torch.device("cpu"), integer=True) == torch.float32


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_types_are_refused(dtype):
    message = rf"quantization: got w4a8, must be auto with dtype {dtype}: integer compute is part of the native CPU backend"
    with pytest.raises(ConfigError, match=message):
        Engine("smollm2", quantization="w4a8", dtype=dtype, device="cpu")


def test_other_devices_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"quantization: got w8a8, must be auto with device cuda: integer compute is part of the native"):
        Engine("smollm2", quantization="w8a8", device="cuda")


def test_it_is_refused_without_the_extension(monkeypatch):
    monkeypatch.setattr(cpu, "_native", None)
    with pytest.raises(ConfigError, match=r"quantization: got w8a8, must be auto here: .*, which is not installed"):
        Engine("smollm2", quantization="w8a8", device="cpu")


def test_it_is_refused_for_a_model_the_backend_cannot_run(default_model, monkeypatch):
    monkeypatch.setattr("sidestream.kernels.cpu.decoder.why_not", lambda _: "heads of 7 are not even")
    with pytest.raises(
        ConfigError, match=r"quantization: got w8a8, must be auto for .*: in the native CPU backend heads of 7 are not even"
    ):
        Engine(str(default_model), quantization="w8a8", device="cpu", log_level="warning")
