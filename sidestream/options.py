"""How an option is declared: a dataclass field whose annotation carries an `Option`.

From that one declaration come the check of its value, its flag, its environment variable, its help and its row in the docs.
`EngineConfig`, `ServeConfig`, `SamplingParams` and `OutputParams` are declared this way.
"""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from functools import cache, reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

ENVIRONMENT_PREFIX = "SIDESTREAM_"
MASK = "***"  # in place of a secret
SIZE_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    SIZE_UNITS |= {f"{_letter}iB": 1024**_power, f"{_letter}B": 1000**_power}


@dataclass(frozen=True)
class Option:
    """What is known about one option beyond its name, type and default. For lists, `low` and `high` bound each element."""

    help: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    above_low: bool = False  # `low` itself is not allowed
    max_items: int | None = None
    size: bool = False  # bytes: texts such as "2GiB" are understood
    metavar: str | None = None
    flag: str | None = None  # when it is not the field's name with dashes
    off_flag: str | None = None  # the flag that says no, where None means "decide for me"
    off_help: str | None = None  # what the flag does that turns off an option that is on by default
    aliases: tuple[str, ...] = ()  # other engines' names for the flag: accepted, not shown
    off_aliases: tuple[str, ...] = ()  # the same for `off_flag`
    positional: bool = False
    hidden: bool = False  # seldom needed: documented, but not in --help
    secret: bool = False  # a key: no message, log or report shows the value


class Kind(NamedTuple):
    """A type of option: how a Python value is normalised, how a text is read, and the words for it."""

    convert: Callable[[Any], Any]
    read: Callable[[str], Any]
    words: str
    metavar: str | None
    combine: Callable[[list[Any]], Any] | None = None  # puts the values of a repeated flag together; None: the last one counts


class Field(NamedTuple):
    """One declared option of a dataclass."""

    name: str
    default: Any
    optional: bool
    kind: Kind
    option: Option

    @property
    def flag(self) -> str:
        return self.option.flag or "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return variable_of(self.flag)


def variable_of(flag: str) -> str:
    """The environment variable of a flag: `--page-size` is `SIDESTREAM_PAGE_SIZE`."""
    return ENVIRONMENT_PREFIX + flag.lstrip("-").replace("-", "_").upper()


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that may have been meant, or None when nothing is near."""
    return next(iter(get_close_matches(word, list(known), n=1, cutoff=0.6)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """A sentence that offers the nearest known word, or None when nothing is near."""
    near = nearest(word, known)
    return f"Did you mean {near}?" if near else None


def shown(value: object, limit: int = 80) -> str:
    """A value as error messages quote it."""
    try:
        text = repr(value)
    except ValueError:  # Python does not write integers of more than 4300 digits
        text = "an integer too long to write"
    except RecursionError:
        text = "a value nested too deeply to write"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def read_size(text: str) -> int:
    """Bytes of a text such as `2GiB`, `1.5GiB`, `64MB` or `4096`. Raises ValueError."""
    match = re.fullmatch(r"\s*([0-9]+)(\.[0-9]+)?\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): size for unit, size in SIZE_UNITS.items()}
    if match is None or match[3].lower() not in units:
        raise ValueError(text)
    unit = units[match[3].lower()]
    return int(match[1]) * unit + int(float(match[2] or 0) * unit)


def written_size(size: int) -> str:
    """The shortest exact way to write a number of bytes: `4GiB`, `100B`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % SIZE_UNITS[unit] == 0:
            return f"{size // SIZE_UNITS[unit]}{unit}"
    return f"{size}B"


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError
    number = float(value)  # OverflowError for an int no float can hold is an ArithmeticError, caught with ValueError
    if not math.isfinite(number):
        raise ValueError
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def _size(value: Any) -> int:
    return read_size(value) if isinstance(value, str) else _integer(value)


def _sequence(value: Any) -> tuple[Any, ...]:
    if type(value).__module__ == "numpy":
        return tuple(value.tolist())
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, set, frozenset)):
        raise ValueError
    return tuple(value)


def _integers(value: Any) -> tuple[int, ...]:
    return tuple(_integer(item) for item in _sequence(value))


