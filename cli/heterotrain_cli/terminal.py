"""Text for people on a terminal, a file or a pipe."""

from __future__ import annotations

from collections.abc import Collection

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_COLUMNS = 200
COLOURS = {
    "Running": "green", "Succeeded": "green", "Failed": "red", "Invalid": "red", "Degraded": "yellow",
    "Restarting": "yellow", "Pending": "yellow", "Suspended": "blue",
}  # fmt: skip


def console() -> Console:
    """Return standard output; lines for a file or a pipe are not cut to a terminal's width."""
    found = Console()
    return found if found.is_terminal else Console(width=PIPE_COLUMNS)


def state_text(word: str) -> Text:
    """Return the state of a job or worker in its colour."""
    return Text(word or "New", style=COLOURS.get(word, ""))


def plain_table(first: str) -> Table:
    """Return a table without frames, for copy and paste, with the first column ``first``."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    return table


def spread(values: Collection[int]) -> str:
    """Return the smallest and the largest of these numbers, or the only one."""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} – {high}"


def say(console: Console, line: str) -> None:
    """Print one line without wrapping, markup or colours for numbers."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)
