"""A table in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def table_lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: rich's on a terminal where it is installed, else plain columns."""
    if sys.stdout.isatty():
        try:
            return _by_rich(head, rows)
        except ImportError:  # rich is optional
            pass
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]


def _by_rich(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    from rich.console import Console
    from rich.table import Table

    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    console = Console()
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()
