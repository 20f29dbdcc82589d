"""Text for people on a terminal, a file or a pipe."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table


def plain_table(first: str) -> Table:
    """Return a table without frames, for copy and paste, with the first column ``first``."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    return table


def say(console: Console, line: str) -> None:
    """Print one line without wrapping, markup or colours for numbers."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)
