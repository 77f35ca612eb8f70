"""The command line. Nothing heavy is imported before a command needs it: `--help` answers at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from sidestream import __version__
from sidestream.errors import ConfigError, InvalidRequest, ModelError, SidestreamError

if TYPE_CHECKING:
    from sidestream.options import Field
    from sidestream.output import Output

EXIT_FAILURE, EXIT_USAGE, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 78, 130


class UsageError(Exception):
    """The command line itself cannot be understood."""


class Parser(argparse.ArgumentParser):
    """argparse with positional `words`, one-line errors that offer the nearest flag, and values that may begin with a dash."""

    def __init__(self, command: str, *, words: str, words_help: str, **keywords: Any) -> None:
        super().__init__(prog=f"sidestream {command}", allow_abbrev=False, argument_default=argparse.SUPPRESS, **keywords)
        self.add_argument("words", nargs="*", metavar=words, help=words_help)
        self.nargs: dict[str, Any] = {"-h": 0, "--help": 0}  # of each flag: None takes a value, "?" may take one
        self.readers: dict[str, Callable[[str], Any]] = {}

    def option(self, group: argparse._ActionsContainer, *flags: str, **keywords: Any) -> None:
        action = group.add_argument(*flags, **keywords)
        self.nargs |= dict.fromkeys(flags, action.nargs)
        self.readers |= dict.fromkeys(flags, keywords.get("type", str))

    def parse(self, words: Sequence[str]) -> dict[str, Any]:
        """The arguments that were given, by name; `words` always. Raises UsageError."""
        cut = words.index("--") if "--" in words else len(words)
        given, unknown = self.parse_known_intermixed_args(self._joined(words[:cut]))
        if unknown:
            from sidestream.options import did_you_mean

            flag = unknown[0].split("=")[0]
            advice = did_you_mean(flag, self.nargs) or f"See {self.prog} --help; words that begin with a dash go after --"
            self.error(f"unknown flag {flag}. {advice}")
        arguments = vars(given)
        arguments["words"] = [*arguments.get("words", ()), *words[cut + 1 :]]
        return arguments

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")

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
                if self._reads(flag, word):
                    joined[-1] = f"{flag}={word}"
                else:
                    joined[-1:] = [f"{flag}=true", word]
            else:
                joined.append(word)
        return joined

    def _reads(self, flag: str, word: str) -> bool:
        try:
            self.readers[flag](word)
        except argparse.ArgumentTypeError:
            return False
        return True


def add_options(parser: Parser, title: str, declaration: type, *, variables: bool = False) -> None:
    """A flag for each option that a dataclass declares."""
    from sidestream.options import fields_of

    group = parser.add_argument_group(title)
    for field in fields_of(declaration):
        if not field.option.positional:
            _add_option(parser, group, field, variables)


def _add_option(parser: Parser, group: argparse._ArgumentGroup, field: Field, variables: bool) -> None:
    from sidestream.options import shown_flag, written_default

    option, flag = field.option, shown_flag(field)
    notes = [f"default: {default}"] if (default := written_default(field)) else []
    notes += [field.variable] if variables else []
    text = (option.help + (f" [{'; '.join(notes)}]" if notes else "")).replace("%", "%%")
    keywords: dict[str, Any] = {"dest": field.name}
    if option.off_flag is not None:
        parser.option(group, flag, action="store_true", help=text, **keywords)
        parser.option(group, option.off_flag, action="store_false", help=f"The opposite of {flag}.", **keywords)
        return
    if isinstance(field.default, bool) and field.kind.metavar is None:
        keywords["action"] = "store_false" if field.default else "store_true"
        text = f"Turn off: {text}" if field.default else text
    elif isinstance(field.default, bool):  # also has a value that is a word
        keywords |= {"nargs": "?", "const": True, "type": _reader(field), "metavar": field.kind.metavar}
    else:
        metavar = option.metavar or ("{" + ",".join(option.choices) + "}" if option.choices else field.kind.metavar)
        keywords |= {"type": _reader(field), "metavar": metavar}
        if field.kind.combine is not None:
            keywords["action"] = "append"
    parser.option(group, flag, help=text, **keywords)
    if option.aliases:
        parser.option(group, *option.aliases, **keywords | {"help": argparse.SUPPRESS})


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


def run_parser() -> Parser:
    from sidestream.config import EngineConfig
    from sidestream.params import OutputParams, SamplingParams

    parser = Parser(
        "run",
        words="[MODEL] PROMPT",
        words_help="model (default: smollm2) and prompt; - reads the prompt from standard input",
        usage="sidestream run [MODEL] PROMPT [options]",
        description="Run one prompt and print its text. Engine options can also be set with the environment variables shown.",
    )
    group = parser.add_argument_group("prompt and answer")
    parser.option(group, "--chat", action="store_true", help="Send the prompt as a user's message, in the model's chat template.")
    parser.option(group, "--system", metavar="TEXT", help="System message; needs --chat.")
    parser.option(group, "--prompt-ids", metavar="N,N", type=_token_ids, help="Token ids, in place of PROMPT.")
    parser.option(group, "--stream", action="store_true", help="Print the text as it comes; with --json, one line per part.")
    parser.option(group, "--json", action="store_true", help="Print one JSON object: the output's fields and stats.")
    add_options(parser, "sampling", SamplingParams)
    add_options(parser, "outputs besides the text (with --json)", OutputParams)
    add_options(parser, "engine", EngineConfig, variables=True)
    return parser


def _token_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be token ids such as 1,2,3") from None


def run(words: Sequence[str]) -> int:
    """`sidestream run`: everything that was asked for is checked before a model is loaded."""
    parser = run_parser()
    arguments = parser.parse(words)

    from sidestream.config import EngineConfig
    from sidestream.params import OutputParams, SamplingParams

    model, prompt = _model_and_prompt(parser, arguments)
    sampling = SamplingParams(**given_options(arguments, SamplingParams))
    outputs = given_options(arguments, OutputParams)
    asked = OutputParams(**outputs)
    as_json, streamed = "json" in arguments, "stream" in arguments
    if not as_json and (asked.return_logprob or asked.return_hidden_states):
        parser.error("logprobs and hidden states are printed as JSON only. Add --json")
    if not as_json and streamed and sampling.n > 1:
        parser.error("--stream cannot show several outputs at once. Add --json, or leave one of --stream and --n out")
    options = dict(vars(EngineConfig.from_env(model, **given_options(arguments, EngineConfig))))
    explicit = "log_level" in arguments or bool(os.environ.get("SIDESTREAM_LOG_LEVEL"))

    from sidestream import Engine

    # One prompt needs no report of the start: that is shown when a log level was asked for.
    with _log_on_stderr(options["log_level"] if explicit else "warning"), Engine(options.pop("model"), **options) as engine:
        if streamed:
            prompt = engine.encode_chat(prompt) if "chat" in arguments else prompt
            _print_stream(engine.stream(prompt, sampling, **outputs), as_json)
            if as_json:
                _print_json({"stats": engine.stats()})
        else:
            call = engine.chat if "chat" in arguments else engine.generate
            answers = call(prompt, sampling, **outputs)
            _print_answers(answers if isinstance(answers, list) else [answers], engine.stats() if as_json else None)
    return 0


@contextmanager
def _log_on_stderr(level: str) -> Iterator[None]:
    import logging

    logger, handler = logging.getLogger("sidestream"), logging.StreamHandler()
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _model_and_prompt(parser: Parser, arguments: dict[str, Any]) -> tuple[str | None, Any]:
    """The model, None for the default; the prompt as text, token ids or messages."""
    words = arguments["words"]
    if "system" in arguments and "chat" not in arguments:
        parser.error("--system needs --chat")
    if "prompt_ids" in arguments:
        if "chat" in arguments:
            parser.error("--prompt-ids and --chat exclude each other: a chat template takes text")
        if len(words) > 1:
            parser.error("got a prompt and --prompt-ids. Give one of them")
        return (words[0] if words else None), list(arguments["prompt_ids"])
    if not 1 <= len(words) <= 2:
        got = f"got {len(words)} words" if words else "the prompt is missing"
        parser.error(f'{got}. Write sidestream run [MODEL] "PROMPT", the prompt in quotes')
    prompt = _standard_input() if words[-1] == "-" else words[-1]
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("prompt", "got bytes that are not UTF-8, must be UTF-8 text") from None
    if "chat" in arguments:
        system = [{"role": "system", "content": arguments["system"]}] if "system" in arguments else []
        return words[0] if len(words) == 2 else None, [*system, {"role": "user", "content": prompt}]
    return words[0] if len(words) == 2 else None, prompt


def _standard_input() -> str:
    """All of standard input; the newline that `echo` and editors add at its end is no part of the prompt."""
    try:
        return sys.stdin.read().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise InvalidRequest("prompt", "got standard input that is not UTF-8, must be UTF-8 text") from None


def _print_json(value: dict[str, Any]) -> None:
    import json

    print(json.dumps(value, allow_nan=False), flush=True)


def _print_stream(chunks: Any, as_json: bool) -> None:
    from sidestream.output import output_to_dict

    for chunk in chunks:
        if as_json:
            _print_json(output_to_dict(chunk))
        else:
            print(chunk.text, end="", flush=True)
    if not as_json:
        print()


def _print_answers(answers: Sequence[Output], stats: dict[str, Any] | None) -> None:
    """One answer's fields at the top level of the object; several as the list `outputs`."""
    from sidestream.output import output_to_dict

    if stats is not None:
        fields = [output_to_dict(answer) for answer in answers]
        _print_json({**fields[0], "stats": stats} if len(fields) == 1 else {"outputs": fields, "stats": stats})
        return
    for answer in answers:
        if len(answers) > 1:
            print(f"--- {answer.index + 1} of {len(answers)}")
        print(answer.text)


