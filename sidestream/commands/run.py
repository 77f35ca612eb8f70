"""`sidestream run`: one prompt."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sidestream.commands.engine import add_engine_options, engine_options, one_model
from sidestream.commands.exits import EXIT_HELP
from sidestream.commands.terminal import log_on_stderr, read_all, write, write_json
from sidestream.config import CACHE_HELP, CONFIG_HELP
from sidestream.errors import InvalidRequest, ModelError
from sidestream.flags import Parser, add_options, given_options
from sidestream.params import HIDDEN_STATES_DETAILS, OutputParams, SamplingParams

if TYPE_CHECKING:
    from sidestream import Engine
    from sidestream.output import Output


def run_parser() -> Parser:
    parser = Parser(
        "run",
        words="[MODEL] PROMPT",
        words_help="model (default: smollm2) [SIDESTREAM_MODEL] and prompt; - reads the prompt from standard input",
        usage="sidestream run [MODEL] PROMPT [options]",
        description="Run one prompt and print its text. Engine options can also be set with the environment variables shown.",
        epilog=f"{CONFIG_HELP} {CACHE_HELP} {EXIT_HELP}",
    )
    group = parser.add_argument_group("prompt and answer")
    parser.option(group, "--chat", action="store_true", help="Send the prompt as a user's message, in the model's chat template.")
    parser.option(group, "--system", metavar="TEXT", help="System message; needs --chat.")
    parser.option(group, "--prompt-ids", metavar="N,N", type=_token_ids, help="Token ids, in place of PROMPT.")
    parser.option(group, "--stream", action="store_true", help="Print the text as it comes; with --json, one line per part.")
    parser.option(group, "--json", action="store_true", help="Print one JSON object: the output's fields and stats.")
    add_options(parser, "sampling", SamplingParams)
    add_options(parser, "outputs besides the text (with --json)", OutputParams)
    add_engine_options(parser)
    return parser


def _token_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"got {text!r}, must be token ids such as 1,2,3") from None


def main(words: Sequence[str]) -> int:
    """Everything that was asked for is checked before a model is loaded."""
    parser = run_parser()
    arguments = parser.parse(words)
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
    options, level = engine_options(model, arguments)

    from sidestream import Engine

    with log_on_stderr(level), _open(Engine, options, arguments) as engine:
        if streamed:
            prompt = engine.encode_chat(prompt) if "chat" in arguments else prompt
            _write_stream(engine.stream(prompt, sampling, **outputs), as_json)
            if as_json:
                write_json({"stats": engine.stats()})
        else:
            call = engine.chat if "chat" in arguments else engine.generate
            answers = call(prompt, sampling, **outputs)
            _write_answers(answers if isinstance(answers, list) else [answers], engine.stats() if as_json else None)
    return 0


def _open(engine: type[Engine], options: dict[str, Any], arguments: dict[str, Any]) -> Engine:
    try:
        return engine(options.pop("model"), **options)
    except ModelError as error:
        if "prompt_ids" in arguments and arguments["words"]:  # it may have been meant as the prompt
            hint = "With --prompt-ids there is no PROMPT: the one word is the model."
            raise ModelError(error.message, hint=f"{hint} {error.hint or ''}".strip()) from error
        raise


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
        return one_model(parser, arguments, words), list(arguments["prompt_ids"])
    if not 1 <= len(words) <= 2:
        got = f"got {len(words)} words" if words else "the prompt is missing"
        parser.error(f'{got}. Write sidestream run [MODEL] "PROMPT", the prompt in quotes')
    model = one_model(parser, arguments, words[:-1])
    prompt = read_all() if words[-1] == "-" else words[-1]
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("prompt", "got bytes that are not UTF-8, must be UTF-8 text") from None
    if "chat" in arguments:
        system = [{"role": "system", "content": arguments["system"]}] if "system" in arguments else []
        return model, [*system, {"role": "user", "content": prompt}]
    return model, prompt


def _write_stream(chunks: Any, as_json: bool) -> None:
    from sidestream.output import output_to_dict

    for chunk in chunks:
        if as_json:
            write_json(output_to_dict(chunk))
        else:
            write(chunk.text, end="")
    if not as_json:
        write("")


def _write_answers(answers: Sequence[Output], stats: dict[str, Any] | None) -> None:
    """One answer's fields at the top level of the object; several as the list `outputs`."""
    from sidestream.output import output_to_dict

    if stats is not None:
        fields = [output_to_dict(answer) for answer in answers]
        write_json({**fields[0], "stats": stats} if len(fields) == 1 else {"outputs": fields, "stats": stats})
        return
    for answer in answers:
        if len(answers) > 1:
            write(f"--- {answer.index + 1} of {len(answers)}")
        write(answer.text)
