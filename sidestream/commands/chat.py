"""`sidestream chat`: a conversation in the terminal."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from sidestream.chat.conversation import Conversation
from sidestream.chat.screen import PlainScreen, RichScreen, Screen
from sidestream.chat.session import COMMANDS, Session, answer_lines
from sidestream.chat.talker import EngineTalker, Talker
from sidestream.commands.engine import add_engine_options, engine_options, one_model
from sidestream.commands.exits import EXIT_HELP
from sidestream.commands.terminal import log_on_stderr
from sidestream.config import CACHE_HELP, CONFIG_HELP, EngineConfig
from sidestream.errors import InvalidRequest
from sidestream.flags import Parser, add_options, given_options
from sidestream.options import fields_of, shown_flag
from sidestream.params import SamplingParams

UNBOUNDED = 2**31 - 1  # tokens of an answer: the context is the bound
KEY_VARIABLE = "SIDESTREAM_API_KEY"


def chat_parser() -> Parser:
    parser = Parser(
        "chat",
        words="MODEL|URL",
        words_help="model to run here (default: smollm2) [SIDESTREAM_MODEL], or an OpenAI-compatible server: http://host:port",
        usage="sidestream chat [MODEL|URL] [options]",
        description="Chat in the terminal. What comes through a pipe is answered line by line, each line a turn; only answers are printed.",
        epilog=f"{CONFIG_HELP} {CACHE_HELP} {EXIT_HELP}",
    )
    group = parser.add_argument_group("conversation")
    parser.option(group, "--system", metavar="TEXT", help="System message.")
    parser.option(group, "--plain", action="store_true", help="Neither Markdown nor line editing, also where rich and prompt-toolkit are.")
    server = parser.add_argument_group("server (with a URL)")
    parser.option(server, "--model", metavar="NAME", help="Which of its models [default: the first].")
    parser.option(server, "--api-key", metavar="KEY", help=f"Key it asks for [{KEY_VARIABLE}].")
    add_options(parser, "sampling", SamplingParams, defaults={"max_new_tokens": "as many as there is room for"})
    add_engine_options(parser)
    return parser


def main(words: Sequence[str]) -> int:
    """A chat with an engine in this process, or with the server at a URL."""
    parser = chat_parser()
    arguments = parser.parse(words)
    given = given_options(arguments, SamplingParams)
    sampling = SamplingParams(**{"max_new_tokens": UNBOUNDED, **given})
    if sampling.n > 1:
        parser.error(f"--n: got {sampling.n}, must be 1: a conversation goes on with one answer")
    conversation = Conversation(arguments.get("system"))
    plain = "plain" in arguments
    if re.match(r"https?://", "".join(arguments["words"][:1]), re.IGNORECASE):
        return _talk(_connect(parser, arguments, given), conversation, plain)
    if "api_key" in arguments:
        parser.error("--api-key needs the URL of a server")
    options, level = engine_options(one_model(parser, arguments, arguments["words"]), arguments)

    from sidestream import Engine

    if _is_interactive():
        print(f"loading {options['model']} ...", file=sys.stderr, flush=True)
    with log_on_stderr(level), Engine(options.pop("model"), **options) as engine:
        return _talk(EngineTalker(engine, sampling), conversation, plain)


def _connect(parser: Parser, arguments: dict[str, Any], sampling: dict[str, Any]) -> Talker:
    from sidestream.chat.remote import ServerTalker

    if len(arguments["words"]) > 1:
        parser.error(f"got {len(arguments['words'])} words. Give one URL")
    for field in fields_of(EngineConfig):
        if field.name in arguments and not field.option.positional:
            parser.error(f"{shown_flag(field)} is for a model that runs here; the engine behind a URL has its own options")
    key = arguments.get("api_key") or os.environ.get(KEY_VARIABLE, "").split(",")[0].strip() or None
    return ServerTalker(arguments["words"][0], key=key, model=arguments.get("model"), sampling=sampling)


def _talk(talker: Talker, conversation: Conversation, plain: bool) -> int:
    if _is_interactive():
        Session(talker, _screen(plain), conversation).run()
    else:
        answer_lines(talker, conversation, _lines())
    return 0


def _is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _screen(plain: bool) -> Screen:
    if not plain:
        try:
            return RichScreen(list(COMMANDS))
        except ImportError:  # both are optional: pip install sidestream[chat]
            pass
    return PlainScreen()


def _lines() -> Iterator[str]:
    try:
        for line in sys.stdin:
            line.encode()
            yield line
    except UnicodeError:
        raise InvalidRequest("prompt", "got standard input that is not UTF-8, must be UTF-8 text") from None
