"""`sidestream serve`: the HTTP server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sidestream.commands.engine import one_model
from sidestream.commands.exits import SERVE_EXIT_HELP
from sidestream.config import CACHE_HELP, EngineConfig, ServeConfig, configured
from sidestream.flags import Parser, add_options, given_options

# Other engines' switches for what is always so here.
ALWAYS_SO = (
    "--enable-return-hidden-states",
    "--enable-metrics",
    "--enable-cache-report",
    "--enable-prefix-caching",
    "--enable-chunked-prefill",
    "--skip-server-warmup",
)
REFUSED = {
    "--trust-remote-code": "code that comes with a model is never run, and no model that is supported needs it. Leave it out",
    "--enable-trace": "requests are traced as soon as it is known where the traces go. Give --otlp-endpoint URL instead",
}


def serve_parser(command: str = "serve", description: str = "Serve a model over HTTP.", exit_help: str = SERVE_EXIT_HELP) -> Parser:
    parser = Parser(
        command,
        words="MODEL",
        words_help="model (default: smollm2) [SIDESTREAM_MODEL]",
        usage=f"sidestream {command} [MODEL] [options]",
        description=f"{description} Each option can also be set by the environment variable shown or in the file of --config; a flag "
        "goes before the variable, and the variable before the file.",
        epilog=f"{CACHE_HELP} {exit_help}",
    )
    add_options(parser, "server", ServeConfig, variables=True)
    add_options(parser, "engine", EngineConfig, variables=True)
    parser.ignore(*ALWAYS_SO)
    parser.refused |= REFUSED
    return parser


def explicit_options(parser: Parser, arguments: dict[str, Any]) -> dict[str, Any]:
    """What the command line says about the engine and the server, by name."""
    model = one_model(parser, arguments, arguments["words"])
    given = given_options(arguments, ServeConfig) | given_options(arguments, EngineConfig)
    return given if model is None else given | {"model": model}


def main(words: Sequence[str]) -> int:
    """The configuration is complete and checked before anything is started."""
    parser = serve_parser()
    engine, server, _ = configured(explicit_options(parser, parser.parse(words)))

    from sidestream.serve import serve  # the server's libraries come with it

    return serve(engine, server)
