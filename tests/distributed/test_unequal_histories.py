"""Seeded histories of jobs whose members hold unequal parts of every unit, beside pipelines and whole models.

Workers are lost, leave and join at random places, and plans change members and parts. Each history ends with the
weights and the samples of one process. ``HETEROTRAIN_UNEQUAL_HISTORIES`` sets the number of histories (``200``) or a
range of seeds (``100:200``).
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from distributed.fault_injectors import FORMING_PLACES, HAND_OVER_PLACE, LAST_PLACE, PHASE_PLACES, SHARD_PLACES
from distributed.harness import Operator
from distributed.test_divided_histories import history

SEEDS = range(*map(int, os.environ.get("HETEROTRAIN_UNEQUAL_HISTORIES", "3").split(":")))
BY_STEP = ("step", "in loss", "backward", "reducing", "reduced", "applied", *SHARD_PLACES, *PHASE_PLACES)
PLACES = (*BY_STEP, "in a hook", *FORMING_PLACES, HAND_OVER_PLACE, LAST_PLACE)


@pytest.mark.parametrize("seed", SEEDS)
def test_history(operate: Callable[..., Operator], seed: int) -> None:
    """Up to three workers fail; the operator names new members of those that are left, and of new ones."""
    history(operate, seed, PLACES, shards=True)
