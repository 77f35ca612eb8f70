from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.errors import ModelError
from sidestream.models import llama
from sidestream.models.gguf import open_gguf
from sidestream.models.loader import load_model, read_spec
from sidestream.models.rope import rope_from_config, rope_table

CPU = torch.device("cpu")
HEADS, KV_HEADS, LAYERS, VOCAB = 4, 2, 2, 40  # of the models that conftest.py writes
KINDS = [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1]
CANONICAL = {stored: name for name, stored in llama.GGUF_NAMES.items()}


def canonical(stored: str) -> str:
    if not stored.startswith("blk."):
        return CANONICAL[stored]
    _, layer, rest = stored.split(".", 2)
    return CANONICAL["blk.{i}." + rest].replace("{i}", layer)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_type_loads_bit_for_bit(tmp_path: Path, kind: Type, write_gguf: Any, llama_tensors: Any) -> None:
    path = tmp_path / "m.gguf"
    expected = write_gguf(path, llama_tensors(tied=False, bias=True), kind=kind)
    model = load_model(str(path), dtype=torch.float32, device=CPU)
    assert model.format == f"GGUF {kind.name}" and model.name == "m" and model.file_bytes == path.stat().st_size
    assert not model.spec.tie_word_embeddings and model.spec.qkv_bias and model.spec.o_bias and not model.spec.mlp_bias
    assert model.weights.keys() == {canonical(name) for name in expected} == model.spec.weight_shapes().keys()
    for name, values in expected.items():
        ours = model.weights[canonical(name)]
        assert ours.is_contiguous() and ours.numpy().tobytes() == values.tobytes(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_the_rounded_float32(tmp_path: Path, dtype: torch.dtype, write_gguf: Any, llama_tensors: Any) -> None:
    expected = write_gguf(tmp_path / "m.gguf", llama_tensors(), kind=Type.Q4_1)
    weights = load_model(str(tmp_path / "m.gguf"), dtype=dtype, device=CPU).weights
    for name, values in expected.items():
        assert torch.equal(weights[canonical(name)], torch.from_numpy(values).to(dtype)), name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_random_bytes_dequantize_bit_for_bit(kind: Type) -> None:
    """More blocks than one chunk, each pattern of bits including infinities and NaN as scales."""
    from sidestream.models.quants import CHUNK_BLOCKS, SUPPORTED, dequantize_into

    quant = SUPPORTED[kind]
    rows = 2 * CHUNK_BLOCKS + 7
    raw = np.random.default_rng(1).integers(0, 256, (rows, quant.size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(raw, kind)
    got = torch.empty(rows, quant.block)
    dequantize_into(torch.from_numpy(raw), quant, got)
    np.testing.assert_array_equal(got.numpy(), want)  # NaN where NaN


def test_metadata_equals_the_reference_reader(tmp_path: Path, write_gguf: Any, llama_tensors: Any) -> None:
    path = tmp_path / "m.gguf"
    extra = {
        "a.bool": True,
        "a.floats": [0.5, -1.25],
        "a.bools": [True, False],
        "a.text": "gr\u00fc\u00df dich",
        "a.texts": ["", "\u0120t"],
    }
    write_gguf(path, llama_tensors(), kind=Type.Q8_0, metadata=extra)
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    want = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == want
    assert [type(value) for value in ours.metadata.values()] == [type(value) for value in want.values()]
    assert {(t.name, t.type_id, t.shape, t.offset, t.num_bytes) for t in ours.tensors.values()} == {
        (t.name, t.tensor_type.value, tuple(t.shape.tolist()[::-1]), t.data_offset, t.n_bytes) for t in theirs.tensors
    }


def test_tokenizer_and_generation_data(tmp_path: Path, write_gguf: Any, llama_tensors: Any, tiny_llama: Path) -> None:
    metadata = {
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.eom_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ 1 }}",
        "general.sampling.temp": 0.5,
    }
    write_gguf(tmp_path / "m.gguf", llama_tensors(), metadata=metadata)
    model = load_model(str(tmp_path / "m.gguf"), dtype=torch.float32, device=CPU)
    assert model.eos_token_ids == (2, 5) and model.bos_token_id == 1 and model.add_bos is True
    assert model.chat_template == "{{ 1 }}" and model.generation_defaults == {"temperature": 0.5}
    assert model.tokenizer.tokenizer_json is None and model.tokenizer.tokenizer_config == {}
    assert model.tokenizer.gguf is not None and all(key.startswith("tokenizer.") for key in model.tokenizer.gguf)
    assert model.tokenizer.gguf["tokenizer.ggml.tokens"] == [f"t{i}" for i in range(VOCAB)]
    other = load_model(str(tmp_path / "m.gguf"), dtype=torch.float32, device=CPU, tokenizer=str(tiny_llama))
    assert other.tokenizer.tokenizer_json == tiny_llama / "tokenizer.json" and other.tokenizer.gguf is None
    assert other.eos_token_ids == (2, 5) and other.chat_template == "{{ 1 }}"


def test_spec_without_optional_keys(tmp_path: Path, write_gguf: Any, llama_tensors: Any) -> None:
    optional = ("llama.vocab_size", "llama.rope.freq_base", "llama.attention.head_count_kv", "llama.rope.dimension_count")
    tensors = llama_tensors()
    for i in range(LAYERS):
        for name in ("attn_k", "attn_v"):
            tensors[f"blk.{i}.{name}.weight"] = tensors[f"blk.{i}.attn_q.weight"]
    write_gguf(tmp_path / "m.gguf", tensors, without=optional)
    spec = read_spec(str(tmp_path / "m.gguf"))
    assert (spec.vocab_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rope.theta) == (
        VOCAB,
        HEADS,
        HEADS,
        16,
        10000.0,
    )
    assert spec.tie_word_embeddings and KV_HEADS != HEADS


def test_rope_scaling_keys(tmp_path: Path, write_gguf: Any, llama_tensors: Any) -> None:
    scaling = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
    }
    write_gguf(tmp_path / "m.gguf", llama_tensors(), metadata=scaling)
    want = rope_from_config({"max_position_embeddings": 128, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}, 16)  # fmt: skip
    assert read_spec(str(tmp_path / "m.gguf")).rope == want


