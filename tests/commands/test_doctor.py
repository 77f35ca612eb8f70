from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import sidestream
from sidestream import cli
from sidestream.config import declared_options
from sidestream.doctor import found
from sidestream.engine import sizing
from sidestream.kernels import cpu
from sidestream.models import hub

needs_native = pytest.mark.skipif(cpu.native() is None, reason="the native backend is not built")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for field in declared_options():
        monkeypatch.delenv(field.variable, raising=False)
    for name in found.SECRETS:
        monkeypatch.delenv(name, raising=False)


def report(capsys, *words, status=0):
    assert cli.main(["doctor", "--json", *words]) == status
    return json.loads(capsys.readouterr().out)


@needs_native
def test_what_would_be_picked(default_model, capsys, monkeypatch):
    monkeypatch.setattr(sizing, "available_memory", lambda: 2**30)
    monkeypatch.setenv("SIDESTREAM_THREADS", "1")
    value = report(capsys, "--device", "cpu", "--dtype", "bfloat16", "--context-length", "4096", "--port", "8000")
    assert sorted(value) == ["configured", "found", "picked", "problems"]
    assert value["found"]["sidestream"]["version"] == sidestream.__version__
    assert value["found"]["torch"]["version"] == torch.__version__
    assert value["found"]["native"]["instruction_set"] == cpu.isa()
    assert value["found"]["processor"]["cores"] >= 1
    assert value["found"]["cache"]["files"][default_model.name] == 98_362_432
    model = value["found"]["model"]
    assert (model["name"], model["path"], model["format"]) == ("smollm2", str(default_model), "GGUF Q4_1")
    assert (model["parameters"], model["max_position"], model["chat_template"]) == (134_515_008, 8192, True)
    assert value["configured"] == {
        "context_length": {"value": 4096, "from": "the command line"},
        "device": {"value": "cpu", "from": "the command line"},
        "dtype": {"value": "bfloat16", "from": "the command line"},
        "port": {"value": 8000, "from": "the command line"},
        "threads": {"value": 1, "from": "SIDESTREAM_THREADS"},
    }
    picked = value["picked"]
    assert picked["device"] == {"value": "cpu", "why": "as the command line says"}
    assert picked["dtype"] == {"value": "bfloat16", "why": "as the command line says"}
    assert picked["backend"] == {"value": "native", "why": f"{cpu.isa()} kernels, weights as stored"}
    assert picked["threads"] == {"value": 1, "why": "as SIDESTREAM_THREADS says"}
    assert picked["overlap"]["value"] is False
    # Half of what the weights leave, in whole pages of 16 positions.
    tokens = (2**30 - 98_362_432) // 2 // 23_040 // 16 * 16
    assert picked["kv_cache"]["tokens"] == tokens
    assert picked["kv_cache"]["bytes_per_token"] == 2 * 30 * 3 * 64 * 2
    assert picked["context"] == {"value": 4096, "why": "as the command line says"}
    assert picked["batch"] == {"max_running_requests": 256, "chunked_prefill_size": 512}
    assert picked["address"] == {"address": "http://127.0.0.1:8000", "keys": False}


