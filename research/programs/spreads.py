"""Figures over several seeds as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(values: Sequence[float], form: str) -> str:
    """Return the mean, and the least and the greatest value in brackets where they are not printed alike."""
    mean, between = format(statistics.mean(values), form), least_to_most(values, form)
    return mean if between == mean else f"{mean} ({between})"


def least_to_most(values: Sequence[float], form: str) -> str:
    """Return the least and the greatest value, one where they are printed alike."""
    ends = [format(end, form) for end in (min(values), max(values))]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
