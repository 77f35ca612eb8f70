from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from sidestream.errors import ModelError
from sidestream.models import llama
from sidestream.models.loader import load_model, read_spec
from sidestream.models.spec import stored_name

CPU = torch.device("cpu")


def edit_json(path: Path, **fields: Any) -> None:
    config = json.loads(path.read_text()) if path.exists() else {}
    config |= fields
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def check_weights(directory: Path, reference: LlamaForCausalLM, dtype: torch.dtype) -> None:
    model = load_model(str(directory), dtype=dtype, device=CPU)
    state = reference.state_dict()
    assert model.weights.keys() == model.spec.weight_shapes().keys()
    for name, weight in model.weights.items():
        assert weight.dtype == dtype and weight.is_contiguous()
        assert torch.equal(weight, state[stored_name(llama.HUGGINGFACE_NAMES, name)].to(dtype)), name
    expected = len(state) - int(reference.config.tie_word_embeddings)
    assert len(model.weights) == expected
    assert model.spec.num_parameters == sum(parameter.numel() for parameter in reference.parameters())


@pytest.mark.parametrize(
    "fields", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}, {"head_dim": 32}], ids=str
)
@pytest.mark.parametrize("shard", ["1GB", "50KB"])
def test_weights_equal_the_state_dict(tmp_path: Path, shard: str, fields: dict[str, Any], save_llama: Any) -> None:
    reference = save_llama(tmp_path, shard=shard, **fields)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "50KB")
    check_weights(tmp_path, reference, torch.float32)


def test_other_dtypes(tmp_path: Path, save_llama: Any) -> None:
    reference = save_llama(tmp_path, dtype=torch.bfloat16)
    check_weights(tmp_path, reference, torch.bfloat16)
    check_weights(tmp_path, reference, torch.float32)
    model = load_model(str(tmp_path), dtype=torch.float32, device=CPU)
    assert model.format == "safetensors bfloat16" and model.name == tmp_path.name and model.path == tmp_path
    assert model.file_bytes == (tmp_path / "model.safetensors").stat().st_size


def test_weights_do_not_alias_the_file(tmp_path: Path, save_llama: Any) -> None:
    save_llama(tmp_path)
    model = load_model(str(tmp_path), dtype=torch.float32, device=CPU)
    weight = model.weights["layers.1.q"]
    before = weight.clone()
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(5000)
        file.write(bytes(100_000))
    assert torch.equal(weight, before)


