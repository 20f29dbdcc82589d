"""The stated distance to the best allocation: always true, and seldom changed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest
from heterotrain_operator.decide.grants.grant import STATED_FOR_S, JobGrant, StatedDistance, reason_in, restated
from heterotrain_planner.allocate.distance import Distance


def statements(distances: Iterable[Distance], *, every_s: float) -> list[StatedDistance]:
    """Return what is stated after each of these distances."""
    found: list[StatedDistance] = []
    for number, now in enumerate(distances):
        found.append(restated(found[-1] if found else None, now, now_s=number * every_s))
    return found


def test_what_is_stated_is_true_and_changes_seldom() -> None:
    """A day of distances that change with each scrape, between nothing and 100 %, sometimes proved for all jobs."""
    rng = random.Random(1)  # noqa: S311  # reproducible
    day_s, every_s = 24 * 3600.0, 10.0
    distances = [
        Distance(gain=rng.choice([0.0, 10 ** rng.uniform(-5, 0)]), proved=rng.random() < 0.5)
        for _ in range(int(day_s / every_s))
    ]
    stated = statements(distances, every_s=every_s)
    for now, then in zip(distances, stated, strict=True):
        assert then.distance.gain >= now.gain
        assert now.proved or not then.distance.proved
    assert 1 < len({each.distance for each in stated}) < 24
    changes = sum(before.distance != now.distance for before, now in itertools.pairwise(stated))
    assert changes <= 12 * day_s / STATED_FOR_S  # eleven figures that only rise, and one fall


def test_a_distance_that_comes_and_goes_is_stated_once() -> None:
    """Between 0.4 and 0.6 %: the status says 1 %, until it stays smaller for ten minutes."""
    rng = random.Random(2)  # noqa: S311  # reproducible
    noisy = [Distance(gain=rng.uniform(0.004, 0.006), proved=rng.random() < 0.5) for _ in range(5000)]
    quiet = [Distance(gain=0.004, proved=True)] * 61
    stated = [each.distance for each in statements([*noisy, *quiet], every_s=10.0)]
    kept = Distance(gain=0.01, proved=False)
    assert set(stated[20:5000]) == {kept}
    assert stated[5040] == kept
    assert stated[-1] == Distance(gain=0.005, proved=True)


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (0.0, "no allocation is better"),
        (1e-9, "no allocation is better"),
        (0.0004, "at most 0.1 % from the best possible"),
        (0.0031, "at most 0.5 % from the best possible"),
        (0.063, "at most 10 % from the best possible"),
        (0.9, "at most 100 % from the best possible"),
        (1.2, "no useful bound on the best possible is known"),
    ],
)
def test_a_status_states_one_digit_rounded_up(gain: float, words: str) -> None:
    grant = JobGrant(reason="waits", distance=restated(None, Distance(gain=gain, proved=True), now_s=0.0))
    assert grant.message == f"waits; allocation: {words}"


def test_a_grant_without_an_allocation_states_no_distance() -> None:
    assert JobGrant(reason="waits").message == "waits"
    assert JobGrant().message == ""


@pytest.mark.parametrize("reason", ["", "2 v100: no other job wants more"])
def test_the_reason_is_found_again_in_the_message(reason: str) -> None:
    """A restarted operator reads it from the status, and would otherwise write each status again."""
    distance = StatedDistance(Distance(gain=0.0, proved=True), 0.0)
    grant = JobGrant(reason=reason, distance=distance)
    assert grant.message != reason
    assert reason_in(grant.message) == reason
    assert reason_in(reason) == reason
