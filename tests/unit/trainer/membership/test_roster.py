"""The shares in force in a step, by member."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from heterotrain.data.progress import even_micro_batches
from heterotrain.membership.roster import (
    FormationId,
    Roster,
    may_adopt,
    micro_batch_samples,
    roster_of,
    rounds_of,
    step_shares,
)
from heterotrain_core.contract.plan import Boundary, BoundaryKind, ComputeTime, Layout, LayoutKind, Member, Plan
from hypothesis import given
from hypothesis import strategies as st
from support.plans import plan_of

A_MEMBER = Member(index=0, pool="p", share_samples=8)


def a_plan(*shares: int, **fields: Any) -> Plan:
    """Return a plan of replicated members with these shares."""
    return plan_of(shares, **({"revision": 1} | fields))


def a_roster(plan: Plan, ranks: tuple[int, ...] | None = None, **fields: Any) -> Roster:
    """Return the roster of a formation of these ranks."""
    all_ranks = tuple(range(len(plan.ranks)))
    formation = FormationId(generation=plan.generation, number=0 if ranks is None else 1)
    return roster_of(plan, plan_ranks=all_ranks if ranks is None else ranks, formation=formation, **fields)


def test_a_whole_formation_uses_the_plan() -> None:
    """Without a missing member, the plan's own shares."""
    assert a_roster(a_plan(8, 4, 2)).shares == (8, 4, 2)


def test_survivors_share_in_proportion_while_speeds_are_unknown() -> None:
    """The lost member's share goes to the others in proportion."""
    assert a_roster(a_plan(8, 4, 2), (1, 2)).shares == (9, 5)


def test_survivors_share_evenly_when_they_had_nothing() -> None:
    """Shares of zero give no proportion."""
    assert a_roster(a_plan(14, 0, 0), (1, 2)).shares == (7, 7)


def test_survivors_always_share_evenly_when_the_plan_never_rebalances() -> None:
    """The baseline stays the baseline."""
    plan = a_plan(8, 4, 2, boundary=Boundary(kind=BoundaryKind.NEVER))
    assert a_roster(plan, (0, 2)).shares == (7, 7)


def test_survivors_are_balanced_by_their_models_and_caps() -> None:
    """With models, survivors finish together; a cap binds."""
    fast, slow = (
        ComputeTime(per_sample_s=q, fixed_s=0.0, backward_per_sample_s=q, backward_fixed_s=0.0) for q in (1, 3)
    )
    plan = a_plan(30, 10, 40)
    members = tuple(replace(m, compute=compute) for m, compute in zip(plan.members, (fast, slow, fast), strict=True))
    plan = replace(plan, members=members)
    assert a_roster(plan, (0, 1)).shares == (60, 20)
    capped = replace(plan, members=(replace(members[0], cap_samples=50), *members[1:]))
    assert a_roster(capped, (0, 1)).shares == (50, 30)


