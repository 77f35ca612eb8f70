from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream.errors import DownloadError, ModelError
from sidestream.models import hub
from sidestream.models.gguf import open_gguf
from sidestream.models.loader import LoadedModel, load_model, read_spec, resolve_model

CPU = torch.device("cpu")


def test_forms_of_a_model(tmp_path: Path, write_gguf: Any, llama_tensors: Any) -> None:
    path = tmp_path / "one.gguf"
    write_gguf(path, llama_tensors())
    assert resolve_model(str(path)) == path == resolve_model(str(tmp_path))
    write_gguf(tmp_path / "two.gguf", llama_tensors())
    with pytest.raises(ModelError, match=r"2 GGUF files: one\.gguf, two\.gguf"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


NOWHERE = [
    "nothing",
    "./nothing",
    "/nothing/there",
    "a/b/c",
    "nothing/there.gguf",
    "",
    "~/nothing/here",
    "..\\x",
    "x" * 5000,
    "~nobody-here/x",
]


@pytest.mark.parametrize("model", NOWHERE)
def test_what_does_not_exist(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    with pytest.raises(ModelError, match=r"there is no such file or directory\n.*smollm2"):
        resolve_model(model)


def test_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither a config\.json nor a \.gguf"):
        resolve_model(str(tmp_path))


def test_weights_alone_are_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="Give the directory"):
        load_model(str(tmp_path / "model.safetensors"), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("name", ["m.gguf", "m"])
def test_a_local_path_opens_no_socket(tmp_path: Path, name: str, write_gguf: Any, llama_tensors: Any, save_llama: Any) -> None:
    """In a process of its own, because this one has imported half the world."""
    if name == "m.gguf":
        write_gguf(tmp_path / name, llama_tensors())
    else:
        save_llama(tmp_path / name)
    program = (
        "import socket, sys\n"
        "def refuse(*args, **kwargs): raise AssertionError('a socket was opened')\n"
        "socket.socket.__init__ = socket.create_connection = socket.getaddrinfo = refuse\n"
        "import torch\n"
        "from sidestream.models.loader import load_model\n"
        "model = load_model(sys.argv[1], dtype=torch.float32, device=torch.device('cpu'))\n"
        "assert model.name == 'm', model.name\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} "
        "& {'huggingface_hub', 'transformers', 'gguf', 'requests', 'rich'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_repositories_go_through_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    calls: list[tuple[str, Any]] = []

    def fake(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((repo, revision))
        if repo == "some/gone":
            raise OSError("404: no such repository\nlong explanation")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    monkeypatch.setattr(socket, "socket", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model("some/model") == tmp_path == resolve_model("some/model@v1.0")
    assert calls == [("some/model", None), ("some/model", "v1.0")]
    with pytest.raises(DownloadError, match="some/gone: cannot be fetched: 404: no such repository\n"):
        resolve_model("some/gone")


@pytest.fixture(scope="module")
def default_model() -> LoadedModel:
    return load_model("smollm2", dtype=torch.float32, device=CPU)


def test_default_model(default_model: LoadedModel) -> None:
    spec = default_model.spec
    assert (spec.model_type, spec.num_layers, spec.hidden_size, spec.intermediate_size) == ("llama", 30, 576, 1536)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (9, 3, 64, 49152)
    assert spec.tie_word_embeddings and spec.max_position == 8192 and spec.rope.theta == 100000.0 and spec.rope.scaling == "none"
    assert spec.num_parameters == 134_515_008 and spec.kv_bytes_per_token(2) == 23_040
    assert (default_model.name, default_model.format, default_model.file_bytes) == ("smollm2", "GGUF Q4_1", 98_362_432)
    assert (default_model.eos_token_ids, default_model.bos_token_id, default_model.add_bos) == ((2,), 1, False)
    assert default_model.chat_template is not None and "<|im_start|>system" in default_model.chat_template
    gguf = default_model.tokenizer.gguf
    assert gguf is not None and len(gguf["tokenizer.ggml.tokens"]) == 49152 and len(gguf["tokenizer.ggml.merges"]) == 48900
    assert read_spec("smollm2") == spec


def test_default_model_equals_transformers(default_model: LoadedModel) -> None:
    from transformers import AutoModelForCausalLM

    path = default_model.path
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).state_dict()
    layer = "model.layers.{}.{}.weight"
    pairs = {
        "embed": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "layers.0.q": layer.format(0, "self_attn.q_proj"),
        "layers.29.k": layer.format(29, "self_attn.k_proj"),
        "layers.7.v": layer.format(7, "self_attn.v_proj"),
        "layers.13.o": layer.format(13, "self_attn.o_proj"),
        "layers.3.down": layer.format(3, "mlp.down_proj"),
        "layers.3.gate": layer.format(3, "mlp.gate_proj"),
        "layers.5.mlp_norm": layer.format(5, "post_attention_layernorm"),
    }
    for ours, name in pairs.items():
        assert torch.equal(default_model.weights[ours], theirs[name]), ours


def test_default_header_equals_the_reference_reader(default_model: LoadedModel) -> None:
    import gguf

    reader = gguf.GGUFReader(default_model.path)
    ours = open_gguf(default_model.path)
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type", "llama.rope.freq_base"):
        assert ours.metadata[key] == reader.fields[key].contents()
    assert {t.name: t.offset for t in ours.tensors.values()} == {t.name: t.data_offset for t in reader.tensors}


def test_the_alias_is_known() -> None:
    assert hub.ALIASES["smollm2"].file_name.endswith(".gguf")