def _texts(value: Any) -> tuple[str, ...]:
    return (_text(value),) if isinstance(value, str) else tuple(_text(item) for item in _sequence(value))


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError
    bias: dict[int, float] = {}
    for key, number in value.items():
        token = int(key) if isinstance(key, str) and re.fullmatch(r"[0-9]+", key) else _integer(key)
        if token in bias:
            raise ValueError
        bias[token] = _number(number)
    return bias


def _json_text(value: Any) -> str:
    """Of an object, or as it is: its meaning is checked where it is used."""
    if isinstance(value, str):
        return _text(value)
    try:
        return json.dumps(_object(value), ensure_ascii=False)
    except (TypeError, RecursionError):
        raise ValueError from None


def _object(value: Any) -> dict[str, Any]:
    if isinstance(value, type) and hasattr(value, "model_json_schema"):  # a model of Pydantic
        value = value.model_json_schema()
    if not isinstance(value, Mapping):
        raise ValueError
    return dict(value)


def _boolean_or_last(value: Any) -> bool | str:
    return value if isinstance(value, str) and value == "last" else _boolean(value)


def _read_boolean(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.strip().lower() not in words:
        raise ValueError
    return words[text.strip().lower()]


def _read_integers(text: str) -> tuple[int, ...]:
    return tuple(int(item) for item in text.split(","))


def _read_bias(text: str) -> dict[int, float]:
    pairs = [item.split("=") for item in text.split(",")]
    bias = {int(token): float(number) for token, number in pairs}
    if len(bias) < len(pairs):
        raise ValueError
    return bias


def _read_boolean_or_last(text: str) -> bool | str:
    return text if text == "last" else _read_boolean(text)


def _read_json(text: str) -> str:
    """As it is, or what the file has that is named behind an @."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError from error


def _joined(parts: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(item for part in parts for item in part)


def _merged(parts: list[dict[int, float]]) -> dict[int, float]:
    merged: dict[int, float] = {}
    for part in parts:
        if twice := merged.keys() & part.keys():
            raise ValueError(f"got token id {min(twice)} more than once, must name each id once")
        merged |= part
    return merged


SIZE = Kind(_size, read_size, "a number of bytes such as 2GiB,", "SIZE")
KINDS: dict[Any, Kind] = {
    bool: Kind(_boolean, _read_boolean, "true or false", None),
    int: Kind(_integer, int, "an integer", "N"),
    float: Kind(_number, float, "a finite number", "X"),
    str: Kind(_text, str, "a text that is not empty", "TEXT"),
    Sequence[int]: Kind(_integers, _read_integers, "a list of integers", "N,N", _joined),
    Sequence[str]: Kind(_texts, lambda text: (text,), "a text or a list of texts, none of them empty", "TEXT", _joined),
    str | Mapping[str, Any]: Kind(_json_text, _read_json, "a JSON object, the text of one (@FILE as a flag), or a Pydantic model", "JSON"),
    Mapping[int, float]: Kind(_bias, _read_bias, "a mapping from token id to a finite number, each id once,", "ID=X,ID=X", _merged),
    bool | Literal["last"]: Kind(_boolean_or_last, _read_boolean_or_last, 'true, false or "last"', "last"),
}


def _field(name: str, hint: Any, default: Any) -> Field:
    assert get_origin(hint) is Annotated, f"{name} has no Option"
    hint, option = get_args(hint)
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    optional = type(None) in members
    base = reduce(or_, (member for member in members if member is not type(None)))
    return Field(name, default, optional, SIZE if option.size else KINDS[base], option)


def _fields_of(declaration: type) -> tuple[Field, ...]:
    hints = get_type_hints(declaration, include_extras=True)
    made = []
    for item in fields(declaration):
        default = item.default if item.default_factory is MISSING else item.default_factory()
        made.append(_field(item.name, hints[item.name], default))
    return tuple(made)


# The options a dataclass declares, in its order.
fields_of: Callable[[type], tuple[Field, ...]] = cache(_fields_of)


def _bound(number: float, size: bool) -> str:
    return written_size(int(number)) if size else f"{number:g}" if isinstance(number, float) else str(number)


def written_default(field: Field) -> str:
    """The default as a user would write it; empty when there is none to speak of."""
    default = field.default
    if default is None or default == () or default == {} or default is False:
        return ""
    if isinstance(default, tuple):
        return ",".join(str(item) for item in default)
    if isinstance(default, bool):
        return "on"
    return written_size(default) if field.option.size else str(default)


def shown_flag(field: Field) -> str:
    """The flag a user types: an option that is on by default is turned off with `--no-...`."""
    return "--no-" + field.flag.removeprefix("--") if field.default is True else field.flag


def requirement(field: Field) -> str:
    """What a value of the option must be, in words."""
    option = field.option
    words = "one of " + ", ".join(option.choices) if option.choices else field.kind.words
    low = None if option.low is None else _bound(option.low, option.size)
    high = None if option.high is None else _bound(option.high, option.size)
    if option.above_low and high is not None:
        words += f" above {low} and at most {high}"
    elif low is not None and high is not None:
        words += f" between {low} and {high}"
    elif low is not None:
        words += f" above {low}" if option.above_low else f" of at least {low}"
    elif high is not None:
        words += f" of at most {high}"
    if option.max_items is not None:
        words += f", at most {option.max_items} of them"
    return words + (", or None" if field.optional else "")


def _within(option: Option, number: float) -> bool:
    if option.low is not None and (number < option.low or (option.above_low and number == option.low)):
        return False
    return option.high is None or number <= option.high


def checked(field: Field, value: Any) -> Any:
    """The value, normalised. Raises ValueError("got ..., must be ...") when the option cannot have it."""
    if value is None and field.optional:
        return None
    option = field.option
    try:
        normal = field.kind.convert(value)
    except (ValueError, TypeError, ArithmeticError):
        raise ValueError(f"got {_quoted(field, value)}, must be {requirement(field)}") from None
    items = normal.values() if isinstance(normal, dict) else normal if isinstance(normal, tuple) else (normal,)
    if isinstance(normal, (dict, tuple)) and option.max_items is not None and len(items) > option.max_items:
        raise ValueError(f"got {len(items)} of them, must be {requirement(field)}")
    for item in items:
        if (option.choices and item not in option.choices) or (isinstance(item, (int, float)) and not _within(option, item)):
            raise ValueError(f"got {_quoted(field, item)}, must be {requirement(field)}")
    return normal


def _quoted(field: Field, value: Any) -> str:
    return "a value that is not shown here" if field.option.secret else shown(value)


def read(field: Field, text: str) -> Any:
    """The value a text of the command line or the environment stands for, checked. Raises ValueError("got ..., must be ...")."""
    written = field._replace(optional=False)  # None is written by leaving the option out
    try:
        value = field.kind.read(text)
    except (ValueError, TypeError):
        raise ValueError(f"got {_quoted(field, text)}, must be {requirement(written)}") from None
    return checked(written, value)


def disclosed(config: Any) -> dict[str, Any]:
    """The fields of a declared dataclass by name, as a report may show them: keys are `***`."""
    values = {field.name: (field, getattr(config, field.name)) for field in fields_of(type(config))}
    return {name: MASK if field.option.secret and value else value for name, (field, value) in values.items()}


def options_table(declaration: type, *, variables: bool = False) -> str:
    """A Markdown table of the options a dataclass declares."""
    head = ["name", "flag", *(["environment"] if variables else []), "default", "value", "meaning"]
    rows = [head, ["---"] * len(head)]
    for field in fields_of(declaration):
        option = field.option
        flags = [shown_flag(field), *([option.off_flag] if option.off_flag else [])]
        variable = [", ".join(f"`{variable_of(flag)}`" for flag in (field.flag, *flags[1:]))] if variables else []
        names = "positional" if option.positional else ", ".join(f"`{flag}`" for flag in flags)
        default = f"`{written_default(field)}`" if written_default(field) else "off" if field.default is False else "none"
        meaning = f"{option.help} `{shown_flag(field)}`: {option.off_help}" if option.off_help else option.help
        rows.append([f"`{field.name}`", names, *variable, default, requirement(field), meaning])
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
