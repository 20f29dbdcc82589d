"""The planner charges the exchange that the trainer makes: the same pieces, with the same owners."""

from __future__ import annotations

import itertools
import random

import pytest
from heterotrain.state.ranges import TensorRange, pieces_of
from heterotrain_core.contract.plan import LayoutKind
from heterotrain_core.units import UnitProfile, UnitSeconds
from heterotrain_planner.layout.exchange import owner_bytes
from heterotrain_planner.layout.problem import DeviceKind, Problem
from heterotrain_planner.layout.result import DeviceLayout, PlannedShard, PlannedStage
from support.repeat import times

UNITS, ELEMENTS = 6, 60


def a_problem() -> Problem:
    point = (UnitSeconds(micro_batch_samples=1, forward_s=1.0, backward_s=1.0),)
    units = tuple(
        UnitProfile(name=f"u{i}", parameter_bytes=ELEMENTS * (i + 1), activation_bytes=0, boundary_bytes=0,
                    seconds={"a": point})
        for i in range(UNITS)
    )  # fmt: skip
    kinds = (DeviceKind(name="a", count=9, memory_bytes=10**9),)
    return Problem(units=units, kinds=kinds, batch_samples=9, micro_batches=(1,))


def drawn(rng: random.Random) -> tuple[DeviceLayout, list[dict[str, TensorRange]]]:
    """Return a member's layout and what its ranks hold in the trainer's words."""
    size, names = rng.randint(1, 3), [f"u{i}" for i in range(UNITS)]
    sizes = {name: ELEMENTS * (i + 1) for i, name in enumerate(names)}
    if size > 1 and rng.random() < 0.5:
        edges = (0, *sorted(rng.sample(range(1, ELEMENTS), size - 1)), ELEMENTS)
        shards = tuple(
            PlannedShard(kind="a", state_ratio=(stop - start) / ELEMENTS, share_samples=1, micro_batch_samples=1,
                  memory_bytes=0)
            for start, stop in itertools.pairwise(edges)
        )  # fmt: skip
        held = [
            {name: TensorRange(name, start * sizes[name] // ELEMENTS, stop * sizes[name] // ELEMENTS) for name in names}
            for start, stop in itertools.pairwise(edges)
        ]
        return DeviceLayout(kind=LayoutKind.SHARDED, shards=shards), held
    edges = (0, *sorted(rng.sample(range(1, UNITS), size - 1)), UNITS)
    stages = tuple(
        PlannedStage(kind="a", first_unit=first, last_unit=end - 1, forward_s=1.0, backward_s=1.0, input_s=0.0,
              gradient_s=0.0, memory_bytes=0)
        for first, end in itertools.pairwise(edges)
    )  # fmt: skip
    held = [
        {name: TensorRange(name, 0, sizes[name]) for name in names[first:end]}
        for first, end in itertools.pairwise(edges)
    ]
    return DeviceLayout(kind=LayoutKind.PIPELINE if size > 1 else LayoutKind.REPLICATED, stages=stages), held


@pytest.mark.parametrize("seed", range(times(gate=30, every=600)))
def test_pieces_have_the_owners_and_bytes_of_the_plan(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311  # no secret
    members = [drawn(rng) for _ in range(rng.randint(2, 4))]
    first_rank = [0, *itertools.accumulate(len(held) for _, held in members)]
    planned = {
        tuple(first + place for first, place in zip(first_rank, owners, strict=False)): size
        for owners, size in owner_bytes(a_problem(), [layout for layout, _ in members]).items()
    }
    sizes = {f"u{i}": ELEMENTS * (i + 1) for i in range(UNITS)}
    trained: dict[tuple[int, ...], float] = {}
    for piece in pieces_of(sizes, [part for _, held in members for part in held]):
        trained[piece.owners] = trained.get(piece.owners, 0.0) + piece.elements
    assert planned == pytest.approx(trained)