def pull(words: Sequence[str]) -> int:
    """`sidestream pull`: progress goes to standard error, the path is the last line of standard output."""
    parser = Parser(
        "pull",
        words="NAME",
        words_help="smollm2 (the default), repo/name or repo/name@revision",
        usage="sidestream pull [NAME]",
        description="Fetch a model and print where it is. Nothing is fetched twice.",
    )
    names = parser.parse(words)["words"]
    if len(names) > 1:
        parser.error(f"got {len(names)} names. Give one")

    from sidestream.models.hub import pull as pull_model

    print(pull_model(names[0] if names else "smollm2"))
    return 0


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "run": (run, "run one prompt and print its text, or everything about it as JSON"),
    "pull": (pull, "fetch a model and print where it is"),
}
HELP = "\n".join(
    [
        "usage: sidestream COMMAND ...",
        "",
        "LLM inference whose log-probabilities and hidden states are outputs of the same rank as the text.",
        "",
        "commands:",
        *(f"  {name:6} {words}" for name, (_, words) in COMMANDS.items()),
        "",
        "  -h, --help     this text, or that of a command: sidestream run --help",
        "  --version      the version",
    ]
)


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP, file=sys.stdout if words else sys.stderr)
        return 0 if words else EXIT_USAGE
    if words[0] in ("-V", "--version"):
        print(f"sidestream {__version__}")
        return 0
    if words[0] not in COMMANDS:
        from sidestream.options import did_you_mean

        known = [*COMMANDS, "--help", "--version"]
        raise UsageError(f"sidestream: unknown command {words[0]}. {did_you_mean(words[0], known) or 'See sidestream --help'}")
    return COMMANDS[words[0]][0](words[1:])


