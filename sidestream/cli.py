"""The command line. Nothing heavy is imported before a command needs it: `--help` answers at once."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from sidestream import __version__
from sidestream.commands.exits import EXIT_CONFIG, EXIT_FAILURE, EXIT_HELP, EXIT_INTERRUPTED, EXIT_USAGE
from sidestream.commands.terminal import OutputFailed, leave_output, write
from sidestream.errors import ConfigError, DownloadError, InvalidRequest, ModelError, SidestreamError
from sidestream.flags import HelpAsked, UsageError


class Command(NamedTuple):
    """A module of `commands`, what it does, and its exit statuses for a bad configuration and for a model that cannot be had."""

    module: str
    summary: str
    bad_config: int = EXIT_USAGE
    bad_model: int = EXIT_FAILURE


COMMANDS = {
    "serve": Command("serve", "serve a model over HTTP, as OpenAI and SGLang do", EXIT_CONFIG, EXIT_CONFIG),
    "chat": Command("chat", "chat in the terminal, with a model here or with any OpenAI-compatible server"),
    "run": Command("run", "run one prompt and print its text, or everything about it as JSON"),
    "bench": Command("bench", "measure tokens per second, and their share of what the machine could do"),
    "pull": Command("pull", "fetch a model and print where it is"),
    "doctor": Command("doctor", "say what was found on this machine, and what an engine would pick and why"),
}
HELP = "\n".join(
    [
        "usage: sidestream COMMAND ...",
        "",
        "LLM inference whose log-probabilities and hidden states are outputs of the same rank as the text.",
        "",
        "commands:",
        *(f"  {name:6} {command.summary}" for name, command in COMMANDS.items()),
        "",
        "  -h, --help     this text, or that of a command: sidestream run --help",
        "  --version      the version",
        "",
        *textwrap.wrap(f"{EXIT_HELP} The server ends with 78 when it cannot start with its configuration.", 100),
    ]
)


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        if not words:
            print(HELP, file=sys.stderr)
            return EXIT_USAGE
        write(HELP)
        return 0
    if words[0] in ("-V", "--version"):
        write(f"sidestream {__version__}")
        return 0
    if words[0] not in COMMANDS:
        from sidestream.options import did_you_mean

        known = [*COMMANDS, "--help", "--version"]
        raise UsageError(f"sidestream: unknown command {words[0]}. {did_you_mean(words[0], known) or 'See sidestream --help'}")
    try:
        status: int = import_module(f"sidestream.commands.{COMMANDS[words[0]].module}").main(words[1:])
    except HelpAsked as asked:
        write(str(asked))
        return 0
    return status


def _in_flags(line: str) -> str:
    """A message that speaks of fields, in the words of the command line: `top_p` is --top-p."""
    from sidestream.config import declared_options
    from sidestream.options import fields_of, shown_flag
    from sidestream.params import OutputParams, SamplingParams

    declared = [*declared_options(), *fields_of(SamplingParams), *fields_of(OutputParams)]
    flags = {field.name: shown_flag(field) for field in declared if not field.option.positional} | {"messages": "--chat"}
    field, colon, rest = line.partition(": ")
    unmistakable = "|".join(name for name in flags if "_" in name)
    rest = re.sub(rf"(?<![\w'])({unmistakable})(?![\w'])", lambda name: flags[name[0]], rest)
    return flags.get(field, field) + colon + rest


def _is_debugging(words: Sequence[str]) -> bool:
    return "debug" in (os.environ.get("SIDESTREAM_LOG_LEVEL"), *words) or "--log-level=debug" in words


def _refusal(words: Sequence[str], error: SidestreamError) -> tuple[int, str]:
    """The exit status of an error that was raised on purpose, and the line that says it."""
    command = COMMANDS[words[0]]
    if isinstance(error, InvalidRequest):
        return EXIT_USAGE, _in_flags(error.one_line())
    if isinstance(error, ConfigError):
        return command.bad_config, _in_flags(error.one_line())
    # What could not be fetched now may be there next time.
    lasting = isinstance(error, ModelError) and not isinstance(error, DownloadError)
    return command.bad_model if lasting else EXIT_FAILURE, error.one_line()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status. Every failure is one line on standard error that says what to do."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        return _dispatch(words)
    except UsageError as error:
        status, line = EXIT_USAGE, str(error)
    except SidestreamError as error:
        status, line = _refusal(words, error)
        line = f"sidestream: {line}"
    except KeyboardInterrupt:
        status, line = EXIT_INTERRUPTED, "sidestream: interrupted"
    except OutputFailed as error:
        leave_output()
        status, line = EXIT_FAILURE, f"sidestream: {error}"
    except BrokenPipeError:  # the reader of our output left; nothing is to be said
        leave_output()
        return EXIT_FAILURE
    except Exception as error:
        if _is_debugging(words):
            raise
        text = " ".join(str(error).split())
        status, line = EXIT_FAILURE, f"sidestream: {type(error).__name__}: {text}. --log-level debug shows where"
    print(line, file=sys.stderr)
    return status
