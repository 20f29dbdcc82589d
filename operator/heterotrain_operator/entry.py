"""The command ``heterotrain-operator``: imports its parts, or names the extra that is not installed."""

from __future__ import annotations

import sys

from heterotrain_core.extras import missing_extra


def main() -> None:
    """Run the command; without its packages, end with one sentence instead of a traceback."""
    try:
        from heterotrain_operator.cli import main as command  # noqa: PLC0415  # this import is what may fail
    except ModuleNotFoundError as error:
        if sentence := missing_extra(error, what="heterotrain-operator", extra="operator"):
            sys.exit(sentence)
        raise
    command(prog_name="heterotrain-operator")
