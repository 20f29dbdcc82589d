"""How often tests repeat: ``REPEAT=gate`` (the default) is what every change has to pass, ``REPEAT=all`` explores.

A test takes its counts and seeds from here and names both: ``range(times(gate=6, every=300))``. A test, or a parameter
of one, that only the long run needs is marked ``thorough``.
"""

from __future__ import annotations

import os
from typing import Final

VARIABLE: Final = "REPEAT"
GATE: Final = "gate"
ALL: Final = "all"


def is_thorough(environment: os._Environ[str] | dict[str, str] = os.environ) -> bool:
    """Return whether this is the long run.

    Raises:
        ValueError: if the variable is neither ``gate`` nor ``all``.
    """
    value = environment.get(VARIABLE) or GATE
    if value not in {GATE, ALL}:
        raise ValueError(f"{VARIABLE} is {value!r}: write {GATE} or {ALL}")
    return value == ALL


def times(*, gate: int, every: int) -> int:
    """Return one of two counts: that of the gate, or that of the long run."""
    return every if is_thorough() else gate
