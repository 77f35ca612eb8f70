"""`sidestream bench`: how fast it is here."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Sequence

from sidestream.bench.work import CASES
from sidestream.commands.engine import add_engine_options, engine_options, one_model
from sidestream.commands.exits import EXIT_HELP
from sidestream.commands.terminal import log_on_stderr, write, write_json
from sidestream.config import CACHE_HELP, CONFIG_HELP
from sidestream.flags import Parser

REPETITIONS, MAX_REPETITIONS = 3, 100  # of each workload


def offline_parser() -> Parser:
    parser = Parser(
        "bench",
        words="serve | offline [MODEL]",
        words_help="what to measure, and the model (default: smollm2) [SIDESTREAM_MODEL]",
        usage="sidestream bench offline [MODEL] [options]\n       sidestream bench serve [--url URL] [options]",
        description="Measure tokens per second on fixed workloads, and their share of what this machine could do at most. "
        "`sidestream bench serve --help` tells how to load a server.",
        epilog=f"{CONFIG_HELP} {CACHE_HELP} {EXIT_HELP}",
    )
    group = parser.add_argument_group("measuring")
    listed = ",".join(CASES)
    parser.option(group, "--cases", metavar="CASE,CASE", type=_cases, help=f"Some of {listed} [default: all].")
    parser.option(group, "--repetitions", metavar="N", type=_repetitions, help=f"Of each, in turn [default: {REPETITIONS}].")
    parser.option(group, "--json", action="store_true", help="Print one JSON object with every number.")
    add_engine_options(parser)
    return parser


def _cases(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    if unknown := [case for case in chosen if case not in CASES]:
        raise ArgumentTypeError(f"got {unknown[0]!r}, must be some of {','.join(CASES)}")
    return chosen


def _repetitions(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_REPETITIONS:
        raise ArgumentTypeError(f"got {text!r}, must be an integer between 1 and {MAX_REPETITIONS}")
    return int(text)


def main(words: Sequence[str]) -> int:
    """`sidestream bench offline`: a table, or every number as JSON. `bench serve` is a module of its own."""
    if words and words[0] == "serve":
        from sidestream.commands.bench_serve import main as bench_serve

        return bench_serve(words[1:])
    parser = offline_parser()
    arguments = parser.parse(words)
    kind, *models = arguments["words"] or [""]
    if kind != "offline":
        parser.error(
            f"{f'got {kind!r}' if kind else 'what to measure is missing'}. Write sidestream bench offline [MODEL] or sidestream bench serve"
        )
    options, level = engine_options(one_model(parser, arguments, models), arguments)

    from sidestream import Engine
    from sidestream.bench.offline import HEAD, Bench, as_json, as_text, works_of
    from sidestream.observe.table import table_lines

    with log_on_stderr(level), Engine(options.pop("model"), **options) as engine:
        measured = Bench(engine, works_of(arguments.get("cases", CASES)))
        results = measured.run(arguments.get("repetitions", REPETITIONS))
        if "json" in arguments:
            write_json(as_json(measured, results))
        else:
            above, rows, below = as_text(measured, results)
            write("\n".join([*above, "", *table_lines(HEAD, rows), "", *below]))
    return 0
