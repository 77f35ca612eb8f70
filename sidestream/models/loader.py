"""From the name of a model to weights in memory: `load_model`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sidestream.errors import ModelError
from sidestream.models import hub, llama
from sidestream.models import huggingface as hf
from sidestream.models.gguf import GGUFFile, open_gguf
from sidestream.models.spec import Architecture, DecoderSpec, stored_name, weight_kind

# HF's `model_type`, and GGUF's `general.architecture`, which spells these the same.
ARCHITECTURES: Mapping[str, Architecture] = {"llama": llama}

# Tables that older writers stored beside the weights; they follow from the configuration.
HARMLESS = re.compile(r".*\brotary_emb\.inv_freq|rope_freqs\.weight|blk\.\d+\.(attn_rot_embd|rope_freqs)\.weight")

# `eot` ends a turn and `eom` a message that expects a tool's answer: both end a generation as `eos` does.
GGUF_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
GGUF_SAMPLING_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


@dataclass(frozen=True)
class TokenizerSource:
    """Raw data for `text/tokenizer.py`; exactly one of the first two is set."""

    tokenizer_json: Path | None
    gguf: Mapping[str, Any] | None  # the `tokenizer.*` metadata as plain values
    tokenizer_config: Mapping[str, Any]  # tokenizer_config.json, {} without one


@dataclass(frozen=True)
class LoadedModel:
    """A model, checked completely; its weights are read one by one, by whoever keeps them."""

    name: str
    path: Path
    format: str  # "GGUF Q4_1", "safetensors bfloat16"
    file_bytes: int
    spec: DecoderSpec
    weights: Weights
    tokenizer: TokenizerSource
    chat_template: str | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos: bool | None  # None: the files do not say
    generation_defaults: Mapping[str, Any]


class QuantizedWeight(NamedTuple):
    """A matrix in the blocks of a GGUF file: [out, bytes of a row] uint8, its rows in the order of the computation."""

    type: str  # "Q4_0", "Q4_1" or "Q8_0"
    blocks: Tensor
    shape: tuple[int, ...]  # [out, in]


class _Source(Protocol):
    """What the two file formats have in common."""

    path: Path
    file_bytes: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...
    @property
    def format(self) -> str: ...
    def check_type(self, name: str) -> None: ...
    def read_into(self, name: str, out: Tensor, *, interleaved_heads: int | None = None) -> None: ...


class Weights(Mapping[str, Tensor]):
    """The weights of a model by the canonical names of `DecoderSpec.weight_shapes`. Names, shapes and types are checked here, the data is
    read at each access, so that a model is never in memory twice.

    `weights[name]` is a contiguous tensor of one dtype on one device, and the caller's own.
    """

    def __init__(
        self,
        source: _Source,
        names: Mapping[str, str],
        interleaved: frozenset[str],
        spec: DecoderSpec,
        dtype: torch.dtype,
        device: torch.device,
        ignored: set[str],
    ) -> None:
        self._source, self._spec, self._dtype, self._device, self._interleaved = source, spec, dtype, device, interleaved
        self._shapes = spec.weight_shapes()
        self._stored = {name: stored_name(names, name) for name in self._shapes}
        _check_names(source, set(self._stored.values()), ignored)
        for name, shape in self._shapes.items():
            stored = self._stored[name]
            if source.shapes[stored] != shape:
                found = list(source.shapes[stored])
                raise ModelError(f"{source.path}: tensor {stored!r} has shape {found}, the configuration says {list(shape)}")
            source.check_type(stored)

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name, self._dtype)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """The weight in another dtype than the model's."""
        out = torch.empty(self._shapes[name], dtype=dtype, device=self._device)
        self._source.read_into(self._stored[name], out, interleaved_heads=self._heads(name))
        return out

    def __contains__(self, name: object) -> bool:  # without reading it
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def quantized(self, name: str) -> QuantizedWeight | None:
        """The matrix as the file stores it, without a copy where its rows are in order; None for a weight that is not quantised."""
        if not isinstance(self._source, GGUFFile):
            return None
        stored = self._stored[name]
        blocks = self._source.blocks(stored, interleaved_heads=self._heads(name))
        return None if blocks is None else QuantizedWeight(self._source.type_name(stored), blocks, self._shapes[name])

    def _heads(self, name: str) -> int | None:
        """Heads whose rotary halves the file interleaves."""
        return self._shapes[name][0] // self._spec.head_dim if weight_kind(name)[0] in self._interleaved else None


