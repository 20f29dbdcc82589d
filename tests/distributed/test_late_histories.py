"""Seeded histories of steps that the next vote confirms, on ranks with a gate: one more fault while a step waits.

See ``test_histories`` for the others, and ``drawn_histories`` for the seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from distributed.drawn_histories import seeds
from distributed.fault_scenario import FAULTS, possible
from distributed.harness import Operator
from distributed.queued_updates import LATE_PLACES
from distributed.test_histories import play, table  # noqa: F401  # a fixture

WINDOW = (*LATE_PLACES, "step", "launched", "backward", "reducing", "reduced")
"""Places between the update of a step and the vote that confirms it."""
CELLS = [(what, place) for what in FAULTS for place in WINDOW if possible(what, place)]
random.Random(1).shuffle(CELLS)  # noqa: S311  # not a secret; a few histories cover many kinds


@pytest.mark.parametrize("seed", seeds(gate=1, every=100))
def test_history(operate: Callable[..., Operator], seed: int) -> None:
    """One history."""
    play(operate, seed, "late", late=CELLS[seed % len(CELLS) :][:1])