def test_the_text_has_every_fact(default_model, capsys):
    value = report(capsys, "--dtype", "float32", "--kv-tokens", "1000", "--device", "cpu")
    assert value["picked"]["backend"]["value"] == "PyTorch"
    assert value["picked"]["context"]["value"] == 992
    assert value["picked"]["context"]["why"].startswith("the KV cache holds no more, of 8,192 that were wanted")
    assert cli.main(["doctor", "--dtype", "float32", "--kv-tokens", "1000", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    names = [name.replace("_", " ") for section in ("found", "picked") for name in value[section]]
    lines = [line.strip() for line in text.splitlines()]
    assert all(any(line.startswith(name) for line in lines) for name in names)
    assert "kv_tokens     1000 (the command line)" in lines
    assert max(map(len, text.splitlines())) <= 132


def test_no_weight_is_read_and_nothing_is_fetched(default_model, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sidestream.models.gguf.GGUFFile.read_into", pytest.fail)
    monkeypatch.setattr(hub, "pull", pytest.fail)
    assert report(capsys)["found"]["model"]["path"] == str(default_model)
    monkeypatch.setenv("SIDESTREAM_CACHE", str(tmp_path))
    value = report(capsys)
    assert value["found"]["model"] == {"name": "smollm2", "path": None}
    assert value["found"]["cache"] == {"path": str(tmp_path), "files": {}}
    assert "kv_cache" not in value["picked"]
    assert cli.main(["doctor"]) == 0
    assert "sidestream pull smollm2" in capsys.readouterr().out


def test_a_repository_of_the_hub(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert report(capsys, "some/model")["found"]["model"] == {"name": "some/model", "path": None}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    value = report(capsys, "some/model", status=1)
    assert value["problems"][-1] == "model some/model: it is not here, and HF_HUB_OFFLINE is set. Unset it, or give a local path."


def test_a_model_that_cannot_be_had(capsys):
    value = report(capsys, "/nowhere/m.gguf", "--device", "cpu", status=1)
    problem = (
        "model '/nowhere/m.gguf': there is no such file or directory. Give a .gguf file, a Hugging Face directory, repo/name, or one of"
    )
    assert value["problems"][-1].startswith(problem)
    assert value["picked"]["device"]["value"] == "cpu"
    report(capsys, "smollm2", "--tokenizer", "/nowhere", status=1)


def test_without_the_native_kernels(default_model, capsys, monkeypatch):
    monkeypatch.setattr(cpu, "_native", None)
    monkeypatch.setattr(cpu, "WHY_NOT", "No module named '_native'")
    value = report(capsys, "--device", "cpu", "--dtype", "bfloat16")
    assert value["found"]["native"] == {"installed": False, "why_not": "No module named '_native'"}
    assert value["picked"]["backend"] == {"value": "PyTorch", "why": "not the native kernels: it is not installed"}
    assert any(problem.startswith("native: the CPU kernels are not installed (No module named '_native')") for problem in value["problems"])


def test_what_is_configured_wrongly_is_a_problem(default_model, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("SIDESTREAM_PORT", "http")
    monkeypatch.setenv("SIDESTREAM_THREADS", "100000")
    monkeypatch.setenv("SIDESTREAM_PAGESISE", "8")
    monkeypatch.setenv("SIDESTREAM_API_KEY", "hush")
    monkeypatch.setenv("HF_TOKEN", "hush")
    value = report(capsys, "--device", "cpu")
    problems = "\n".join(value["problems"])
    assert "SIDESTREAM_PORT: got 'http', must be an integer between 0 and 65535" in problems
    assert "SIDESTREAM_PAGESISE: there is no such variable. Did you mean SIDESTREAM_PAGE_SIZE?" in problems
    assert "threads: got 100000, must be at most" in problems
    assert (value["found"]["variables"]["SIDESTREAM_API_KEY"], value["found"]["variables"]["HF_TOKEN"]) == ("***", "***")
    assert value["configured"]["api_key"] == {"value": "***", "from": "SIDESTREAM_API_KEY"}
    monkeypatch.setenv("SIDESTREAM_CONFIG", str(tmp_path / "none.toml"))
    assert "config: " in "\n".join(report(capsys)["problems"])
    assert cli.main(["doctor", "--page-size", "3"]) == 2


def test_a_bad_instruction_set(default_model, capsys, monkeypatch):
    monkeypatch.setenv("SIDESTREAM_CPU_ISA", "neon2")
    if cpu.native() is not None:
        assert "SIDESTREAM_CPU_ISA: got 'neon2', this processor can run" in "\n".join(report(capsys)["problems"])


def test_packages_that_are_missing_or_of_another_version(default_model, capsys, monkeypatch):
    lines = [
        "numpy>=1.26",
        "torch<2.0,>=1.0",
        "no-such-package>=1",
        'no-such-extra>=2; extra == "chat"',
        'sidestream[progress]; extra == "cli"',
        'mypy; extra == "test"',
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    value = report(capsys)
    assert value["found"]["packages"] == {
        "numpy": metadata.version("numpy"),
        "torch": metadata.version("torch"),
        "no-such-package": None,
        "no-such-extra": None,
    }
    assert f"packages: torch {metadata.version('torch')} is installed, sidestream needs torch<2.0,>=1.0" in value["problems"][-2]
    assert value["problems"][-1].startswith("packages: no-such-package is not installed, sidestream needs no-such-package>=1")
    assert cli.main(["doctor"]) == 0
    assert "not installed: no-such-extra (sidestream[chat])" in " ".join(capsys.readouterr().out.split())


def test_a_gpu_that_torch_does_not_see(default_model, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(found, "DRIVER", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "cuda: there is an NVIDIA GPU, but this torch is a build without CUDA." in "\n".join(report(capsys)["problems"])


def test_a_gpu(default_model, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (60 * 10**9, 100 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H")
    value = report(capsys)
    assert value["found"]["cuda"] == [{"name": "H", "capability": "9.0", "total_bytes": 100 * 10**9, "free_bytes": 60 * 10**9}]
    assert (value["picked"]["device"]["value"], value["picked"]["dtype"]["value"]) == ("cuda", "bfloat16")
    assert value["picked"]["overlap"]["value"] is True
    # The weights, not loaded yet, in bfloat16: 85 % of the memory is for them, others' 40 GB and the cache.
    budget = 60 * 10**9 - 2 * 134_515_008 - 0.15 * 100 * 10**9
    assert value["picked"]["kv_cache"]["bytes"] == pytest.approx(budget, abs=16 * 23_040)


def test_without_torch_there_is_still_a_report():
    code = "import sys; sys.modules['torch'] = None; from sidestream import cli; print(cli.main(['doctor', '--json']))"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    line, status = finished.stdout.splitlines()
    value = json.loads(line)
    assert status == "1"
    assert value["found"]["torch"]["error"].startswith("ModuleNotFoundError")
    assert value["found"]["python"]["executable"] == sys.executable
    assert any(problem.startswith("an engine cannot be started here: ModuleNotFoundError") for problem in value["problems"])


def test_flags_of_the_processor(monkeypatch):
    assert all(isinstance(flag, str) for flag in found._flags())
    monkeypatch.setattr(Path, "read_text", lambda self: "flags : fpu avx2 amx_tile fma\n")
    assert found._flags() == ["avx2", "amx_tile", "fma"]
