"""The order in which a state moves between layouts, and the room that ranks need for it."""

from __future__ import annotations

import random

import pytest
import torch
from heterotrain.state.loads import Holdings
from heterotrain.state.moves import batches, releases
from heterotrain.state.ranges import Holding, TensorRange
from heterotrain.state.tensors import Entry
from support.repeat import times

UNIT = 8


def entries_of(sizes: list[int]) -> list[Entry]:
    found = [Entry("extras.a", "", (3,), torch.float64)]
    for unit, size in enumerate(sizes):
        names = (f"model.{unit}", f"optimizers.0.state.{unit}.exp_avg")
        found += [Entry(name, f"{unit}", (size,), torch.float64, divided=True) for name in names]
    return found


def stages(rng: random.Random, sizes: list[int], ranks: int) -> list[Holding]:
    """Return contiguous units for each rank, in any order of the ranks; a rank may have none."""
    edges = sorted(rng.randint(0, len(sizes)) for _ in range(ranks - 1))
    found = [
        {f"{unit}": TensorRange(f"{unit}", 0, sizes[unit]) for unit in range(start, stop)}
        for start, stop in zip([0, *edges], [*edges, len(sizes)], strict=True)
    ]
    rng.shuffle(found)
    return found


@pytest.mark.parametrize("seed", range(times(gate=20, every=400)))
def test_no_rank_needs_more_room_than_for_its_larger_part_and_two_units(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311  # seeded chance
    ranks, sizes = (
        rng.randint(2, 5),
        [rng.choice([UNIT, UNIT, rng.randint(1, UNIT)]) for _ in range(rng.randint(1, 20))],
    )
    before, after = stages(rng, sizes, ranks), stages(rng, sizes, ranks)
    places = [Holdings(has=has, needs=needs) for has, needs in zip(before, after, strict=True)]
    ordered = batches(entries_of(sizes), places, batch_bytes=1)
    assert sorted(entry.name for batch in ordered for entry in batch) == sorted(e.name for e in entries_of(sizes))
    assert ordered[0][0].name == "extras.a"
    assert releases(places) == (before != after)
    for has, needs in zip(before, after, strict=True):
        size = sum(extent.stop for extent in has.values())
        room = max(size, sum(extent.stop for extent in needs.values()))
        for batch in ordered[1:]:
            (name,) = {entry.of for entry in batch}
            size += sizes[int(name)] if name in needs and name not in has else 0
            assert size <= room + 2 * UNIT
            size -= sizes[int(name)] if name in has and name not in needs else 0


def test_parameters_of_one_move_share_a_batch_up_to_its_size() -> None:
    sizes = [UNIT] * 6
    has = {f"{unit}": TensorRange(f"{unit}", 0, UNIT) for unit in range(6)}
    places = [Holdings(has=has, needs={}), Holdings(needs=has, is_donor=False)]
    assert [len(batch) for batch in batches(entries_of(sizes), places, batch_bytes=4 * UNIT * 8)] == [1, 4, 4, 4]
