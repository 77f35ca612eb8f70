"""The command line. Nothing heavy is imported before a command needs it: `--help` answers at once."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sidestream import __version__
from sidestream.errors import ConfigError, InvalidRequest, ModelError, SidestreamError
from sidestream.flags import HelpAsked, Parser, UsageError, add_options, given_options

if TYPE_CHECKING:
    from sidestream import Engine
    from sidestream.config import EngineConfig
    from sidestream.output import Output

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
EXIT_HELP = (
    "Exit status: 0 when all went well; 2 when what was asked has to change: the command, an option, an environment variable or the "
    "prompt; 1 when it failed otherwise, such as a model that cannot be found or read; 130 after Ctrl-C."
)
RUN_LOG_LEVEL = "warning"  # one prompt needs no report of the start: that is shown when a log level was asked for
REPETITIONS, MAX_REPETITIONS = 3, 100  # of each workload of a benchmark


class OutputFailed(Exception):
    """Standard output cannot be written: the disk is full, for one."""


def run_parser() -> Parser:
    from sidestream.config import CACHE_HELP, EngineConfig
    from sidestream.params import OutputParams, SamplingParams

    parser = Parser(
        "run",
        words="[MODEL] PROMPT",
        words_help="model (default: smollm2) [SIDESTREAM_MODEL] and prompt; - reads the prompt from standard input",
        usage="sidestream run [MODEL] PROMPT [options]",
        description="Run one prompt and print its text. Engine options can also be set with the environment variables shown.",
        epilog=f"{CACHE_HELP} {EXIT_HELP}",
    )
    group = parser.add_argument_group("prompt and answer")
    parser.option(group, "--chat", action="store_true", help="Send the prompt as a user's message, in the model's chat template.")
    parser.option(group, "--system", metavar="TEXT", help="System message; needs --chat.")
    parser.option(group, "--prompt-ids", metavar="N,N", type=_token_ids, help="Token ids, in place of PROMPT.")
    parser.option(group, "--stream", action="store_true", help="Print the text as it comes; with --json, one line per part.")
    parser.option(group, "--json", action="store_true", help="Print one JSON object: the output's fields and stats.")
    add_options(parser, "sampling", SamplingParams)
    add_options(parser, "outputs besides the text (with --json)", OutputParams)
    add_options(parser, "engine", EngineConfig, variables=True, defaults={"log_level": RUN_LOG_LEVEL})
    return parser


def _token_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"got {text!r}, must be token ids such as 1,2,3") from None


def run(words: Sequence[str]) -> int:
    """`sidestream run`: everything that was asked for is checked before a model is loaded."""
    parser = run_parser()
    arguments = parser.parse(words)

    from sidestream.config import EngineConfig
    from sidestream.params import HIDDEN_STATES_DETAILS, OutputParams, SamplingParams

    model, prompt = _model_and_prompt(parser, arguments)
    sampling = SamplingParams(**given_options(arguments, SamplingParams))
    outputs = given_options(arguments, OutputParams)
    for name in HIDDEN_STATES_DETAILS:
        if name in outputs and not outputs.get("return_hidden_states"):
            parser.error(f"--{name.replace('_', '-')} needs --return-hidden-states")
    asked = OutputParams(**outputs)
    as_json, streamed = "json" in arguments, "stream" in arguments
    if not as_json and (asked.return_logprob or asked.return_hidden_states):
        parser.error("logprobs and hidden states are printed as JSON only. Add --json")
    if not as_json and streamed and sampling.n > 1:
        parser.error("--stream cannot show several outputs at once. Add --json, or leave one of --stream and --n out")
    options, level = _engine_options(model, arguments, EngineConfig)

    from sidestream import Engine

    with _log_on_stderr(level), _open(Engine, options, arguments) as engine:
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


def _engine_options(model: str | None, arguments: dict[str, Any], config: type[EngineConfig]) -> tuple[dict[str, Any], str]:
    """The options of the engine, and the least severity that is shown."""
    options = dict(vars(config.from_env(model, **given_options(arguments, config))))
    explicit = "log_level" in arguments or bool(os.environ.get("SIDESTREAM_LOG_LEVEL"))
    return options, options["log_level"] if explicit else RUN_LOG_LEVEL


def _open(engine: type[Engine], options: dict[str, Any], arguments: dict[str, Any]) -> Engine:
    try:
        return engine(options.pop("model"), **options)
    except ModelError as error:
        if "prompt_ids" in arguments and arguments["words"]:  # it may have been meant as the prompt
            hint = "With --prompt-ids there is no PROMPT: the one word is the model."
            raise ModelError(error.message, hint=f"{hint} {error.hint or ''}".strip()) from error
        raise


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


def _write(text: str, end: str = "\n") -> None:
    """Standard output, at once: a disk that is full shows here, and not when Python ends."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputFailed(f"standard output cannot be written: {error.strerror or error}") from error