def _one_line(error: SidestreamError) -> str:
    message = " ".join(error.message.split())
    return message if error.hint is None else f"{message.rstrip('.')}. {' '.join(error.hint.split())}"


def _is_debugging(words: Sequence[str]) -> bool:
    return "debug" in (os.environ.get("SIDESTREAM_LOG_LEVEL"), *words) or "--log-level=debug" in words


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status. Every failure is one line on standard error that says what to do."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        return _dispatch(words)
    except SystemExit as leave:  # argparse's --help
        return leave.code if isinstance(leave.code, int) else 0
    except UsageError as error:
        status, line = EXIT_USAGE, str(error)
    except InvalidRequest as error:
        status, line = EXIT_USAGE, f"sidestream: {_one_line(error)}"
    except (ConfigError, ModelError) as error:
        status, line = EXIT_CONFIG, f"sidestream: {_one_line(error)}"
    except SidestreamError as error:
        status, line = EXIT_FAILURE, f"sidestream: {_one_line(error)}"
    except KeyboardInterrupt:
        status, line = EXIT_INTERRUPTED, "sidestream: interrupted"
    except BrokenPipeError:  # the reader of our output left; nothing is to be said, also not when Python flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except Exception as error:
        if _is_debugging(words):
            raise
        text = " ".join(str(error).split())
        status, line = EXIT_FAILURE, f"sidestream: {type(error).__name__}: {text}. --log-level debug shows where"
    print(line, file=sys.stderr)
    return status
