"""Seeded histories of jobs whose members hold unequal parts of every unit, beside pipelines and whole models.

Workers are lost, leave and join at random places, and plans change members and parts. Each history ends with the
weights and the samples of one process. See ``drawn_histories`` for its seeds.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from distributed.drawn_histories import seeds
from distributed.fault_injectors import FORMING_PLACES, HAND_OVER_PLACE, LAST_PLACE, PHASE_PLACES, SHARD_PLACES
from distributed.harness import Operator
from distributed.test_divided_histories import history

BY_STEP = ("step", "in loss", "backward", "reducing", "reduced", "applied", *SHARD_PLACES, *PHASE_PLACES)
PLACES = (*BY_STEP, "in a hook", *FORMING_PLACES, HAND_OVER_PLACE, LAST_PLACE)


@pytest.mark.parametrize("seed", seeds(gate=1, every=200))
def test_history(operate: Callable[..., Operator], seed: int) -> None:
    """Up to three workers fail; the operator names new members of those that are left, and of new ones."""
    history(operate, seed, PLACES, shards=True)