def resolve_model(model: str) -> Path:
    """An alias, a .gguf file, a directory, or `repo/name[@revision]` -> a .gguf file or a directory with config.json.

    A local path opens no socket. Raises `ModelError`, or `DownloadError` for a model that has to be fetched.
    """
    if model in hub.ALIASES:
        return hub.pull(model, progress=None)
    path = _local(model)
    if path is not None:
        return _in_directory(path) if path.is_dir() else path
    if hub.is_repository(model):
        return _in_directory(hub.pull(model, progress=None))
    raise ModelError(
        f"model {model!r}: there is no such file or directory",
        hint=f"Give a .gguf file, a Hugging Face directory, repo/name, or one of: {', '.join(hub.ALIASES)}.",
    )


def find_model(model: str) -> Path | None:
    """Like `resolve_model`, but nothing is fetched: None for a model that would have to be. Raises `ModelError`."""
    if model in hub.ALIASES or (_local(model) is None and hub.is_repository(model)):
        path = hub.cached(model)
        return None if path is None else resolve_model(str(path))
    return resolve_model(model)


def _local(model: str) -> Path | None:
    """The path, if it exists. A name too long for the file system, or of an unknown `~user`, does not."""
    try:
        path = Path(model).expanduser()
        return path if model and path.exists() else None
    except (OSError, RuntimeError, ValueError):
        return None


