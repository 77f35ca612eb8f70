"""The arithmetic of the quality benchmark, and what it does with the answer of a driver that answers at once."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = ("quality", "common", "offline", "install", "protocol")


@pytest.fixture
def quality(monkeypatch):
    """The script as a module, which finds the others by their bare names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "path", [*sys.path])  # it adds the folder of the peers
    import quality

    yield quality
    for name in NAMES:
        sys.modules.pop(name, None)


def driver(work: Path, code: str) -> Path:
    """The interpreter of llama.cpp's environment, which runs this whatever it is given."""
    python = work / "llamacpp" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!{sys.executable}\nimport array, json, sys\n{code}\n")
    python.chmod(0o755)
    return work


def test_nothing_is_lost_against_itself(quality):
    logits = torch.randn(20, 7, generator=torch.Generator().manual_seed(0))
    result = quality.compare(logits + 3.0, logits, [1] * 20)  # a constant changes no distribution
    loss = -logits.double().log_softmax(-1)[:19, 1].mean().item()
    assert result["perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)
    assert result["top1"] == 1
    assert result["kl"] == pytest.approx(0, abs=1e-10)


def test_the_measures_of_known_distributions(quality):
    reference = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6], [1.0, 1.0, 1.0]]).log()
    logits = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.2, 0.6], [9.0, 0.1, 0.2]]).log()
    result = quality.compare(logits, reference, [0, 1, 2])  # the last row predicts nothing that is known
    assert result["perplexity"] == pytest.approx(math.sqrt(1 / (0.5 * 0.6)))
    assert result["top1"] == 0.5
    first = 0.25 * math.log(2)  # 0.5 ln(0.5 / 0.25) + 0.25 ln(0.25 / 0.5)
    assert result["kl"] == pytest.approx(first / 2)
    assert result["kl_error"] == pytest.approx(first / 2)  # of [first, 0]: a deviation of first / sqrt(2), over sqrt(2)


def test_every_token_of_the_vocabulary_is_as_likely(quality):
    tokens, vocabulary = 600, 5  # more than the rows of one slice, and no multiple of them
    result = quality.compare(torch.zeros(tokens, vocabulary), torch.tensor([[0.0, 0, 0, 0, 9]]).expand(tokens, -1), [3] * tokens)
    assert result["perplexity"] == pytest.approx(vocabulary)
    assert result["top1"] == 0
    certain = torch.tensor([0.0, 0, 0, 0, 9]).double().softmax(0)
    assert result["kl"] == pytest.approx(float((certain * (certain * vocabulary).log()).sum()))
    assert result["kl_error"] == pytest.approx(0, abs=1e-12)


def test_logits_of_a_driver(quality):
    values = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert torch.equal(quality.logits_of(values.numpy().tobytes(), 2), values)


@pytest.mark.parametrize("size", [0, 20])
def test_logits_that_are_cut_off(quality, size):
    with pytest.raises(ValueError, match=f"got {size} bytes of logits, must be a multiple of 4 bytes for each of 2 tokens"):
        quality.logits_of(b"x" * size, 2)


def test_the_driver_gets_the_token_ids(quality, tmp_path):
    code = "for id in json.load(sys.stdin): array.array('f', [id, -id]).tofile(sys.stdout.buffer)\nprint('noise', file=sys.stderr)"
    logits = quality.run_llamacpp(driver(tmp_path, code), "q4_0", [5, 7, 11])
    assert torch.equal(logits, torch.tensor([[5.0, -5], [7, -7], [11, -11]]))
    assert (tmp_path / "logs" / "logits-llamacpp-q4_0.log").read_text() == "noise\n"


def test_a_driver_that_fails(quality, tmp_path):
    with pytest.raises(RuntimeError, match=r"the driver of llama.cpp ended with status 3; .*logits-llamacpp-q4_1.log says why"):
        quality.run_llamacpp(driver(tmp_path, "sys.exit(3)"), "q4_1", [5])


def test_both_engines_read_the_same_file(quality, tmp_path):
    calls = []
    quality.run = lambda *words: calls.append(words)
    quality.run_llamacpp = lambda *words: calls.append(words)
    for format, modes in quality.MODES.items():
        file = str(tmp_path / "models" / f"{format}.gguf")
        assert quality.source(format, tmp_path) == file
        runs = quality.variants([5], format, tmp_path)
        for name in list(runs)[: len(modes) + 1]:
            runs[name]()
        assert calls == [*(([5], torch.bfloat16, mode, file) for mode in modes), (tmp_path, format, [5])]
        calls.clear()


def test_without_llamacpp_there_is_the_default_file(quality):
    names = list(quality.variants([5], quality.DEFAULT_FORMAT, None))
    assert names[:4] == ["auto (bfloat16)", "w8a8", "w4a8", "transformers, bfloat16"]
    assert quality.source(quality.DEFAULT_FORMAT, None) == "smollm2"


def test_llamacpp_that_is_not_installed(quality, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quality.py", "--llamacpp", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        quality.main()
    hint = f"argument --llamacpp: llama.cpp is not installed in {tmp_path}. Run peers/install.py --peers llamacpp --work {tmp_path}"
    assert hint in capsys.readouterr().err
