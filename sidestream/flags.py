"""Flags: argparse with one-line errors, and the flags of the options that a dataclass declares."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from sidestream.errors import InvalidRequest

if TYPE_CHECKING:
    from sidestream.options import Field


class UsageError(Exception):
    """The command line itself cannot be understood."""


class HelpAsked(Exception):
    """`--help` was given; the message is the text."""


class Parser(argparse.ArgumentParser):
    """argparse with positional `words`, one-line errors that offer the nearest flag, and values that may begin with a dash."""

    def __init__(self, command: str, *, words: str, words_help: str, **keywords: Any) -> None:
        keywords |= {"allow_abbrev": False, "argument_default": argparse.SUPPRESS}
        super().__init__(prog=f"sidestream {command}", **keywords)
        self.add_argument("words", nargs="*", metavar=words, help=words_help)
        self.nargs: dict[str, Any] = {"-h": 0, "--help": 0}  # of each flag: None takes a value, "?" may take one
        self.readers: dict[str, Callable[[str], Any]] = {}
        self.meant: dict[str, str] = {}  # of a flag that is not shown, the one that is
        self.refused: dict[str, str] = {}  # other engines' flags that there cannot be, and why
        self.doubts: list[str] = []  # complaints about a word after a flag with an optional value, should it be meant as one

    def option(self, group: argparse._ActionsContainer, *flags: str, **keywords: Any) -> None:
        action = group.add_argument(*flags, **keywords)
        self.nargs |= dict.fromkeys(flags, action.nargs)
        self.readers |= dict.fromkeys(flags, keywords.get("type", str))

    def ignore(self, *flags: str) -> None:
        """Accept other engines' switches for what is always so here, and do nothing about them."""
        for flag in flags:
            self.option(self, flag, action="store_true", help=argparse.SUPPRESS, dest=f"ignored {flag}")

    def parse(self, words: Sequence[str]) -> dict[str, Any]:
        """The arguments that were given, by name; `words` always. Raises UsageError."""
        cut = words.index("--") if "--" in words else len(words)
        for flag in (word.split("=")[0] for word in words[:cut]):
            if flag in self.refused:
                self.error(f"{flag}: {self.refused[flag]}")
        given, unknown = self.parse_known_intermixed_args(self._joined(words[:cut]))
        if unknown:
            from sidestream.options import nearest

            flag = unknown[0].split("=")[0]
            near = nearest(flag, self.nargs)
            other = f"See {self.prog} --help; words that begin with a dash go after --"
            advice = f"Did you mean {self.meant.get(near, near)}?" if near else other
            self.error(f"unknown flag {flag}. {advice}")
        arguments = vars(given)
        arguments["words"] = [*arguments.get("words", ()), *words[cut + 1 :]]
        if self.doubts and len(arguments["words"]) > 1:
            self.error(self.doubts[0])
        return arguments

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {re.sub('argument (?=-)', '', message)}")

    def print_help(self, file: Any = None) -> NoReturn:
        raise HelpAsked(self.format_help().rstrip())

    def _joined(self, words: Sequence[str]) -> list[str]:
        """`--flag value` as `--flag=value` where argparse would guess wrong.

        It takes a value that begins with a dash (`-1,2`) for a flag, and whatever follows a flag with an optional value for it.
        """
        joined: list[str] = []
        for word in words:
            flag = joined[-1] if joined and joined[-1] in self.nargs else ""
            is_flag = word.split("=")[0] in self.nargs
            if flag and self.nargs[flag] is None and word.startswith("-") and not is_flag:
                joined[-1] = f"{flag}={word}"
            elif flag and self.nargs[flag] == "?" and not is_flag:
                refusal = self._refusal(flag, word)
                if refusal is None:
                    joined[-1] = f"{flag}={word}"
                else:
                    joined[-1:] = [f"{flag}=true", word]
                    self.doubts.append(f"{flag}: {refusal}. If {word!r} is the model or the prompt, write it before the flag")
            else:
                joined.append(word)
        return joined

    def _refusal(self, flag: str, word: str) -> str | None:
        try:
            self.readers[flag](word)
        except argparse.ArgumentTypeError as error:
            return str(error)
        return None


def add_options(
    parser: Parser, title: str, declaration: type, *, variables: bool = False, defaults: Mapping[str, str] | None = None
) -> None:
    """A flag for each option that a dataclass declares; `defaults` are those of this command that differ."""
    from sidestream.options import fields_of, written_default

    group = parser.add_argument_group(title)
    for field in fields_of(declaration):
        if field.option.positional:
            others = [flag for flag in field.option.aliases if flag not in parser.nargs]
            parser.option(group, *others, dest=field.name, type=_reader(field), help=argparse.SUPPRESS)
        else:
            _add_option(parser, group, field, (defaults or {}).get(field.name, written_default(field)), variables)


def _add_option(parser: Parser, group: argparse._ArgumentGroup, field: Field, default: str, variables: bool) -> None:
    from sidestream.options import shown_flag, variable_of

    option, flag = field.option, shown_flag(field)

    def described(text: str, *notes: str) -> str:
        if option.hidden:
            return argparse.SUPPRESS
        noted = [note for note in notes if note]
        return (text + (f" [{'; '.join(noted)}]" if noted else "")).replace("%", "%%")

    text = described(option.help, f"default: {default}" if default else "", field.variable if variables else "")
    keywords: dict[str, Any] = {"dest": field.name}
    if option.off_flag is not None:
        either = group.add_mutually_exclusive_group()
        parser.option(either, flag, action="store_true", help=text, **keywords)
        opposite = described(f"The opposite of {flag}.", variable_of(option.off_flag) if variables else "")
        parser.option(either, option.off_flag, action="store_false", help=opposite, **keywords)
        _add_aliases(parser, either, flag, option.aliases, keywords | {"action": "store_true"})
        _add_aliases(parser, either, option.off_flag, option.off_aliases, keywords | {"action": "store_false"})
        return
    if isinstance(field.default, bool) and field.kind.metavar is None:
        keywords["action"] = "store_false" if field.default else "store_true"
        text = described(option.off_help) if option.off_help else text
    elif isinstance(field.default, bool):  # also has a value that is a word
        keywords |= {"nargs": "?", "const": True, "type": _reader(field), "metavar": field.kind.metavar}
    else:
        metavar = option.metavar or ("{" + ",".join(option.choices) + "}" if option.choices else field.kind.metavar)
        keywords |= {"type": _reader(field), "metavar": metavar}
        if field.kind.combine is not None:
            keywords["action"] = "append"
    parser.option(group, flag, help=text, **keywords)
    _add_aliases(parser, group, flag, option.aliases, keywords)


def _add_aliases(parser: Parser, group: argparse._ActionsContainer, flag: str, aliases: Sequence[str], keywords: Mapping[str, Any]) -> None:
    if aliases:
        parser.option(group, *aliases, **{**keywords, "help": argparse.SUPPRESS})
        parser.meant |= dict.fromkeys(aliases, flag)


def _reader(field: Field) -> Callable[[str], Any]:
    from sidestream.options import read

    def value_of(text: str) -> Any:
        try:
            return read(field, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value_of


def given_options(arguments: dict[str, Any], declaration: type) -> dict[str, Any]:
    """Those of the arguments that belong to a dataclass; the parts of a repeated flag are put together."""
    from sidestream.options import fields_of

    given = {}
    for field in fields_of(declaration):
        if field.name in arguments:
            value = arguments[field.name]
            try:
                given[field.name] = value if field.kind.combine is None else field.kind.combine(value)
            except ValueError as error:
                raise InvalidRequest(field.name, str(error)) from None
    return given
