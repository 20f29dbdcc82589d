"""Numbers, lists and durations as users read them in the status, in events and in logs."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"))


def rounded(value: float, *, digits: int = 4) -> float:
    """Return a number with so many significant digits: the others are noise, and would rewrite the status each time."""
    return float(f"{value:.{digits}g}")


def listed(items: Sequence[str], *, most: int = 10, separator: str = ", ") -> str:
    """Return the items in one line; those beyond the first ``most`` are only counted."""
    shown = separator.join(items[:most])
    return f"{shown}{separator}and {len(items) - most} more" if len(items) > most else shown


def duration_text(duration_s: float) -> str:
    """Return a duration with its unit and two digits: estimates are not more exact."""
    for unit_s, unit in _UNITS:
        if duration_s >= unit_s:
            return f"{rounded(duration_s / unit_s, digits=2):g} {unit}"
    return f"{duration_s:.0f} s"
