"""Checks of what is given to the client, each with one sentence."""

from __future__ import annotations

import math
from typing import Any

from heterotrain_cli.errors import InputError
from heterotrain_operator.api.explain import shown


def told(value: Any) -> str:
    """Return a wrong value for a message, in at most 60 characters and without passwords."""
    return "None" if value is None else shown(value)


def check_whole(name: str, value: Any, *, least: int) -> None:
    """Check a whole number.

    Raises:
        InputError: it is something else, or below ``least``.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name} is {told(value)}, but must be a whole number, at least {least}")


def check_seconds(name: str, value: Any, *, least: float) -> None:
    """Check a time in seconds.

    Raises:
        InputError: it is not a number, not finite, or below ``least``.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < least:
        raise InputError(f"{name} is {told(value)}, but must be a number of seconds, at least {least:g}")
