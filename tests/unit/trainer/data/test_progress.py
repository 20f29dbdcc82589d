"""Samples are taken exactly once, whatever the shares."""

from __future__ import annotations

from itertools import pairwise

import pytest
from heterotrain.data.progress import (
    Progress,
    advance,
    micro_batches,
    slice_of,
    step_seed,
)
from hypothesis import given
from hypothesis import strategies as st


@given(epoch_samples=st.integers(1, 200), batches=st.lists(st.integers(1, 64), min_size=1, max_size=20))
def test_every_epoch_is_cut_into_batches_without_a_gap(epoch_samples: int, batches: list[int]) -> None:
    """The steps of an epoch cover it from 0 to its end, for any global batch in each step."""
    progress, covered = Progress(), 0
    while progress.epoch == 0:
        batch = min(batches[progress.steps % len(batches)], epoch_samples - progress.cursor)
        assert progress.cursor == covered
        covered += batch
        progress = advance(progress, batch_samples=batch, ends_epoch=covered == epoch_samples)
    assert covered == epoch_samples
    assert progress == Progress(steps=progress.steps, samples=epoch_samples, epoch=1)


@given(shares=st.lists(st.integers(0, 50), min_size=1, max_size=9))
def test_slices_are_adjacent(shares: list[int]) -> None:
    """The ranks' slices follow each other and cover the batch."""
    slices = [slice_of(tuple(shares), rank) for rank in range(len(shares))]
    assert slices[0][0] == 0
    assert slices[-1][1] == sum(shares)
    assert all(one[1] == other[0] for one, other in pairwise(slices))


@given(share=st.integers(0, 300), size=st.integers(0, 40))
def test_micro_batches_make_up_the_share(share: int, size: int) -> None:
    """None exceeds the limit, and the last one is the largest, because only that one overlaps with the exchange."""
    cut = micro_batches(share, size)
    assert sum(cut) == share
    assert all(0 < part <= (size or share) for part in cut)
    assert not cut or cut[-1] == max(cut)


def test_step_seeds_differ_by_position() -> None:
    """Two ranks of a step, and two steps of a rank, draw different numbers; a repeated step draws the same."""
    seeds = {step_seed(seed=0, epoch=e, position=p) for e in range(3) for p in range(50)}
    assert len(seeds) == 150
    assert step_seed(seed=0, epoch=1, position=7) == step_seed(seed=0, epoch=1, position=7)


@pytest.mark.parametrize(
    ("one", "other"), [(Progress(steps=3), Progress(steps=4)), (Progress(steps=4), Progress(steps=4, evaluated=1))]
)
def test_more_work_is_newer(one: Progress, other: Progress) -> None:
    """Committed steps decide, then end-of-epoch hooks."""
    assert one.order < other.order
