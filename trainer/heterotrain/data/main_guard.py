"""Scripts without a main guard: a loader process imports the script, which must not start the training once more."""

from __future__ import annotations

import ast
import multiprocessing
import sys
from collections.abc import Iterable
from pathlib import Path

from heterotrain.errors import UsageError

REMEDY = (
    "loader processes import the training script, so a script with workers= above 0 has to start its training below "
    '`if __name__ == "__main__":`. Indent the code that calls heterotrain.init and job.steps below this line, or move '
    "it into a function that is called there"
)


def check_not_imported() -> None:
    """Refuse to run in a process that is just importing the main script in order to load data.

    Raises:
        UsageError: it is.
    """
    # multiprocessing's own check for the same mistake reads this attribute; it exists only during such an import.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(REMEDY)


def main_line() -> int | None:
    """Return the line of the main script that is running, ``None`` where processes import no script."""
    main, frame = sys.modules.get("__main__"), sys._getframe()  # noqa: SLF001  # the function is documented
    while (caller := frame.f_back) is not None and main is not None:
        frame = caller
        if frame.f_globals is vars(main) and frame.f_code.co_name == "<module>":
            return frame.f_lineno
    return None


def check_main_guard(lines: Iterable[int | None]) -> None:
    """Look for the main guard of the script before any process is started.

    Args:
        lines: where the script called the library, from ``main_line``.

    Raises:
        UsageError: one of these lines is in a statement that each loader process would run as well.
    """
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None:  # an interactive session, or a program that is not imported again
        return
    try:
        script = Path(path).read_text(encoding="utf-8")
        unguarded = any(runs_on_import(script, line) for line in lines if line is not None)
    except (OSError, ValueError, SyntaxError):  # a zipped or compiled script: a loader process would report it
        return
    if unguarded:
        raise UsageError(REMEDY)


def runs_on_import(script: str, line: int) -> bool:
    """Return whether an import of the script runs the top-level statement that contains this line (from 1).

    A statement below any ``if`` counts as guarded, because its condition is not evaluated here.

    Raises:
        SyntaxError: the script is not Python.
    """
    for statement in ast.parse(script).body:
        if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            return not isinstance(statement, ast.If | ast.Match)
    return False