@pytest.mark.parametrize(("micro_batch", "expected"), [(2, 1), (0, 1), (1, 1)])
def test_a_survivor_beyond_its_cap_keeps_no_more_samples_than_its_memory_was_planned_for(
    micro_batch: int, expected: int
) -> None:
    """A stage keeps a micro-batch for each stage behind it; two of one sample instead of one of two."""
    layout = Layout(kind=LayoutKind.PIPELINE, cuts=(2,))
    members = tuple(
        Member(index=i, pool="p", share_samples=2, micro_batch_samples=micro_batch, cap_samples=2, layout=layout)
        for i in (0, 1)
    )
    plan = plan_of((2, 2, 2, 2), revision=1)
    ranks = tuple(replace(rank, member=rank.rank // 2, stage=rank.rank % 2) for rank in plan.ranks)
    plan = replace(plan, members=members, ranks=ranks, global_batch_samples=4)
    assert a_roster(plan).members == members
    left = a_roster(plan, (0, 1))
    assert left.shares == (4,)
    assert left.members[0].micro_batch_samples == expected


def test_a_short_last_step_is_divided_in_proportion() -> None:
    """No share is larger than the same member's share of a whole step."""
    roster = a_roster(a_plan(8, 4, 2))
    assert step_shares(roster, epoch=0, epoch_step=9, batch_samples=7) == (4, 2, 1)
    assert step_shares(roster, epoch=0, epoch_step=9, batch_samples=1) == (1, 0, 0)


def test_probes_count_from_the_adoption_of_the_plan() -> None:
    """In the epoch of the plan's adoption they start there, in later epochs at the epoch's start."""
    plan = a_plan(8, 8, probe=((10, 6), (6, 10)), probe_steps=2)
    roster = a_roster(plan, epoch=3, epoch_step=5)
    in_epoch = [step_shares(roster, epoch=3, epoch_step=step, batch_samples=16) for step in range(5, 10)]
    assert in_epoch == [(10, 6), (10, 6), (6, 10), (6, 10), (8, 8)]
    assert step_shares(roster, epoch=4, epoch_step=0, batch_samples=16) == (10, 6)


def test_survivors_do_not_probe() -> None:
    """A probe's vectors are for all members of the plan."""
    plan = a_plan(8, 4, 4, probe=((10, 4, 2),), probe_steps=5)
    assert step_shares(a_roster(plan, (0, 1)), epoch=0, epoch_step=0, batch_samples=16) == (11, 5)


@pytest.mark.parametrize(
    ("newer", "step", "expected"),
    [
        ({"revision": 2}, 0, True),
        ({"revision": 2}, 3, False),
        ({"revision": 1}, 0, False),
        ({"revision": 2, "generation": 2}, 0, False),
        ({"revision": 2, "boundary": Boundary(kind=BoundaryKind.STEPS, every_steps=3)}, 3, True),
        ({"revision": 2, "boundary": Boundary(kind=BoundaryKind.STEPS, every_steps=3)}, 4, False),
        ({"revision": 2, "boundary": Boundary(kind=BoundaryKind.NEVER)}, 3, False),
    ],
)
def test_a_revision_waits_for_its_boundary(newer: dict[str, Any], step: int, expected: bool) -> None:
    """Only a newer revision of the same generation, and only at the boundary."""
    assert may_adopt(a_roster(a_plan(8, 8)), a_plan(10, 6, **newer), epoch_step=step) is expected


@pytest.mark.parametrize(
    ("planned", "learned", "expected"), [(0, None, 0), (8, None, 8), (0, 4, 4), (8, 4, 4), (2, 4, 2)]
)
def test_the_smaller_micro_batch_wins(planned: int, learned: int | None, expected: int) -> None:
    """The limit learned from an out-of-memory error applies as well as that of the plan."""
    assert micro_batch_samples(replace(A_MEMBER, micro_batch_samples=planned), learned_cap_samples=learned) == expected


@given(
    weights=st.lists(st.integers(0, 9), min_size=2, max_size=5).filter(any), share=st.integers(0, 40),
    micro=st.integers(0, 12), learned=st.one_of(st.none(), st.integers(1, 6)),
)  # fmt: skip
def test_unequal_shards_divide_every_share_and_make_the_same_number_of_passes(
    weights: list[int], share: int, micro: int, learned: int | None
) -> None:
    """Parts follow each other, each is within a sample of its weight, and no pass exceeds a limit."""
    layout = Layout(kind=LayoutKind.SHARDED, shards=len(weights), sample_weights=tuple(weights))
    member = replace(A_MEMBER, layout=layout, share_samples=share, micro_batch_samples=micro)
    parts = [layout.sample_part(share, shard) for shard in range(len(weights))]
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
    assert parts[-1][1] == share
    rounds = rounds_of(member, share, learned_cap_samples=learned)
    assert (rounds == 0) == (share == 0)
    for shard, (start, stop) in enumerate(parts):
        assert abs((stop - start) - share * weights[shard] / sum(weights)) < 1
        size = micro_batch_samples(member, shard, learned_cap_samples=learned)
        passes = even_micro_batches(stop - start, rounds)
        assert len(passes) <= rounds
        assert not size or max(passes, default=0) <= size
        assert not learned or size <= learned
