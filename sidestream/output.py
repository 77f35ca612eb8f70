"""What a request gives back. See docs/outputs.md for the exact contract."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

JSON_MINUS_INFINITY = -9999.0  # JSON has no infinity
SHOWN_TEXT = 80  # characters of an output's text in its repr

TopLogprobs = list[list[tuple[float, int]]]  # per position, best first: (logprob, token id)


@dataclass(frozen=True)
class Logprobs:
    """Logprobs of the wanted positions. A list that was not asked for is empty; in a stream each holds only the new part.

    `input*` cover prompt positions `logprob_start_len..P-1`. Position 0 has no logprob: None, and no alternatives.
    `*_top` hold the `top_logprobs_num` best tokens, `*_ids` the tokens of `token_ids_logprob`, as (logprob, token id).
    """

    input: Sequence[float | None] = ()
    output: Sequence[float] = ()
    input_top: Sequence[Sequence[tuple[float, int]] | None] = ()
    output_top: Sequence[Sequence[tuple[float, int]]] = ()
    input_ids: Sequence[Sequence[tuple[float, int]] | None] = ()
    output_ids: Sequence[Sequence[tuple[float, int]]] = ()

    def __repr__(self) -> str:
        """The number of entries of each list that is there."""
        return f"Logprobs({', '.join(f'{name}=[{len(entries)}]' for name, entries in vars(self).items() if len(entries))})"


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """Hidden rows, in order of position; in a stream only those not sent before."""

    raw: npt.NDArray[np.uint8]  # the bytes of [rows, layers, hidden] in `dtype`, owned by this output
    dtype: str  # "float32", "float16" or "bfloat16"
    shape: tuple[int, int, int]
    positions: Sequence[int]  # [rows], absolute
    layers: tuple[int, ...]  # as the request numbered them

    @classmethod
    def of(cls, data: torch.Tensor, positions: Sequence[int], layers: tuple[int, ...]) -> HiddenStates:
        """From a tensor [rows, layers, hidden] in host memory."""
        import torch

        rows, each, hidden = data.shape
        raw: npt.NDArray[np.uint8] = data.contiguous().view(torch.uint8).numpy().reshape(-1)
        return cls(raw, str(data.dtype).removeprefix("torch."), (rows, each, hidden), positions, layers)

    @cached_property
    def data(self) -> torch.Tensor:
        """[rows, layers, hidden], CPU; the memory of `raw`."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return torch.from_numpy(self.raw).view(dtype).view(self.shape) if self.raw.size else torch.empty(self.shape, dtype=dtype)

    def numbers(self) -> npt.NDArray[np.floating[Any]]:
        """[rows, layers, hidden] for numpy, which has no bfloat16: that is widened to float32."""
        import numpy as np

        if self.dtype == "bfloat16":
            return (self.raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(self.shape)
        return self.raw.view(self.dtype).reshape(self.shape)

    def __repr__(self) -> str:
        return f"HiddenStates({self.dtype} {list(self.shape)}, layers={self.layers})"


class Timing(NamedTuple):
    """Seconds from asking, as the asking side saw them."""

    queued: float | None  # until it was admitted; None if it never was
    first_token: float | None  # until its first token; None if it had none
    total: float


@dataclass(frozen=True, eq=False)
class Output:
    """One finished answer, or in a stream the new part of one (`finish_reason` is None until the last part)."""

    text: str
    token_ids: Sequence[int]
    finish_reason: str | None  # "stop", "length" or "abort"
    matched_stop: str | int | None  # the stop string or token id that ended it
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens that came from the prefix cache
    rid: str
    index: int = 0  # which of the prompt's `n` outputs this is
    logprobs: Logprobs | None = None
    hidden_states: HiddenStates | None = None
    copied_bytes: Mapping[str, int] | None = None  # device to host for this output, by kind; in a stream with the last part
    timing: Timing | None = None  # in a stream with the last part

    def __repr__(self) -> str:
        """For the eye: a long text is cut, lists and tensors are there by their size."""
        text = self.text if len(self.text) <= SHOWN_TEXT else self.text[: SHOWN_TEXT - 1] + "…"
        wanted = [f", {name}={value!r}" for name in ("logprobs", "hidden_states") if (value := getattr(self, name)) is not None]
        return (
            f"Output(text={text!r}, token_ids=[{len(self.token_ids)}], finish_reason={self.finish_reason!r}, "
            f"prompt_tokens={self.prompt_tokens}, rid={self.rid!r}, index={self.index}{''.join(wanted)})"
        )


def _json_number(number: float | None) -> float | None:
    if number is None or math.isnan(number):
        return None
    if math.isinf(number):
        return JSON_MINUS_INFINITY if number < 0 else None
    return number


def _json_pairs(rows: Sequence[Sequence[tuple[float, int]] | None]) -> list[list[list[Any]] | None]:
    return [None if row is None else [[_json_number(number), token] for number, token in row] for row in rows]


def logprobs_to_dict(logprobs: Logprobs) -> dict[str, Any]:
    """The fields as strictly valid JSON: minus infinity is -9999.0, NaN is null."""
    return {
        "input": [_json_number(number) for number in logprobs.input],
        "output": [_json_number(number) for number in logprobs.output],
        "input_top": _json_pairs(logprobs.input_top),
        "output_top": _json_pairs(logprobs.output_top),
        "input_ids": _json_pairs(logprobs.input_ids),
        "output_ids": _json_pairs(logprobs.output_ids),
    }


def _json_rows(rows: Any) -> Any:
    """Nested lists with null for what JSON cannot hold."""
    if isinstance(rows, list):
        return [_json_rows(row) for row in rows]
    return rows if math.isfinite(rows) else None


def hidden_states_to_dict(states: HiddenStates) -> dict[str, Any]:
    """Type, shape, layers and positions, and the rows as nested lists: NaN and infinities are null."""
    import numpy as np

    numbers = states.numbers()
    rows, finite = numbers.tolist(), bool(np.isfinite(numbers).all())
    return {
        "dtype": states.dtype,
        "shape": list(states.shape),
        "layers": list(states.layers),
        "positions": list(states.positions),
        "data": rows if finite else _json_rows(rows),
    }


def output_to_dict(output: Output) -> dict[str, Any]:
    """The fields of an output as strictly valid JSON: `json.dumps(..., allow_nan=False)` takes them."""
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "matched_stop": output.matched_stop,
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": output.completion_tokens,
        "cached_tokens": output.cached_tokens,
        "rid": output.rid,
        "index": output.index,
        "logprobs": None if output.logprobs is None else logprobs_to_dict(output.logprobs),
        "hidden_states": None if output.hidden_states is None else hidden_states_to_dict(output.hidden_states),
        "copied_bytes": None if output.copied_bytes is None else dict(output.copied_bytes),
    }