def test_a_head_in_the_file_of_a_tied_model(tmp_path: Path, save_llama: Any) -> None:
    """As transformers 5: an equal copy is dropped, one that differs is used."""
    save_llama(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    model = load_model(str(tmp_path), dtype=torch.float32, device=CPU)
    assert "lm_head" not in model.weights and model.spec.tie_word_embeddings
    tensors["lm_head.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(str(tmp_path), dtype=torch.float32, device=CPU)
    assert torch.equal(model.weights["lm_head"], tensors["lm_head.weight"]) and not model.spec.tie_word_embeddings
    theirs = LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(theirs.lm_head.weight, model.weights["lm_head"])


def test_ends_of_a_generation(tmp_path: Path, save_llama: Any) -> None:
    save_llama(tmp_path, eos_token_id=3, bos_token_id=4)
    edit_json(
        tmp_path / "generation_config.json",
        eos_token_id=[5, 6, 5],
        bos_token_id=9,
        temperature=0.6,
        top_p=None,
        top_k=20,
        do_sample=True,
    )

    def load() -> Any:
        return load_model(str(tmp_path), dtype=torch.float32, device=CPU)

    model = load()
    assert model.eos_token_ids == (5, 6) and model.bos_token_id == 9 and model.add_bos is None
    assert model.generation_defaults == {"do_sample": True, "temperature": 0.6, "top_k": 20}
    edit_json(tmp_path / "generation_config.json", eos_token_id=11)
    assert load().eos_token_ids == (11,)
    (tmp_path / "generation_config.json").unlink()
    assert load().eos_token_ids == (3,) and load().bos_token_id == 4 and load().generation_defaults == {}
    edit_json(tmp_path / "config.json", eos_token_id=None, bos_token_id=None)
    assert load().eos_token_ids == () and load().bos_token_id is None
    edit_json(tmp_path / "tokenizer_config.json", eos_token={"content": "</s>"}, add_bos_token=False)
    assert load().eos_token_ids == (7,) and load().add_bos is False
    assert load().tokenizer.tokenizer_json == tmp_path / "tokenizer.json" and load().tokenizer.gguf is None
    assert load().tokenizer.tokenizer_config["eos_token"] == {"content": "</s>"}
    edit_json(tmp_path / "config.json", eos_token_id="2")
    with pytest.raises(ModelError, match="eos_token_id: '2'"):
        load()


def test_chat_templates(tmp_path: Path, save_llama: Any) -> None:
    save_llama(tmp_path)

    def template() -> str | None:
        return load_model(str(tmp_path), dtype=torch.float32, device=CPU).chat_template

    assert template() is None
    edit_json(tmp_path / "tokenizer_config.json", chat_template=[{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}])
    assert template() == "d"
    edit_json(tmp_path / "tokenizer_config.json", chat_template="text")
    assert template() == "text"
    edit_json(tmp_path / "chat_template.json", chat_template="own file")
    assert template() == "own file"
    (tmp_path / "chat_template.jinja").write_text("jinja \u00fc", encoding="utf-8")
    assert template() == "jinja \u00fc"
    (tmp_path / "chat_template.jinja").unlink()
    edit_json(tmp_path / "chat_template.json", chat_template=3)
    with pytest.raises(ModelError, match="chat_template is a int"):
        template()


def refused(directory: Path, message: str) -> None:
    with pytest.raises(ModelError, match=f"(?s){message}"):
        load_model(str(directory), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mamba"}, "'mamba'.*Supported architectures: llama"),
        ({"model_type": ...}, "names no architecture"),
        ({"model_type": ["llama"]}, "not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        ({"hidden_act": "relu"}, "'relu'"),
        ({"num_hidden_layers": 3}, r"9 tensors are missing.*model\.layers\.2"),
        ({"num_hidden_layers": 1}, r"9 tensors are not part.*model\.layers\.1"),
        ({"attention_bias": True}, "8 tensors are missing.*k_proj.bias"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_theta"),
        ({"intermediate_size": 97}, r"\[96, 64\].*\[97, 64\]"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_configurations_are_refused(tmp_path: Path, fields: dict[str, Any], message: str, save_llama: Any) -> None:
    save_llama(tmp_path)
    edit_json(tmp_path / "config.json", **fields)
    refused(tmp_path, message)


def test_damaged_directories(tmp_path: Path, save_llama: Any) -> None:
    save_llama(tmp_path, shard="50KB")
    index = tmp_path / "model.safetensors.index.json"
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    whole = shards[0].read_bytes()
    for size in (0, 4, 100, len(whole) - 1):
        shards[0].write_bytes(whole[:size])
        refused(tmp_path, f"{shards[0].name}.*not a complete")
    shards[0].unlink()
    refused(tmp_path, f"{shards[0].name} is missing")
    shards[0].write_bytes(whole)
    weight_map = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map=weight_map | {"x": "../x.safetensors"})
    refused(tmp_path, "'../x.safetensors' is not the name")
    edit_json(index, weight_map=["x"])
    refused(tmp_path, "weight_map")
    index.unlink()
    refused(tmp_path, "neither model.safetensors nor")
    for text in ("{", "[1]", "\udcff"):
        (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        refused(tmp_path, "config.json: (not valid JSON|a JSON object)")
    (tmp_path / "config.json").unlink()
    refused(tmp_path, "neither a config.json nor a .gguf")


def test_a_missing_tokenizer_and_unsupported_types(tmp_path: Path, save_llama: Any) -> None:
    save_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, tmp_path / "model.safetensors")
    assert load_model(str(tmp_path), dtype=torch.float32, device=CPU).spec == read_spec(str(tmp_path))
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float64)
    save_file(tensors, tmp_path / "model.safetensors")
    refused(tmp_path, "model.norm.weight.*F64.*F32, F16, BF16")
    (tmp_path / "tokenizer.json").unlink()
    refused(tmp_path, "tokenizer.json is missing")


def test_a_tokenizer_from_elsewhere(tmp_path: Path, save_llama: Any, default_model: Path) -> None:
    """It takes the place of the model's own, which may then be missing; a path without one is refused before weights are read."""
    save_llama(tmp_path / "model")
    save_llama(tmp_path / "other")
    edit_json(tmp_path / "other" / "tokenizer_config.json", eos_token="</s>")
    (tmp_path / "model" / "tokenizer.json").unlink()
    for name in ("config.json", "generation_config.json"):
        if (tmp_path / "model" / name).exists():
            edit_json(tmp_path / "model" / name, eos_token_id=None)

    def load(tokenizer: Path) -> Any:
        return load_model(str(tmp_path / "model"), dtype=torch.float32, device=CPU, tokenizer=str(tokenizer))

    for given in (tmp_path / "other", tmp_path / "other" / "tokenizer.json"):
        assert load(given).tokenizer.tokenizer_json == tmp_path / "other" / "tokenizer.json"
        assert load(given).eos_token_ids == (7,)
    assert load(default_model).tokenizer.gguf["tokenizer.ggml.model"] == "gpt2"
    assert load(default_model).eos_token_ids == ()
    with pytest.raises(ModelError, match="there is no tokenizer"):
        load(tmp_path / "model")
