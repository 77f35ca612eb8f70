"""Hugging Face directories: `config.json` and its companions, and weights in safetensors files, single or sharded."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sidestream.errors import ModelError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SAMPLING_FIELDS = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "max_new_tokens",
    "max_length",
)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `ModelError` if the file cannot be read or holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # bad JSON, or not UTF-8
        raise ModelError(f"{path}: not valid JSON: {error}", hint="Fetch the file again.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object is expected, the file holds a {type(value).__name__}")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json`. Raises `ModelError` if it is missing, or declares weights stored in a quantised form."""
    path = directory / "config.json"
    if not path.exists():
        raise ModelError(
            f"{directory}: there is no config.json, so this is not a Hugging Face model directory",
            hint="Give a directory with config.json and safetensors files, or the path of a .gguf file.",
        )
    config = read_json(path)
    if config.get("quantization_config"):
        quantization = config["quantization_config"]
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"{path}: weights quantised by {method!r} are not supported",
            hint=f"Take a variant with plain weights ({', '.join(DTYPES)}), or a GGUF file.",
        )
    return config


def read_chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """A file beside the tokenizer goes before its configuration, as in transformers; of several named templates, `default`."""
    jinja = directory / "chat_template.jinja"
    if jinja.exists():
        try:
            return jinja.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{jinja}: cannot be read: {error}") from error
    template = read_optional_json(directory / "chat_template.json").get("chat_template", tokenizer_config.get("chat_template"))
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    if isinstance(template, dict):
        template = template.get("default") or (next(iter(template.values())) if len(template) == 1 else None)
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{directory}: chat_template is a {type(template).__name__}; text, or a list of named texts, is expected")
    return template


def token_ids(value: Any, field: str) -> tuple[int, ...]:
    """`eos_token_id` and the like: one id, a list, or null. Negative ids, by which some mean "none", are left out."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    for each in values:
        if not isinstance(each, int) or isinstance(each, bool):
            raise ModelError(f"{field}: {each!r} is not a token id")
    return tuple(dict.fromkeys(each for each in values if each >= 0))


def eos_token_ids(tokenizer_json: Path | None, *configs: Mapping[str, Any], tokenizer_config: Mapping[str, Any]) -> tuple[int, ...]:
    """All ids that end a generation: from the first configuration that names any, else the end token that the tokenizer's own names."""
    for config in configs:
        ids = token_ids(config.get("eos_token_id"), "eos_token_id")
        if ids:
            return ids
    token = tokenizer_config.get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    added = read_json(tokenizer_json).get("added_tokens") or [] if tokenizer_json and content else []
    return token_ids([entry.get("id") for entry in added if isinstance(entry, dict) and entry.get("content") == content], "eos_token")


class Safetensors:
    """The weights of a directory; data stays on disk until it is read. Raises `ModelError` for a missing or damaged file."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self._files: dict[str, Any] = {}  # tensor -> open file that holds it
        self._slices: dict[str, Any] = {}
        paths = _shards(directory)
        self.file_bytes = sum(path.stat().st_size for path in paths)
        for path in paths:
            self._open(path)
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(view.get_shape()) for name, view in self._slices.items()}

    def _open(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: not a complete safetensors file: {error}", hint="Fetch the file again.") from error
        for name in file.keys():  # noqa: SIM118 - not a mapping
            if name in self._files:
                raise ModelError(f"{path}: tensor {name!r} is also in another file of the directory")
            self._files[name] = file
            self._slices[name] = file.get_slice(name)

    @property
    def format(self) -> str:
        """ "safetensors " and the dtype that holds most of the parameters."""
        elements: Counter[str] = Counter()
        for name, view in self._slices.items():
            elements[view.get_dtype()] += prod(self.shapes[name])
        kind = elements.most_common(1)[0][0] if elements else ""
        return f"safetensors {str(DTYPES.get(kind, kind)).removeprefix('torch.')}".strip()

    def check_type(self, name: str) -> None:
        """Raises `ModelError` if the tensor's type cannot be read."""
        kind = self._slices[name].get_dtype()
        if kind not in DTYPES:
            raise ModelError(
                f"{self.path}: tensor {name!r} has type {kind}, which is not supported",
                hint=f"Supported types: {', '.join(DTYPES)}.",
            )

    def read_into(self, name: str, out: Tensor, *, interleaved_heads: int | None = None) -> None:
        """Convert a tensor into `out`. Also if nothing changes it is a copy: weights must not change with the file."""
        assert interleaved_heads is None, "only GGUF interleaves rows"
        self.check_type(name)
        out.copy_(self._files[name].get_tensor(name))


def _shards(directory: Path) -> list[Path]:
    index = directory / INDEX
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    if not index.exists():
        raise ModelError(
            f"{directory}: there is neither {SINGLE} nor {INDEX}",
            hint="Weights are read from safetensors files; convert .bin or .pth files first.",
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index}: 'weight_map' from tensor to file is missing or malformed")
    paths = []
    for name in sorted(set(weight_map.values())):
        # The index came with the model; it must not lead to files elsewhere.
        if Path(name).name != name:
            raise ModelError(f"{index}: {name!r} is not the name of a file in the directory")
        if not (directory / name).exists():
            raise ModelError(f"{directory}: {name} is missing, {INDEX} names it", hint="Fetch the model again.")
        paths.append(directory / name)
    return paths
