"""Where the values of options come from: explicit arguments, then `SIDESTREAM_*` variables, then a file, then the defaults."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from sidestream.errors import ConfigError
from sidestream.options import ENVIRONMENT_PREFIX, Field, checked, did_you_mean, read, shown, variable_of

log = logging.getLogger("sidestream")

FORMATS = (".toml", ".yaml", ".yml")
PACKAGES = {"yaml": "pyyaml", "tomli": "tomli"}  # of the modules that read them, where Python does not bring them
# Variables that are not options: where models are kept, what the native kernels may use, and what only tests read.
OTHER_VARIABLES = ("SIDESTREAM_CACHE", "SIDESTREAM_CPU_ISA")
TEST_VARIABLES = "SIDESTREAM_TEST_"


class Given(NamedTuple):
    """A value that somebody gave, and from where: a variable or a file; empty for an explicit argument."""

    value: Any
    source: str


def gather(
    declared: Iterable[Field], explicit: Mapping[str, Any], environ: Mapping[str, str], file: Mapping[str, Given]
) -> dict[str, Given]:
    """What is given for the options, by name; an option that is left to its default is not in it. Raises ConfigError."""
    given: dict[str, Given] = {}
    for field in declared:
        if field.name in explicit:
            given[field.name] = Given(explicit[field.name], "")
        elif (found := _from_environment(field, environ)) is not None:
            given[field.name] = found
        elif field.name in file:
            given[field.name] = file[field.name]
    return given


def build(declaration: type, given: Mapping[str, Given]) -> Any:
    """The dataclass with these values. Raises ConfigError, which says where the values it speaks of come from."""
    try:
        return declaration(**{name: value for name, (value, _) in given.items()})
    except ConfigError as error:
        concerned = error.message.partition(":")[0] if ":" in error.message else ""
        named = [name for name in given if name == concerned or f"{name}=" in error.message]
        origins = [f"{name} comes from {given[name].source}." for name in named if given[name].source]
        hint = " ".join([*([error.hint] if error.hint else []), *origins])
        raise ConfigError(error.message, hint=hint or None) from None


def read_file(path: Path, declared: Iterable[Field]) -> dict[str, Given]:
    """The options that a TOML or YAML file sets. Raises ConfigError, naming the file and the key."""
    fields = {field.name: field for field in declared}
    written = {name: (field, True) for name, field in fields.items()}
    for field in fields.values():
        written[_key(field.flag)] = (field, True)
        if field.option.off_flag is not None:
            written[_key(field.option.off_flag)] = (field, False)
    values: dict[str, Given] = {}
    keys: dict[str, str] = {}  # of each option, as the file spells it
    for key, value in _parsed(path).items():
        where = f"{path}: key {key!r}"
        if not isinstance(key, str) or key.replace("-", "_") not in written:
            known = [name if "_" in str(key) else name.replace("_", "-") for name in written]
            raise ConfigError(f"{where} is no option", hint=did_you_mean(str(key), known) or "docs/options.md lists them.")
        field, straight = written[key.replace("-", "_")]
        if field.name in keys:
            raise ConfigError(f"{where} sets what key {keys[field.name]!r} has set. Keep one of them")
        try:
            value = checked(field, value)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        keys[field.name] = key
        values[field.name] = Given(value if straight or value is None else not value, str(path))
    return values


def _key(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _parsed(path: Path) -> dict[Any, Any]:
    """The file's keys and values. Raises ConfigError."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"config: got {shown(str(path))}, must be a file that ends in .toml, .yaml or .yml")
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"config: {path} cannot be read: {reason}") from None
    try:
        parsed = _from_toml(text) if path.suffix.lower() == ".toml" else _from_yaml(text)
    except ImportError as error:
        raise ConfigError(f"{path}: {error.name} is not installed", hint=f"pip install {PACKAGES[error.name or '']}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path}: got {shown(parsed)}, must be keys with values, one for each option")
    return parsed


def _from_toml(text: str) -> Any:
    return import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads(text)


def _from_yaml(text: str) -> Any:
    yaml = import_module("yaml")
    try:
        # YAML itself would keep the last of two values without a word.
        pairs = getattr(yaml.compose(text, Loader=yaml.SafeLoader), "value", ())
        keys = [pair[0].value for pair in pairs if isinstance(pair, tuple)]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise ValueError(f"key {twice!r} is there twice")
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f"line {mark.line + 1}: "
        raise ValueError(f"{line}{getattr(error, 'problem', None) or 'it is not YAML'}") from None


def warn_of_unknown_variables(declared: Iterable[Field], environ: Mapping[str, str]) -> None:
    """A misspelt variable would set nothing, silently."""
    for variable, advice in unknown_variables(declared, environ).items():
        _warn(variable, advice)


def unknown_variables(declared: Iterable[Field], environ: Mapping[str, str]) -> dict[str, str]:
    """The `SIDESTREAM_*` variables that set nothing, and what may have been meant."""
    flags = [flag for field in declared for flag in (field.flag, field.option.off_flag) if flag is not None]
    known = [*map(variable_of, flags), *OTHER_VARIABLES]
    return {
        variable: did_you_mean(variable, known) or "See docs/options.md."
        for variable in environ
        if variable.startswith(ENVIRONMENT_PREFIX) and not variable.startswith(TEST_VARIABLES) and variable not in known
    }


@cache  # once per process
def _warn(variable: str, advice: str) -> None:
    log.warning("%s is set, but there is no such variable. %s", variable, advice)


def _from_environment(field: Field, environ: Mapping[str, str]) -> Given | None:
    """What the environment sets the option to. Raises ConfigError, naming the variable."""
    found: Given | None = None
    sources = [(variable_of(field.flag), True)]
    if field.option.off_flag is not None:
        sources.append((variable_of(field.option.off_flag), False))
    for variable, straight in sources:
        text = environ.get(variable, "")
        if not text:  # a variable that is set but empty counts as not set
            continue
        try:
            value = _read(field, text)
        except ValueError as error:
            raise ConfigError(f"{variable}: {error}") from None
        value = value if straight else not value
        if found is not None and found.value != value:
            raise ConfigError(f"{variable}: got {text}, which contradicts {found.source}={environ[found.source]}")
        found = Given(value, variable)
    return found


def _read(field: Field, text: str) -> Any:
    """A variable holds all values of a flag that may be repeated, separated by commas."""
    if field.kind.combine is None:
        return read(field, text)
    return checked(field, field.kind.combine([read(field, part.strip()) for part in text.split(",")]))