def _in_directory(directory: Path) -> Path:
    if (directory / "config.json").exists():
        return directory
    files = sorted(directory.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ModelError(
            f"{directory}: there are {len(files)} GGUF files: {', '.join(file.name for file in files[:8])}",
            hint="Name one of them.",
        )
    raise ModelError(
        f"{directory}: there is neither a config.json nor a .gguf file",
        hint="A model is a directory with config.json, tokenizer.json and safetensors files, or a .gguf file.",
    )


def tokenizer_source(path: str) -> TokenizerSource:
    """A tokenizer that is not the model's own: a tokenizer.json, the directory that holds one, or a GGUF file."""
    found = _local(path)
    if found is not None and found.suffix == ".gguf":
        return _gguf_tokenizer(open_gguf(found).metadata)
    file = found / "tokenizer.json" if found is not None and found.is_dir() else found
    if file is None or not file.exists():
        raise ModelError(f"{path}: there is no tokenizer", hint="Name a tokenizer.json, a directory with one, or a .gguf file.")
    return TokenizerSource(file, None, hf.read_optional_json(file.parent / "tokenizer_config.json"))


def _gguf_tokenizer(metadata: Mapping[str, Any]) -> TokenizerSource:
    return TokenizerSource(None, {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}, {})


def read_spec(model: str) -> DecoderSpec:
    """The spec alone, from configuration and headers; no weights are read. Raises as `load_model` does."""
    path = resolve_model(model)
    return _huggingface_spec(path)[1] if path.is_dir() else _gguf_spec(open_gguf(path))[1]


def load_model(model: str, *, dtype: torch.dtype, device: torch.device, tokenizer: str | None = None) -> LoadedModel:
    """Open a model. Raises `ModelError` naming what is missing, malformed or not supported.

    dtype, device: what its weights are converted to, each on its own, when they are read.
    tokenizer: where the tokenizer is, if not with the model, which then needs none.
    """
    path = resolve_model(model)
    name = model if model in hub.ALIASES or _local(model) is None else path.resolve().name.removesuffix(".gguf")
    other = None if tokenizer is None else tokenizer_source(tokenizer)
    if path.is_dir():
        return _load_huggingface(name, path, dtype, device, other)
    return _load_gguf(name, path, dtype, device, other)


def _architecture(kind: Any, path: Path) -> Architecture:
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        what = "names no architecture" if kind is None else f"has architecture {kind!r}, which is not supported"
        raise ModelError(f"{path}: the model {what}", hint=f"Supported architectures: {', '.join(ARCHITECTURES)}.")
    return ARCHITECTURES[kind]


def _huggingface_spec(path: Path) -> tuple[Architecture, DecoderSpec, dict[str, Any]]:
    config = hf.read_config(path)
    architecture = _architecture(config.get("model_type"), path)
    return architecture, architecture.spec_from_config(config), config


def _load_huggingface(name: str, path: Path, dtype: torch.dtype, device: torch.device, other: TokenizerSource | None) -> LoadedModel:
    architecture, spec, config = _huggingface_spec(path)
    tokenizer_json = path / "tokenizer.json"
    if other is None and not tokenizer_json.exists():
        raise ModelError(
            f"{path}: tokenizer.json is missing",
            hint="Name another with --tokenizer, or save it there: AutoTokenizer.from_pretrained(...).save_pretrained(directory).",
        )
    generation = hf.read_optional_json(path / "generation_config.json")
    tokenizer_config = hf.read_optional_json(path / "tokenizer_config.json")
    tokenizer = other or TokenizerSource(tokenizer_json, None, tokenizer_config)
    source = hf.Safetensors(path)
    head = architecture.HUGGINGFACE_NAMES["lm_head"]
    ignored = {head} if spec.tie_word_embeddings and head in source.shapes else set()
    if ignored and not _same(source, head, architecture.HUGGINGFACE_NAMES["embed"]):
        # The files win over `tie_word_embeddings`, as in transformers 5.
        spec, ignored = replace(spec, tie_word_embeddings=False), set()
    bos = hf.token_ids(generation.get("bos_token_id", config.get("bos_token_id")), "bos_token_id")
    add_bos = tokenizer_config.get("add_bos_token")
    return LoadedModel(
        name=name,
        path=path,
        format=source.format,
        file_bytes=source.file_bytes,
        spec=spec,
        weights=Weights(source, architecture.HUGGINGFACE_NAMES, frozenset(), spec, dtype, device, ignored),
        tokenizer=tokenizer,
        chat_template=hf.read_chat_template(path, tokenizer_config),
        eos_token_ids=hf.eos_token_ids(tokenizer.tokenizer_json, generation, config, tokenizer_config=tokenizer.tokenizer_config),
        bos_token_id=bos[0] if bos else None,
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        generation_defaults={key: generation[key] for key in hf.SAMPLING_FIELDS if generation.get(key) is not None},
    )


def _gguf_spec(file: GGUFFile) -> tuple[Architecture, DecoderSpec]:
    parts = file.metadata.get("split.count", 1)
    if parts != 1:
        raise ModelError(
            f"{file.path}: one of {parts} parts of a split GGUF, which is not supported",
            hint="Merge the parts with llama-gguf-split --merge.",
        )
    architecture = _architecture(file.metadata.get("general.architecture"), file.path)
    spec = architecture.spec_from_config(architecture.config_from_gguf(file.metadata, file.shapes))
    if "rope_freqs.weight" in file.tensors:
        # llama.cpp's converter evaluates the llama3 formula and stores what each inverse frequency is divided by.
        divisors = torch.empty(file.shapes["rope_freqs.weight"], dtype=torch.float32)
        file.read_into("rope_freqs.weight", divisors)
        spec = replace(spec, rope=replace(spec.rope, divisors=tuple(divisors.flatten().tolist())))
    return architecture, spec


def _load_gguf(name: str, path: Path, dtype: torch.dtype, device: torch.device, other: TokenizerSource | None) -> LoadedModel:
    if path.suffix == ".safetensors":
        raise ModelError(f"{path}: weights alone are not a model", hint="Give the directory, with config.json and tokenizer.json.")
    file = open_gguf(path)
    architecture, spec = _gguf_spec(file)
    metadata = file.metadata
    eos = [each for key in GGUF_EOS_KEYS for each in hf.token_ids(metadata.get(key), key)]
    bos = hf.token_ids(metadata.get("tokenizer.ggml.bos_token_id"), "tokenizer.ggml.bos_token_id")
    add_bos, template = metadata.get("tokenizer.ggml.add_bos_token"), metadata.get("tokenizer.chat_template")
    return LoadedModel(
        name=name,
        path=path,
        format=file.format,
        file_bytes=file.file_bytes,
        spec=spec,
        weights=Weights(file, architecture.GGUF_NAMES, architecture.GGUF_INTERLEAVED, spec, dtype, device, set()),
        tokenizer=other or _gguf_tokenizer(metadata),
        chat_template=template if isinstance(template, str) else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=bos[0] if bos else None,
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        generation_defaults={field: metadata[key] for field, key in GGUF_SAMPLING_KEYS.items() if key in metadata},
    )


def _check_names(source: _Source, wanted: set[str], ignored: set[str]) -> None:
    present = set(source.shapes)
    missing = sorted(wanted - present)
    if missing:
        raise ModelError(
            f"{source.path}: {len(missing)} tensors are missing, the first is {missing[0]!r}",
            hint="The file is incomplete, or is not the model its configuration describes.",
        )
    extra = sorted(name for name in present - wanted - ignored if not HARMLESS.fullmatch(name))
    if extra:
        # Leaving a weight out would run a different model without a word.
        raise ModelError(
            f"{source.path}: {len(extra)} tensors are not part of the model its configuration describes, the first is {extra[0]!r}",
            hint="This variant of the architecture is not supported.",
        )


def _same(source: hf.Safetensors, first: str, second: str) -> bool:
    if second not in source.shapes or source.shapes[first] != source.shapes[second]:
        return False
    a, b = (torch.empty(source.shapes[name], dtype=torch.float32) for name in (first, second))
    source.read_into(first, a)
    source.read_into(second, b)
    return torch.equal(a, b)
