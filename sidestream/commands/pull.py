"""`sidestream pull`: fetch a model."""

from __future__ import annotations

import os
from collections.abc import Sequence

from sidestream.commands.exits import EXIT_HELP
from sidestream.commands.terminal import write
from sidestream.flags import Parser


def main(words: Sequence[str]) -> int:
    """Progress goes to standard error, the path is the last line of standard output."""
    from sidestream.config import CACHE_HELP, declared_options
    from sidestream.sources import warn_of_unknown_variables

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

    warn_of_unknown_variables(declared_options(), os.environ)

    from sidestream.models.hub import pull

    write(str(pull(names[0] if names else "smollm2")))
    return 0