def test_rope_freqs_equal_transformers_llama3(tmp_path: Path, write_gguf: Any, llama_tensors: Any) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    reference = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=128, rope_scaling=scaling))
    factors = []
    for exponent in np.arange(0, 16, 2) / 16:  # the formula of convert_hf_to_gguf.py
        wavelength = 2 * np.pi * 10000.0**exponent
        smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
        factors.append(1 if wavelength < 64 / 4 else 8.0 if wavelength > 64 else 1 / ((1 - smooth) / 8.0 + smooth))
    write_gguf(tmp_path / "m.gguf", llama_tensors() | {"rope_freqs.weight": np.array(factors, dtype=np.float32)})
    model = load_model(str(tmp_path / "m.gguf"), dtype=torch.float32, device=CPU)
    assert model.spec.rope.divisors is not None and "rope_freqs.weight" not in model.weights
    cos, sin = reference(torch.zeros(1), torch.arange(128)[None])
    for ours, theirs in zip(rope_table(model.spec.rope, 128), (cos, sin), strict=True):
        torch.testing.assert_close(ours, theirs[0, :, :8], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "falcon"}, "'falcon'.*\n.*llama"),
        ({"without": ("llama.block_count",)}, "llama.block_count"),
        ({"metadata": {"llama.expert_count": 8}}, "8 experts"),
        ({"metadata": {"split.count": 3}}, "split"),
        ({"metadata": {"llama.attention.key_length": 32}}, "rotating 16 of 32"),
        ({"metadata": {"llama.attention.head_count": [4, 4]}}, "num_attention_heads"),
        ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "'longrope'"),
        ({"metadata": {"llama.vocab_size": 41}}, r"token_embd.*\[40, 64\].*\[41, 64\]"),
        ({"metadata": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 0.5}}, "attn_factor"),
        ({"metadata": {"tokenizer.ggml.eos_token_id": "x"}}, "eos_token_id"),
    ],
)
def test_unsupported_files_are_refused(tmp_path: Path, change: dict, message: str, write_gguf: Any, llama_tensors: Any) -> None:  # type: ignore[type-arg]
    write_gguf(tmp_path / "m.gguf", llama_tensors(), **change)
    with pytest.raises(ModelError, match=f"(?s){message}"):
        load_model(str(tmp_path / "m.gguf"), dtype=torch.float32, device=CPU)


