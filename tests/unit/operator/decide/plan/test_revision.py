"""When a decision is worth a revision: it depends on the newest plan and on the distance to the boundary."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from heterotrain_core.contract.plan import (
    Binding,
    Boundary,
    BoundaryKind,
    ComputeTime,
    Plan,
    Prediction,
)
from heterotrain_operator.api.training import Rebalance
from heterotrain_operator.cluster_state.telemetry import MemberGauges, MemberId, Rates, StepsInForce, Telemetry
from heterotrain_operator.decide.plan.revision import (
    BoundaryDistance,
    distance_to_boundary,
    least_gain,
    next_boundary,
    seconds_to_boundary,
    worth_writing,
)
from heterotrain_planner.planning.boundary import FIRST_STEPS, LONGEST_S, steps_to_boundary
from support.plans import plan_of
from support.repeat import times

COMPUTE = ComputeTime(per_sample_s=0.01, fixed_s=0.0, backward_per_sample_s=0.02, backward_fixed_s=0.0)
PREDICTION = Prediction(step_s=1.0, efficiency=0.9, efficiency_ceiling=0.95, bindings=(Binding.COMPUTE,) * 2)
STEPS = Boundary(kind=BoundaryKind.STEPS, every_steps=10)


def a_plan(**fields: Any) -> Plan:
    """Return plan 2.7 of two members with 60 and 40 samples."""
    plan = plan_of([60, 40], generation=2, revision=7)
    members = tuple(replace(member, compute=COMPUTE) for member in plan.members)
    return replace(plan, **({"members": members, "prediction": PREDICTION} | fields))


def telemetry_at(
    *revisions: int, cursor: int = 0, rate: float | None = 100.0, interval_s: float | None = 1.0
) -> Telemetry:
    """Return telemetry of members that have these revisions in force, in an epoch of 10,000 samples."""
    gauges = {
        MemberId(f"u{rank}", 0): MemberGauges(
            worker=f"w{rank}",
            generation=2,
            revision=revision,
            step=1,
            cursor_samples=cursor,
            epoch_samples=10_000,
            global_batch_samples=100,
            epoch_step=cursor // 100,
        )
        for rank, revision in enumerate(revisions)
    }
    return Telemetry(gauges=gauges, rates=Rates(samples_per_s=rate), scrape_interval_s=interval_s)


@pytest.mark.parametrize(
    ("boundary", "telemetry", "expected"),
    [
        (Boundary(), telemetry_at(7, 7), BoundaryDistance.FAR),
        (Boundary(), telemetry_at(7, 6), BoundaryDistance.FAR),
        (Boundary(), telemetry_at(6, 6, cursor=9_500), BoundaryDistance.FAR),
        (Boundary(), telemetry_at(6, 6, cursor=9_700), BoundaryDistance.NEAR),
        (Boundary(), telemetry_at(7, 7, cursor=9_700), BoundaryDistance.NEAR),
        (Boundary(), telemetry_at(6, 6, cursor=9_500, interval_s=15.0), BoundaryDistance.NEAR),
        (Boundary(kind=BoundaryKind.NEVER), telemetry_at(6, 6, cursor=9_500), BoundaryDistance.FAR),
        (STEPS, telemetry_at(6, 6, cursor=1_200), BoundaryDistance.FAR),
        (STEPS, telemetry_at(6, 6, cursor=1_700), BoundaryDistance.NEAR),
        (Boundary(), Telemetry(), BoundaryDistance.NEAR),
        (Boundary(), telemetry_at(6, 6, rate=None), BoundaryDistance.NEAR),
        (Boundary(), telemetry_at(6, 6, interval_s=None), BoundaryDistance.NEAR),
    ],
)
def test_the_distance_to_the_boundary(boundary: Boundary, telemetry: Telemetry, expected: BoundaryDistance) -> None:
    assert distance_to_boundary(boundary, telemetry) is expected


def test_the_time_to_the_boundary_follows_from_the_samples_before_it() -> None:
    assert seconds_to_boundary(Boundary(), telemetry_at(6, 6, cursor=4_000)) == 60.0
    assert seconds_to_boundary(STEPS, telemetry_at(6, 6, cursor=4_300)) == 7.0
    assert seconds_to_boundary(STEPS, telemetry_at(6, 6, cursor=9_950)) == 0.5
    assert seconds_to_boundary(Boundary(), telemetry_at(6, 6, rate=None)) is None


def test_a_job_that_has_just_become_faster_arrives_sooner_than_its_rate_suggests() -> None:
    """Two ranks: steps of 100 samples in 0.25 s since the plan took effect count, slower ones change nothing."""
    telemetry = telemetry_at(7, 7, cursor=4_000)
    for step_s, expected_s in ((0.25, 15.0), (4.0, 60.0)):
        sums = StepsInForce(version=(2, 7), steps={50: 8}, step_s={50: 8 * step_s})
        faster = replace(telemetry, in_force=dict.fromkeys(telemetry.gauges, sums))
        assert seconds_to_boundary(Boundary(), faster) == expected_s


AUTO = Rebalance()


def in_force(steps: int, step_s: float, *revisions: int) -> Telemetry:
    """Return telemetry of members whose newest plan has been in force for so many steps."""
    telemetry = telemetry_at(*revisions)
    sums = StepsInForce(version=(2, revisions[0]), steps={60: steps}, step_s={60: steps * step_s})
    return replace(telemetry, in_force=dict.fromkeys(telemetry.gauges, sums))


def test_a_boundary_that_follows_the_job_comes_soon_at_first_and_seldom_once_shares_have_settled() -> None:
    first = next_boundary(AUTO, None, Telemetry())
    assert first == next_boundary(AUTO, a_plan(), in_force(3, 1.0, 7, 7)) == STEPS
    later = [next_boundary(AUTO, a_plan(), in_force(steps, 0.1, 7, 7)).every_steps for steps in (100, 1_000, 10**6)]
    assert later == [40, 320, 2_560], "at most half of the steps so far, and at most five minutes"
    assert next_boundary(AUTO, a_plan(), in_force(10**6, 60.0, 7, 7)) == STEPS


def test_a_plan_that_waits_is_refined_without_being_put_off() -> None:
    waiting = a_plan(boundary=Boundary(kind=BoundaryKind.STEPS, every_steps=20))
    assert next_boundary(AUTO, waiting, in_force(10_000, 0.1, 6, 7)) == waiting.boundary
    assert next_boundary(AUTO, waiting, in_force(10_000, 0.1, 7, 7)).every_steps > 20


@pytest.mark.parametrize("seed", range(times(gate=50, every=3_000)))
def test_distances_are_nested_and_bounded_in_time(seed: int) -> None:
    """The oracle asks each distance by itself: whether its boundaries are among those of all shorter ones."""
    chance = random.Random(seed)  # noqa: S311  # the same numbers in every run
    step_s, steps = 10 ** chance.uniform(-3, 2), chance.randrange(10**6)
    found = steps_to_boundary(steps, step_s)
    assert found == FIRST_STEPS or (found <= steps / 2 and found * step_s <= LONGEST_S)
    longer = 2 * found
    assert longer > steps / 2 or longer * step_s > LONGEST_S, "not shorter than it has to be"
    for earlier in (chance.randrange(steps + 1) for _ in range(5)):
        shorter = steps_to_boundary(earlier, step_s)
        assert all(at % shorter == 0 for at in range(0, 20 * found, found)), "no boundary is lost on the way"


def test_far_from_the_boundary_only_a_large_gain_counts() -> None:
    assert least_gain(BoundaryDistance.FAR) > 0.03 > least_gain(BoundaryDistance.NEAR)


def divided(**changes: Any) -> Plan:
    """Return the plan with other values; those of members by index."""
    plan = a_plan(**{name: value for name, value in changes.items() if name in {"prediction", "probe", "probe_steps"}})
    for name in changes.keys() - {"prediction", "probe", "probe_steps"}:
        values = zip(plan.members, changes[name], strict=True)
        plan = replace(plan, members=tuple(replace(member, **{name: value}) for member, value in values))
    return plan


EVERYWHERE, NOT_FAR, NOWHERE = (
    frozenset(BoundaryDistance),
    frozenset(BoundaryDistance) - {BoundaryDistance.FAR},
    frozenset[BoundaryDistance](),
)


@pytest.mark.parametrize(
    ("division", "plan", "distances"),
    [
        ({}, {}, NOWHERE),
        ({"prediction": replace(PREDICTION, step_s=1.09)}, {}, NOWHERE),
        ({"prediction": replace(PREDICTION, step_s=1.11)}, {}, NOT_FAR),
        ({"prediction": replace(PREDICTION, step_s=0.9)}, {}, NOT_FAR),
        ({"probe": ((70, 30),), "probe_steps": 2}, {}, NOT_FAR),
        ({}, {"probe": ((70, 30),), "probe_steps": 2}, NOT_FAR),
        ({"micro_batch_samples": (30, 0)}, {}, EVERYWHERE),
        ({"micro_batch_samples": (60, 80)}, {}, NOWHERE),
        ({"compute": (None, None), "prediction": None, "probe": ((70, 30),), "probe_steps": 2}, {}, NOWHERE),
    ],
)
def test_which_divisions_are_worth_writing_at_which_distance(
    division: dict[str, Any], plan: dict[str, Any], distances: frozenset[BoundaryDistance]
) -> None:
    """Smaller micro-batches are written at once, improvements near the boundary, and lost telemetry never."""
    found = {distance for distance in BoundaryDistance if worth_writing(divided(**division), a_plan(**plan), distance)}
    assert found == distances


def test_changed_shares_are_worth_writing_at_any_distance() -> None:
    changed = divided(share_samples=(61, 39))
    assert all(worth_writing(changed, a_plan(), distance) for distance in BoundaryDistance)


def test_a_first_model_is_written_at_once_and_larger_micro_batches_near_the_boundary() -> None:
    bare = a_plan(prediction=None)
    bare = replace(bare, members=tuple(replace(member, compute=None) for member in bare.members))
    assert worth_writing(a_plan(), bare, BoundaryDistance.FAR)
    small = a_plan()
    small = replace(small, members=tuple(replace(member, micro_batch_samples=20) for member in small.members))
    assert not worth_writing(a_plan(), small, BoundaryDistance.FAR)
    assert worth_writing(a_plan(), small, BoundaryDistance.NEAR)
