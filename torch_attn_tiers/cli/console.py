"""One rich console for all commands."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

# What is not a terminal (a log, a pipe) has no width of its own; rich would fold tables at 80.
_LOG_WIDTH = 170


def console() -> Console:
    """A console on the current standard output; brackets in cells are text, not markup."""
    width = None if Console().is_terminal else _LOG_WIDTH
    return Console(width=width, markup=False, emoji=False, highlight=False)


def print_table(out: Console, title: str, table: Table) -> None:
    """Prints a line, then the table: rich folds a title of its own to the width of the table."""
    out.print(title, soft_wrap=True)
    out.print(table)
