"""`sidestream doctor`: why it does what it does here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from sidestream.commands.exits import EXIT_FAILURE
from sidestream.commands.serve import explicit_options, serve_parser
from sidestream.commands.terminal import write, write_json
from sidestream.config import Configured, configured
from sidestream.doctor.report import Fact, Report
from sidestream.errors import ConfigError
from sidestream.options import disclosed

DESCRIPTION = "Say what was found on this machine, and what an engine would pick and why. No weight is loaded and nothing is fetched."
EXIT_HELP = "Exit status: 0, whatever is reported; 1 when the model cannot be had; 2 when the command line cannot be understood."


def main(words: Sequence[str]) -> int:
    """The flags are those of `serve`: put doctor in its place in a command that does not do what it should."""
    parser = serve_parser("doctor", DESCRIPTION, EXIT_HELP)
    parser.option(parser.add_argument_group("report"), "--json", action="store_true", help="Print one JSON object.")
    arguments = parser.parse(words)
    explicit = explicit_options(parser, arguments)
    report = Report()

    from sidestream.doctor.found import find

    find(report, os.environ)
    chosen = _configured(report, explicit)
    for name, source in sorted(chosen.sources.items()):
        _add_option(report, chosen, name, source)
    is_there = _pick(report, chosen)
    if "json" in arguments:
        write_json(report.as_json())
    else:
        write(report.as_text())
    return 0 if is_there else EXIT_FAILURE


def _configured(report: Report, explicit: Mapping[str, Any]) -> Configured:
    """What the command line, the environment and the file say, less what cannot be."""
    environ = dict(os.environ)
    while True:
        try:
            return configured(explicit, environ=environ)
        except ConfigError as error:
            if not environ:
                raise
            report.add_problem(error.one_line())
            wrong = error.message.partition(":")[0]
            if environ.pop(wrong, None) is None:  # not one variable: a file, or several that contradict each other
                environ = {}


def _add_option(report: Report, chosen: Configured, name: str, source: str) -> None:
    value = (disclosed(chosen.engine) | disclosed(chosen.serve))[name]
    source = source or "the command line"
    report.tell("configured", name, lambda: Fact(f"{value} ({source})", {"value": value, "from": source}))


def _pick(report: Report, chosen: Configured) -> bool:
    """Whether the model can be had."""
    try:
        from sidestream.doctor.picked import pick
    except Exception as error:  # without torch, say, nothing can be picked
        report.add_problem(f"an engine cannot be started here: {type(error).__name__}: {' '.join(str(error).split())}")
        return False
    return pick(report, chosen)
