"""When a plan is taken back: by hand, with steps of two members whose own seconds are known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from heterotrain_planner.perf.counters import MeanVariance, Observation
from heterotrain_planner.planning.brake import Brake, MemberInForce, brake_of


def seen(share: int, own_s: float, step_s: float, *, steps: int = 10, deviation_s: float = 0.0) -> Observation:
    return Observation(
        member="m", share_samples=share, micro_batches=1, steps=steps, ended_s=0.0,
        compute=MeanVariance(mean=own_s, variance=deviation_s**2), step=MeanVariance(mean=step_s),
    )  # fmt: skip


def in_force(share: int, *observations: Observation) -> MemberInForce:
    """Return a member that is predicted to take a second."""
    return MemberInForce(share_samples=share, predicted_s=1.0, observations=observations)


def taken_back(members: Sequence[MemberInForce]) -> Brake | None:
    return brake_of(members, predicted_step_s=1.0)


def pair(slow_s: float, other_s: float = 1.0, *, deviation_s: float = 0.0, steps: int = 10) -> list[MemberInForce]:
    """Return two members; a step takes as long as the slow one."""
    slow = seen(60, slow_s, slow_s, steps=steps, deviation_s=deviation_s)
    return [in_force(60, slow), in_force(40, seen(40, other_s, slow_s, steps=steps))]


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        (pair(1.6), True),
        (pair(1.4), False),
        (pair(1.3, 0.6), False),  # the other one is faster than predicted: that is not the first one's fault
        (pair(2.0, 1.4), False),  # all are slow: the host is busy
        (pair(3.0, 1.4), True),
        (pair(1.6, steps=2), False),
        (pair(1.6, deviation_s=0.2), False),  # two standard errors below 1.6 are 1.47
        (pair(1.6, deviation_s=0.1), True),
        (pair(3.0)[:1], False),  # nothing tells a slow member from a busy host
    ],
)
def test_a_plan_is_taken_back_where_one_member_is_far_slower_than_predicted(
    members: list[MemberInForce], expected: bool
) -> None:
    assert (taken_back(members) is not None) is expected


def test_scrapes_that_differ_are_noise() -> None:
    """Two means of 1.2 and 2.0 are 1.6 ± 0.13: by chance, they are below 1.5."""
    slow = in_force(60, seen(60, 1.2, 1.6, steps=5), seen(60, 2.0, 1.6, steps=5))
    assert taken_back([slow, pair(1.6)[1]]) is None


def test_a_long_step_alone_is_not_enough() -> None:
    """A step of two seconds, of which both members wait for one: the exchange is slow, and no share is to blame."""
    members = [in_force(60, seen(60, 1.0, 2.0)), in_force(40, seen(40, 1.0, 2.0))]
    assert taken_back(members) is None


@pytest.mark.parametrize(
    ("slow_before", "other_before", "step_before_s", "back_to"),
    [
        (50, 50, 1.0, (50, 50)),
        (50, 50, 2.0, None),  # steps were no shorter
        (50, 45, 1.0, None),  # another batch
        (55, 45, 1.0, None),  # the slow member has hardly more than before: it has become slower itself
        (54, 46, 1.0, (54, 46)),
        (70, 30, 1.0, None),  # it had more
    ],
)
def test_shares_before_the_plan_are_back_where_they_can_help(
    slow_before: int, other_before: int, step_before_s: float, back_to: tuple[int, int] | None
) -> None:
    members = [
        in_force(60, seen(slow_before, 0.9, step_before_s), seen(60, 1.8, 1.8)),
        in_force(40, seen(other_before, 0.9, step_before_s), seen(40, 1.0, 1.8)),
    ]
    found = taken_back(members)
    assert found is not None
    assert found.ratio == pytest.approx(1.8)
    assert found.back_to == back_to
