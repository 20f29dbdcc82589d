"""Ranks with parts of a model agree on the newest state: threads of one process, over real sockets."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from heterotrain.errors import UsageError
from heterotrain.layouts.holdings import Extent
from heterotrain.membership.agreement import agree_on_state
from heterotrain.network.group import Group, SocketFilter
from heterotrain.network.mesh.mesh import Mesh
from heterotrain.state.training import Training
from support.divided_models import (
    Elements,
    assert_state_is,
    begin,
    full,
    layouts_of,
    training_of,
    whole_values,
)

STEPS = 3


@contextmanager
def groups(ranks: int) -> Iterator[list[Group]]:
    """Connect ranks."""
    peers: list[dict[int, socket.socket]] = [{} for _ in range(ranks)]
    for one, other in itertools.combinations(range(ranks), 2):
        peers[one][other], peers[other][one] = socket.socketpair()
    found = []
    for rank in range(ranks):
        group = Group(
            rank=rank, world_size=ranks, sockets=SocketFilter(members=frozenset(), excluded_ports=frozenset())
        )
        group._mesh = Mesh(peers[rank], rank=rank, limit_s=30.0)
        found.append(group)
    try:
        yield found
    finally:
        for group in found:
            assert group._mesh is not None
            group._mesh.close()


@dataclass
class Folder:
    """Checkpoints of one state, for ranks of any layout."""

    saved: Training | None = None
    loads: list[int] = field(default_factory=list)

    def best(self) -> tuple[int, int]:
        return (-1, -1) if self.saved is None else (1, self.saved.progress.steps)

    def load_into(self, training: Training) -> bool:
        if self.saved is None:
            return False
        self.loads.append(self.saved.progress.steps)
        training.restore(self.saved.capture())
        return True


def agree(trainings: list[Training], folder: Folder | None = None) -> None:
    """Let all ranks agree."""
    with groups(len(trainings)) as connected, ThreadPoolExecutor(len(trainings)) as pool:
        calls: list[Callable[[], Any]] = [
            lambda group=group, training=training: agree_on_state(group, training, folder or Folder())  # type: ignore[misc]
            for group, training in zip(connected, trainings, strict=True)
        ]
        for future in [pool.submit(call) for call in calls]:
            future.result(30)


@pytest.mark.parametrize("seed", range(12))
def test_state_moves_between_random_layouts(seed: int) -> None:
    """Some ranks have the newest state under old layouts, others have an older one or none: all end with their part."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(2, 6))
    donors = int(rng.integers(1, ranks + 1))
    before, after = layouts_of(rng, donors), layouts_of(rng, ranks)
    trainings = [training_of(holding, seed=seed, steps=STEPS) for holding in before]
    trainings += [
        training_of(holding, seed=seed + 1, steps=rank % STEPS) for rank, holding in enumerate(after[donors:])
    ]
    for training, holding in zip(trainings, after, strict=True):
        if rng.random() < 0.8 or training.layout.holding != holding:
            begin(training, Elements(holding, whole_values(seed + 2)))
    agree(trainings)
    expected = training_of(full(), seed=seed, steps=STEPS)
    for training in trainings:
        assert_state_is(training, expected)
        assert training.earlier is None


def test_an_end_that_one_rank_knows_of_is_the_end_for_all() -> None:
    """A rank that applied the last step late has not heard from its script; a rank behind never decides it."""
    trainings = [training_of(full(), seed=1, steps=steps) for steps in (STEPS, STEPS - 1, STEPS, STEPS)]
    trainings[1].progress = replace(trainings[1].progress, stopped=True)
    agree(trainings)
    assert not any(training.progress.stopped for training in trainings)
    trainings[2].progress = replace(trainings[2].progress, stopped=True)
    agree(trainings)
    assert all(training.progress.stopped for training in trainings)


def test_a_lost_part_is_read_from_the_checkpoint() -> None:
    """Nobody has the second half at any step: every rank reads its part of the checkpoint."""
    half = {name: Extent(0, extent.stop // 2) for name, extent in full().items()}
    rest = {name: Extent(extent.stop // 2, extent.stop) for name, extent in full().items()}
    trainings = [training_of(half, seed=1, steps=STEPS), training_of(rest, seed=2)]
    saved = training_of(full(), seed=1, steps=STEPS - 1)
    folder = Folder(saved)
    agree(trainings, folder)
    assert folder.loads == [STEPS - 1] * 2
    for training in trainings:
        assert_state_is(training, saved)
    with pytest.raises(UsageError, match="no checkpoint"):
        agree([training_of(half, seed=1, steps=STEPS), training_of(rest, seed=2)])


def test_parts_begin_together() -> None:
    """Nobody has a state: the first ranks that are whole together begin, and the others get their values."""
    half = {name: Extent(0, extent.stop // 2) for name, extent in full().items()}
    rest = {name: Extent(extent.stop // 2, extent.stop) for name, extent in full().items()}
    trainings = [training_of(part, seed=seed) for part, seed in ((half, 1), (rest, 1), (full(), 9), (rest, 8))]
    agree(trainings)
    expected = training_of(full(), seed=1)
    for training in trainings:
        assert_state_is(training, expected)
