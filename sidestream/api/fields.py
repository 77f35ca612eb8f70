"""The fields that generating routes share, made from the declarations of `SamplingParams` and `OutputParams`: types, limits, words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from sidestream.errors import InvalidRequest
from sidestream.options import Field, fields_of
from sidestream.params import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_REGEXES,
    MAX_STOPS,
    OutputParams,
    SamplingParams,
)

HiddenStatesFormat = Literal["json", "base64", "safetensors"]
LogprobsFormat = Literal["openai", "flat"]


def shown_limits(**limits: Any) -> msgspec.Meta:
    """Limits that the schema shows, and that SamplingParams and OutputParams check, in words of their own."""
    return msgspec.Meta(extra_json_schema=limits)


STOP = Annotated[str, shown_limits(minLength=1, maxLength=MAX_STOP_CHARACTERS)]
STOPS = Annotated[list[STOP], shown_limits(maxItems=MAX_STOPS)]
REGEXES = Annotated[list[STOP], shown_limits(maxItems=MAX_STOP_REGEXES)]
BIAS = Annotated[float, shown_limits(minimum=-MAX_LOGIT_BIAS, maximum=MAX_LOGIT_BIAS)]

_TYPES: dict[str, Any] = {  # where the JSON type is not the Python type
    "stop": STOP | STOPS,
    "stop_regex": STOP | REGEXES,
    "json_schema": str | dict[str, Any],
    "structural_tag": str | dict[str, Any],
    "regex": str,
    "ebnf": str,
    "choice": Annotated[list[Annotated[str, shown_limits(minLength=1)]], shown_limits(maxItems=MAX_CHOICES)],
    "logit_bias": Annotated[dict[str, BIAS], shown_limits(propertyNames={"pattern": "^(0|[1-9][0-9]*)$"})],
    "return_hidden_states": bool | Literal["last"],
}
_SEQUENCES = {"stop_token_ids", "allowed_token_ids", "bad_token_ids", "token_ids_logprob", "hidden_states_layers"}


def _annotated(field: Field) -> Any:
    """The field's JSON type, with its limits and its help for the schema."""
    return _type_of(field) | None


def _per_prompt(field: Field) -> Any:
    """A value for all prompts, or a list with one for each."""
    if field.name in _SEQUENCES:  # JSON has one kind of list: what its elements are tells the two apart
        item = _item_of(field)
        help = f"{field.option.help} Or a list of such lists, one per prompt."
        return Annotated[list[item | list[item] | None], msgspec.Meta(description=help)] | None  # type: ignore[valid-type]
    one = _type_of(field)
    return one | list[one | None] | None  # type: ignore[valid-type]


def _type_of(field: Field) -> Any:
    option = field.option
    limits: dict[str, Any] = {"description": option.help}
    if field.name in _TYPES:
        return Annotated[_TYPES[field.name], msgspec.Meta(**limits)]
    if field.name in _SEQUENCES:
        item = _item_of(field)
        limits |= {} if option.max_items is None else {"max_length": option.max_items}
        return Annotated[list[item], msgspec.Meta(**limits)]  # type: ignore[valid-type]
    if isinstance(field.default, bool):
        return Annotated[bool, msgspec.Meta(**limits)]
    if option.choices:
        return Annotated[Literal[option.choices], msgspec.Meta(**limits)]
    number: Any = float if isinstance(field.default, float) else int
    return Annotated[number, msgspec.Meta(**limits, **_bounds(field))]


def _item_of(field: Field) -> Any:
    bounds = _bounds(field)
    return Annotated[int, msgspec.Meta(**bounds)] if bounds else int


def _bounds(field: Field) -> dict[str, Any]:
    """What msgspec can hold is checked while it decodes; the rest is shown."""
    option = field.option
    bounds = {"gt" if option.above_low else "ge": option.low, "le": option.high}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    held = {name: bound for name, bound in given.items() if abs(bound) < 2**63}
    return held if held == given else {**held, "extra_json_schema": {"minimum": option.low, "maximum": option.high}}


SAMPLING: dict[str, Field] = {field.name: field for field in fields_of(SamplingParams)}
OUTPUTS: dict[str, Field] = {field.name: field for field in fields_of(OutputParams)}
DECLARED: dict[str, Field] = {**SAMPLING, **OUTPUTS}

if TYPE_CHECKING:

    class Shared(msgspec.Struct):
        """Every field of SamplingParams and OutputParams under its own name; None where it was not given."""

    class SharedSampling(msgspec.Struct):
        """Every field of SamplingParams."""

    class OutputsPerPrompt(msgspec.Struct):
        """Every field of OutputParams: a value for all prompts, or a list with one for each."""

else:

    def _struct(name, fields, type_of):
        declared = [(field, type_of(each), None) for field, each in fields.items()]
        return msgspec.defstruct(name, declared, kw_only=True, forbid_unknown_fields=True, module=__name__)

    Shared = _struct("Shared", DECLARED, _annotated)
    SharedSampling = _struct("SharedSampling", SAMPLING, _annotated)
    OutputsPerPrompt = _struct("OutputsPerPrompt", OUTPUTS, _per_prompt)


def params_of(body: msgspec.Struct, renamed: Mapping[str, Any] | None = None) -> tuple[SamplingParams, dict[str, Any]]:
    """Sampling and outputs that a body asks for; `renamed` are values that came under another name, by our own.

    The outputs are keywords for `generate`. Raises InvalidRequest.
    """
    outputs = _given(body, OUTPUTS, renamed)
    OutputParams(**outputs)  # refused now, with every field's name
    return sampling_of(body, renamed), outputs


def sampling_of(body: msgspec.Struct, renamed: Mapping[str, Any] | None = None) -> SamplingParams:
    """As `params_of`, of a body that says nothing of outputs."""
    given = _given(body, SAMPLING, renamed)
    if "logit_bias" in given:
        given["logit_bias"] = _bias(given["logit_bias"])
    return SamplingParams(**given)


def _given(body: msgspec.Struct, fields: Mapping[str, Field], renamed: Mapping[str, Any] | None) -> dict[str, Any]:
    given = {name: value for name in fields if (value := getattr(body, name, None)) is not None}
    return given | {name: value for name, value in (renamed or {}).items() if name in fields and value is not None}


@contextmanager
def called(names: Mapping[str, str]) -> Iterator[None]:
    """Errors inside name a field as the client calls it; `names` are the client's, by our own."""
    try:
        yield
    except InvalidRequest as error:
        if error.param not in names:
            raise
        raise type(error)(names[error.param], error.said, hint=error.hint) from None


def _bias(bias: Mapping[str, float]) -> dict[int, float]:
    """JSON's keys are texts."""
    for key in bias:
        if not re.fullmatch(r"-?(0|[1-9][0-9]{0,19})", key):
            raise InvalidRequest("logit_bias", f'got the key {key!r}, must be token ids such as "42"')
    return {int(key): value for key, value in bias.items()}
