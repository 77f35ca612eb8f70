"""The fields that generating routes share, made from the declarations of `SamplingParams` and `OutputParams`: types, limits, words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from sidestream.errors import InvalidRequest
from sidestream.options import Field, fields_of
from sidestream.params import OutputParams, SamplingParams

HiddenStatesFormat = Literal["json", "base64", "safetensors"]
LogprobsFormat = Literal["openai", "flat"]

_TYPES: dict[str, Any] = {  # where the JSON type is not the Python type
    "stop": str | list[str],
    "logit_bias": dict[str, float],
    "return_hidden_states": bool | Literal["last"],
}
_SEQUENCES = {"stop_token_ids", "allowed_token_ids", "bad_token_ids", "token_ids_logprob", "hidden_states_layers"}


def _annotated(field: Field) -> Any:
    """The field's JSON type, with its limits and its help for the schema."""
    option = field.option
    limits: dict[str, Any] = {"description": option.help}
    if field.name in _TYPES:
        return Annotated[_TYPES[field.name], msgspec.Meta(**limits)] | None
    number: Any = float if isinstance(field.default, float) else int
    bounds: dict[str, Any] = {}
    if option.low is not None:
        bounds["gt" if option.above_low else "ge"] = option.low
    if option.high is not None and abs(option.high) < 2**63:
        bounds["le"] = option.high
    if "ge" in bounds and abs(bounds["ge"]) >= 2**63:
        del bounds["ge"]
    if field.name in _SEQUENCES:
        item = Annotated[int, msgspec.Meta(**bounds)] if bounds else int
        limits |= {} if option.max_items is None else {"max_length": option.max_items}
        return Annotated[list[item], msgspec.Meta(**limits)] | None  # type: ignore[valid-type]
    if isinstance(field.default, bool):
        return Annotated[bool, msgspec.Meta(**limits)] | None
    if option.choices:
        return Annotated[Literal[option.choices], msgspec.Meta(**limits)] | None
    return Annotated[number, msgspec.Meta(**limits, **bounds)] | None


DECLARED: dict[str, Field] = {field.name: field for each in (SamplingParams, OutputParams) for field in fields_of(each)}

if TYPE_CHECKING:

    class Shared(msgspec.Struct):
        """Every field of SamplingParams and OutputParams under its own name; None where it was not given."""

else:
    Shared = msgspec.defstruct(
        "Shared",
        [(name, _annotated(field), None) for name, field in DECLARED.items()],
        kw_only=True,
        forbid_unknown_fields=True,
        module=__name__,
    )


def params_of(body: msgspec.Struct, renamed: Mapping[str, Any] | None = None) -> tuple[SamplingParams, dict[str, Any]]:
    """Sampling and outputs that a body asks for; `renamed` are values that came under another name, by our own.

    The outputs are keywords for `generate`. Raises InvalidRequest.
    """
    given = {name: value for name in DECLARED if (value := getattr(body, name, None)) is not None}
    given |= {name: value for name, value in (renamed or {}).items() if value is not None}
    if "logit_bias" in given:
        given["logit_bias"] = _bias(given["logit_bias"])
    sampling = {field.name: given[field.name] for field in fields_of(SamplingParams) if field.name in given}
    outputs = {field.name: given[field.name] for field in fields_of(OutputParams) if field.name in given}
    OutputParams(**outputs)  # refused now, with every field's name
    return SamplingParams(**sampling), outputs


def _bias(bias: Mapping[str, float]) -> dict[int, float]:
    """JSON's keys are texts."""
    for key in bias:
        if not key.lstrip("-").isdecimal():
            raise InvalidRequest("logit_bias", f'got the key {key!r}, must be token ids such as "42"')
    return {int(key): value for key, value in bias.items()}