def test_missing_and_extra_tensors_are_named(tmp_path: Path, write_gguf: Any, llama_tensors: Any) -> None:
    tensors = llama_tensors()
    write_gguf(tmp_path / "extra.gguf", tensors | {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)})
    with pytest.raises(ModelError, match=r"1 tensors are not part.*attn_q_norm"):
        load_model(str(tmp_path / "extra.gguf"), dtype=torch.float32, device=CPU)
    del tensors["blk.1.ffn_up.weight"]
    write_gguf(tmp_path / "missing.gguf", tensors)
    with pytest.raises(ModelError, match=r"1 tensors are missing.*blk\.1\.ffn_up\.weight"):
        load_model(str(tmp_path / "missing.gguf"), dtype=torch.float32, device=CPU)


def test_an_unsupported_type_is_named(tmp_path: Path, write_gguf: Any, llama_tensors: Any) -> None:
    write_gguf(tmp_path / "m.gguf", llama_tensors(), kind=Type.Q5_0)
    with pytest.raises(ModelError, match=r"Q5_0.*\n.*F32, F16, BF16, Q8_0, Q4_0, Q4_1") as caught:
        load_model(str(tmp_path / "m.gguf"), dtype=torch.float32, device=CPU)
    assert "weight" in caught.value.message


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, write_gguf: Any, llama_tensors: Any) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, llama_tensors(), kind=Type.Q4_0)
    return path.read_bytes()


def test_every_truncation_is_an_error(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(small)
    header = min(tensor.offset for tensor in open_gguf(path).tensors.values())
    last = max(tensor.offset + (tensor.num_bytes or 0) for tensor in open_gguf(path).tensors.values())
    for size in [*range(0, header, 7), header, (header + last) // 2, last - 1]:
        path.write_bytes(small[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            open_gguf(path)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_headers_fail_cleanly_or_load(small: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    damaged = bytearray(small)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, 3000))
        damaged[at : at + 8] = data.draw(st.sampled_from([b"\xff" * 8, bytes(8), struct.pack("<Q", 1 << 40), b"\x7f" * 4, b"\x01\xfe"]))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged)
    with contextlib.suppress(ModelError):
        load_model(str(path), dtype=torch.float32, device=CPU)


def header(*, version: int = 3, tensors: int = 0, keys: int = 0, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + body


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"PK\x03\x04 a zip file", "not 'GGUF'"),
        (header(version=1), "version 1"),
        (header(version=0x03000000), "big-endian"),
        (header(tensors=2**63), "9223372036854775808 tensors"),
        (header(keys=2**40), "metadata keys"),
        (header(keys=1, body=struct.pack("<Q", 2**62) + bytes(64)), "ends inside its header"),
        (header(keys=1, body=text(b"k") + struct.pack("<IIQ", 9, 8, 2**61)), "array elements"),
        (header(keys=1, body=text(b"k") + struct.pack("<IIQ", 9, 10, 8) + bytes(16)), "ends inside its header"),
        (header(keys=1, body=text(b"k") + struct.pack("<IIQ", 9, 9, 1) + bytes(64)), "value type 9"),
        (header(keys=1, body=text(b"k") + struct.pack("<I", 77) + bytes(64)), "value type 77"),
        (header(keys=1, body=text(b"\xff\xfe") + struct.pack("<IB", 0, 1)), "UTF-8"),
        (header(keys=2, body=2 * (text(b"k") + struct.pack("<IB", 0, 1))), "twice"),
        (header(tensors=1, body=text(b"t") + struct.pack("<I", 2**31) + bytes(64)), "dimensions"),
        (header(tensors=1, body=text(b"t") + struct.pack("<IQIQ", 1, 2**60, 0, 0)), "cut short"),
        (header(tensors=1, body=text(b"t") + struct.pack("<IQIQ", 1, 0, 0, 2**63)), "cut short"),
        (header(tensors=1, body=text(b"t") + struct.pack("<IQIQ", 1, 33, 2, 0) + bytes(64)), "blocks of 32"),
        (header(tensors=1, body=text(b"t") + struct.pack("<IQIQ", 1, 1, 0, 1) + bytes(64)), "multiple of 32"),
        (header(tensors=2, body=2 * (text(b"t") + struct.pack("<IQIQ", 1, 1, 0, 0)) + bytes(64)), "twice"),
        (header(keys=1, body=text(b"general.alignment") + struct.pack("<II", 4, 3)), "alignment"),
    ],
)
def test_hostile_headers(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        open_gguf(path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        open_gguf(tmp_path / "none.gguf")