def _leave_output() -> None:
    """What is still buffered goes nowhere, or Python would try again at its end, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_json(value: dict[str, Any]) -> None:
    import json

    _write(json.dumps(value, allow_nan=False))


def _print_stream(chunks: Any, as_json: bool) -> None:
    from sidestream.output import output_to_dict

    for chunk in chunks:
        if as_json:
            _print_json(output_to_dict(chunk))
        else:
            _write(chunk.text, end="")
    if not as_json:
        _write("")


def _print_answers(answers: Sequence[Output], stats: dict[str, Any] | None) -> None:
    """One answer's fields at the top level of the object; several as the list `outputs`."""
    from sidestream.output import output_to_dict

    if stats is not None:
        fields = [output_to_dict(answer) for answer in answers]
        _print_json({**fields[0], "stats": stats} if len(fields) == 1 else {"outputs": fields, "stats": stats})
        return
    for answer in answers:
        if len(answers) > 1:
            _write(f"--- {answer.index + 1} of {len(answers)}")
        _write(answer.text)


def pull(words: Sequence[str]) -> int:
    """`sidestream pull`: progress goes to standard error, the path is the last line of standard output."""
    from sidestream.config import CACHE_HELP, warn_of_unknown_variables

    parser = Parser(
        "pull",
        words="NAME",
        words_help="smollm2 (the default), repo/name or repo/name@revision",
        usage="sidestream pull [NAME]",
        description="Fetch a model and print where it is. Nothing is fetched twice.",
        epilog=f"{CACHE_HELP} {EXIT_HELP}",
    )
    names = parser.parse(words)["words"]
    if len(names) > 1:
        parser.error(f"got {len(names)} names. Give one")

    warn_of_unknown_variables()

    from sidestream.models.hub import pull as pull_model

    _write(str(pull_model(names[0] if names else "smollm2")))
    return 0


