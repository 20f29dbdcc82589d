"""Times, durations and numbers of the API server's objects, as people read them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

UNKNOWN = "–"
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86_400


def parsed(text: Any) -> datetime | None:
    """Return a time of the API server; ``None`` for anything else."""
    try:
        found = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return found if found.tzinfo is not None else None


def seconds_since(text: Any, now: datetime) -> float | None:
    """Return the seconds from a time of the API server to ``now``, at least 0; ``None`` when it is no time."""
    found = parsed(text)
    return None if found is None else max(0.0, (now - found).total_seconds())


def duration(seconds: float | None) -> str:
    """Return a duration with its two largest units, such as ``2 h 5 min``."""
    if seconds is None:
        return UNKNOWN
    whole = round(seconds)
    for unit, name, below, smaller in (
        (_DAY_S, "d", _HOUR_S, "h"), (_HOUR_S, "h", _MINUTE_S, "min"), (_MINUTE_S, "min", 1, "s"),
    ):  # fmt: skip
        if whole >= unit:
            rest = whole % unit // below
            return f"{whole // unit} {name} {rest} {smaller}" if rest else f"{whole // unit} {name}"
    return f"{whole} s"


def short(seconds: float | None) -> str:
    """Return a duration for a column of a table, such as ``2h5m``."""
    return duration(seconds).replace("min", "m").replace(" ", "")


def number(value: float | None) -> str:
    """Return a number with four significant digits; a dash where it is unknown."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"  # noqa: PLR2004  # four digits
