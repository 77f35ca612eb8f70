"""`sidestream bench serve`: how fast a server is, ours or another."""

from __future__ import annotations

from collections.abc import Sequence

from sidestream.bench.load import Load
from sidestream.commands.exits import EXIT_FAILURE
from sidestream.commands.terminal import write, write_json
from sidestream.flags import Parser, add_options, given_options


def serve_parser() -> Parser:
    parser = Parser(
        "bench serve",
        words="",
        words_help="none: every part of the load is an option",
        usage="sidestream bench serve [--url URL] [options]",
        description="Load a server that has the OpenAI routes, whichever engine is behind it, and measure throughput and latencies.",
        epilog="Exit status: 0 when every request was answered; 1 when one failed; 2 when the load itself has to change.",
    )
    group = parser.add_argument_group("what is shown")
    parser.option(group, "--json", action="store_true", help="Print one JSON object with every number.")
    parser.option(group, "--output", metavar="FILE.png", help="Also draw the run: .png, .svg or .pdf (needs matplotlib).")
    add_options(parser, "the load", Load)
    return parser


def main(words: Sequence[str]) -> int:
    """Measure and print; 1 where a request failed. Raises UsageError and SidestreamError."""
    parser = serve_parser()
    arguments = parser.parse(words)
    if arguments["words"]:
        parser.error(f"got {arguments['words'][0]!r}. The server is given by --url, the model by --model")
    load = Load(**given_options(arguments, Load))

    from sidestream.bench.picture import check_drawing, draw
    from sidestream.bench.serve import measure
    from sidestream.bench.summary import HEAD, Summary
    from sidestream.observe.table import table_lines

    if "output" in arguments:
        check_drawing(arguments["output"])
    summary = Summary(measure(load))
    try:
        if "json" in arguments:
            write_json(summary.as_json())
        else:
            table, notes = table_lines(HEAD, summary.rows()), summary.notes()
            write("\n".join([*summary.head(), "", *table, *([""] if notes else []), *notes]))
    finally:  # whoever read the numbers may have read enough, but a run that was made is drawn
        if "output" in arguments:
            draw(summary, arguments["output"])
    return EXIT_FAILURE if summary.failures else 0