def bench_parser() -> Parser:
    from sidestream.bench.work import CASES
    from sidestream.config import CACHE_HELP, EngineConfig

    def cases(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        if unknown := [case for case in chosen if case not in CASES]:
            raise ArgumentTypeError(f"got {unknown[0]!r}, must be some of {','.join(CASES)}")
        return chosen

    parser = Parser(
        "bench",
        words="offline [MODEL]",
        words_help="what to measure, and the model (default: smollm2) [SIDESTREAM_MODEL]",
        usage="sidestream bench offline [MODEL] [options]",
        description="Measure tokens per second on fixed workloads, and their share of what this machine could do at most.",
        epilog=f"{CACHE_HELP} {EXIT_HELP}",
    )
    group = parser.add_argument_group("measuring")
    listed = ",".join(CASES)
    parser.option(group, "--cases", metavar="CASE,CASE", type=cases, help=f"Some of {listed} [default: all].")
    parser.option(group, "--repetitions", metavar="N", type=_repetitions, help=f"Of each, in turn [default: {REPETITIONS}].")
    parser.option(group, "--json", action="store_true", help="Print one JSON object with every number.")
    add_options(parser, "engine", EngineConfig, variables=True, defaults={"log_level": RUN_LOG_LEVEL})
    return parser


def _repetitions(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_REPETITIONS:
        raise ArgumentTypeError(f"got {text!r}, must be an integer between 1 and {MAX_REPETITIONS}")
    return int(text)


def bench(words: Sequence[str]) -> int:
    """`sidestream bench offline`: a table, or every number as JSON."""
    if words and words[0] == "serve":
        from sidestream.bench.serve_command import main as bench_serve

        return bench_serve(words[1:])
    parser = bench_parser()
    arguments = parser.parse(words)
    kind, *models = arguments["words"] or [""]
    if kind != "offline":
        parser.error(f"{f'got {kind!r}' if kind else 'what to measure is missing'}. Write sidestream bench offline [MODEL]")
    if len(models) > 1:
        parser.error(f"got {len(models)} models. Give one")

    from sidestream.bench.work import CASES
    from sidestream.config import EngineConfig

    options, level = _engine_options(models[0] if models else None, arguments, EngineConfig)

    from sidestream import Engine
    from sidestream.bench.offline import HEAD, Bench, as_json, as_text, works_of
    from sidestream.observe.table import table_lines

    with _log_on_stderr(level), Engine(options.pop("model"), **options) as engine:
        measured = Bench(engine, works_of(arguments.get("cases", CASES)))
        results = measured.run(arguments.get("repetitions", REPETITIONS))
        if "json" in arguments:
            _print_json(as_json(measured, results))
        else:
            above, rows, below = as_text(measured, results)
            _write("\n".join([*above, "", *table_lines(HEAD, rows), "", *below]))
    return 0


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "run": (run, "run one prompt and print its text, or everything about it as JSON"),
    "bench": (bench, "measure tokens per second, and their share of what the machine could do"),
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
        "",
        *textwrap.wrap(EXIT_HELP, 100),
    ]
)


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        if not words:
            print(HELP, file=sys.stderr)
            return EXIT_USAGE
        _write(HELP)
        return 0
    if words[0] in ("-V", "--version"):
        _write(f"sidestream {__version__}")
        return 0
    if words[0] not in COMMANDS:
        from sidestream.options import did_you_mean

        known = [*COMMANDS, "--help", "--version"]
        raise UsageError(f"sidestream: unknown command {words[0]}. {did_you_mean(words[0], known) or 'See sidestream --help'}")
    try:
        return COMMANDS[words[0]][0](words[1:])
    except HelpAsked as asked:
        _write(str(asked))
        return 0


def _one_line(error: SidestreamError) -> str:
    message = " ".join(error.message.split())
    return message if error.hint is None else f"{message.rstrip('.')}. {' '.join(error.hint.split())}"


def _in_flags(line: str) -> str:
    """A message that speaks of fields, in the words of the command line: `top_p` is --top-p."""
    from sidestream.config import EngineConfig
    from sidestream.options import fields_of, shown_flag
    from sidestream.params import OutputParams, SamplingParams

    declared = [*fields_of(EngineConfig), *fields_of(SamplingParams), *fields_of(OutputParams)]
    flags = {field.name: shown_flag(field) for field in declared if not field.option.positional} | {"messages": "--chat"}
    field, colon, rest = line.partition(": ")
    unmistakable = "|".join(name for name in flags if "_" in name)
    rest = re.sub(rf"(?<![\w'])({unmistakable})(?![\w'])", lambda name: flags[name[0]], rest)
    return flags.get(field, field) + colon + rest


def _is_debugging(words: Sequence[str]) -> bool:
    return "debug" in (os.environ.get("SIDESTREAM_LOG_LEVEL"), *words) or "--log-level=debug" in words


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status. Every failure is one line on standard error that says what to do."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        return _dispatch(words)
    except UsageError as error:
        status, line = EXIT_USAGE, str(error)
    except (InvalidRequest, ConfigError) as error:
        status, line = EXIT_USAGE, f"sidestream: {_in_flags(_one_line(error))}"
    except SidestreamError as error:
        status, line = EXIT_FAILURE, f"sidestream: {_one_line(error)}"
    except KeyboardInterrupt:
        status, line = EXIT_INTERRUPTED, "sidestream: interrupted"
    except OutputFailed as error:
        _leave_output()
        status, line = EXIT_FAILURE, f"sidestream: {error}"
    except BrokenPipeError:  # the reader of our output left; nothing is to be said
        _leave_output()
        return EXIT_FAILURE
    except Exception as error:
        if _is_debugging(words):
            raise
        text = " ".join(str(error).split())
        status, line = EXIT_FAILURE, f"sidestream: {type(error).__name__}: {text}. --log-level debug shows where"
    print(line, file=sys.stderr)
    return status
