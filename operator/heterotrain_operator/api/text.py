"""Numbers, lists and durations as users read them in the status, in events and in logs."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"))


_MAX_QUOTED = 60
LARGEST = 1e300
"""Numbers in the status are at most this large, because JSON has no infinity."""


def rounded(value: float, *, digits: int = 4) -> float:
    """Return a number with so many significant digits: the others are noise, and would rewrite the status each time.

    Numbers beyond ``LARGEST`` become ``LARGEST``.
    """
    return float(f"{min(max(value, -LARGEST), LARGEST):.{digits}g}")


def quoted(text: str) -> str:
    """Return foreign text for a message: printable and at most 60 characters."""
    short = text if len(text) <= _MAX_QUOTED else f"{text[: _MAX_QUOTED - 1]}…"
    return "".join(c if c.isprintable() else "?" for c in short)


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
