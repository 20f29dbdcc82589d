"""Merging old observations: fewer of them, the same steps, means and variances, and the same model."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
from heterotrain_core.contract import metrics
from heterotrain_planner.perf.counters import CounterKey, Counters, Observation, observe
from heterotrain_planner.perf.fit import fit_member
from heterotrain_planner.perf.merge import BLOCK_STEPS, MOST_STEPS, RECENT_STEPS, merge_old
from hypothesis import given
from hypothesis import strategies as st


def scrape(share: int, seconds: list[float], ended_s: float) -> Observation:
    """Return one scrape's observation of steps with these seconds."""
    parts = {
        metrics.PHASE_FORWARD: 1 / 3,
        metrics.PHASE_BACKWARD: 2 / 3,
        metrics.PHASE_COMPUTE: 1.0,
        metrics.PHASE_STEP: 1.0,
    }
    counters = Counters(
        steps=len(seconds),
        phase_s={phase: sum(part * s for s in seconds) for phase, part in parts.items()},
        phase_s2={phase: sum((part * s) ** 2 for s in seconds) for phase, part in parts.items()},
    )
    key = CounterKey(member="m", share_samples=share, micro_batch_samples=share)
    known = CounterKey(member="m", share_samples=1, micro_batch_samples=1)
    nothing = Counters(steps=0, phase_s={}, phase_s2={})
    (found,) = observe({known: nothing}, {known: nothing, key: counters}, ended_s=ended_s)
    return found


def a_long_run(
    scrapes: int, *, seed: int = 1, speed_at: float = 1.0
) -> tuple[list[Observation], dict[int, list[float]]]:
    rng = random.Random(seed)
    observations, seconds_of = [], dict[int, list[float]]()
    for number in range(scrapes):
        share = rng.choice((20, 40))
        slower = speed_at if number >= scrapes // 2 else 1.0
        seconds = [slower * (0.05 + 0.01 * share) * rng.uniform(0.97, 1.03) for _ in range(rng.randint(1, 4))]
        observations.append(scrape(share, seconds, float(number)))
        seconds_of.setdefault(share, []).extend(seconds)
    return observations, seconds_of


def test_a_long_run_becomes_short_and_keeps_every_step() -> None:
    observations, _ = a_long_run(400)
    condensed = merge_old(observations)
    assert len(condensed) < 100
    assert sum(o.steps for o in condensed) == sum(o.steps for o in observations)


def test_the_newest_scrapes_stay_unchanged() -> None:
    observations, _ = a_long_run(400)
    condensed = merge_old(observations)
    newest = []
    for observation in reversed(observations):
        newest.insert(0, observation)
        if sum(o.steps for o in newest) >= RECENT_STEPS:
            break
    assert condensed[-len(newest) :] == tuple(newest)


def test_mean_and_variance_are_those_of_all_steps_together() -> None:
    observations, _ = a_long_run(BLOCK_STEPS // 4)
    quiet = [scrape(30, [0.3], 1000.0 + number) for number in range(RECENT_STEPS)]
    merged = {o.share_samples: o for o in merge_old([*observations, *quiet]) if o.ended_s < 1000}
    seconds_of: dict[int, list[float]] = {}
    rng = random.Random(1)
    for _ in observations:
        share = rng.choice((20, 40))
        seconds_of.setdefault(share, []).extend(
            (0.05 + 0.01 * share) * rng.uniform(0.97, 1.03) for _ in range(rng.randint(1, 4))
        )
    for share, seconds in seconds_of.items():
        found = merged[share].compute
        assert found is not None
        assert merged[share].steps == len(seconds)
        assert found.mean == pytest.approx(statistics.mean(seconds), rel=1e-9)
        assert found.variance == pytest.approx(statistics.variance(seconds), rel=1e-6)


@pytest.mark.parametrize("speed_at", [1.0, 1.5])
def test_the_model_stays_the_same_also_after_a_change_of_speed(speed_at: float) -> None:
    observations, _ = a_long_run(300, speed_at=speed_at)
    whole, short = fit_member(observations), fit_member(merge_old(observations))
    assert whole.compute is not None
    assert short.compute is not None

    def seconds(model: object, share: int) -> float:
        compute = model.compute  # type: ignore[attr-defined]  # a MemberModel
        per_sample_s = compute.per_sample_s + compute.backward_per_sample_s
        return float(compute.fixed_s + compute.backward_fixed_s + compute.update_s + per_sample_s * share)

    for share in (10, 20, 40, 80):
        assert seconds(short, share) == pytest.approx(seconds(whole, share), rel=0.02)


def test_two_speeds_are_not_merged() -> None:
    slow = [scrape(20, [0.4], float(number)) for number in range(10)]
    fast = [scrape(20, [0.2], 100.0 + number) for number in range(10)]
    recent = [scrape(20, [0.2], 200.0 + number) for number in range(RECENT_STEPS)]
    old = [o for o in merge_old([*slow, *fast, *recent]) if o.ended_s < 200]
    assert [round(o.compute.mean, 3) for o in old if o.compute] == [0.4, 0.2]


def test_very_old_observations_are_dropped() -> None:
    observations = [scrape(20, [0.25] * 10, float(number)) for number in range(1000)]
    kept = merge_old(observations)
    assert MOST_STEPS <= sum(o.steps for o in kept) <= MOST_STEPS + BLOCK_STEPS + 10
    assert kept[-1] == observations[-1]


@pytest.mark.parametrize("steps_a_scrape", [10, 500, 4000])
def test_old_shares_still_show_the_slope(steps_a_scrape: int) -> None:
    """A probe in the first scrape, then one share for ten thousand steps: the line is still known."""
    kept: tuple[Observation, ...] = ()
    arrived = [replace(scrape(share, [0.1 + 0.01 * share] * 6, 1.0), warm_up=True) for share in (14, 26)]
    later = 10_000 // steps_a_scrape
    arrived += [scrape(20, [0.3] * steps_a_scrape, 100.0 + number) for number in range(later)]
    for observation in arrived:
        kept = merge_old((*kept, observation))
        assert merge_old(kept) == kept
    assert len(kept) < MOST_STEPS / BLOCK_STEPS + RECENT_STEPS
    model = fit_member(kept)
    assert model.shapes == 3
    assert model.compute is not None
    assert model.compute.fixed_s + model.compute.backward_fixed_s == pytest.approx(0.1, rel=0.1)


def test_only_a_few_old_shares_are_kept() -> None:
    old = [scrape(share, [0.01 * share] * 6, float(share)) for share in range(10, 40)]
    kept = merge_old([*old, *(scrape(50, [0.5] * 500, 100.0 + number) for number in range(20))])
    assert [o.share_samples for o in kept if o.share_samples != 50] == list(range(32, 40))


@given(st.lists(st.tuples(st.sampled_from([10, 20]), st.integers(1, 5)), max_size=80))
def test_merging_again_changes_nothing(steps: list[tuple[int, int]]) -> None:
    observations = [scrape(share, [0.01 * share] * count, float(i)) for i, (share, count) in enumerate(steps)]
    once = merge_old(observations)
    assert merge_old(once) == once
    assert sum(o.steps for o in once) == sum(count for _, count in steps)


def test_exchanges_between_other_members_are_not_averaged() -> None:
    def exchanged(generation: int | None, seconds: float, ended_s: float) -> Observation:
        found = scrape(20, [0.1] * 10, ended_s)
        return replace(found, generation=generation, bucket_steps=10, overlapped_s=seconds, last_bucket_s=seconds / 2)

    late = [scrape(40, [0.1] * RECENT_STEPS, 9.0)]
    for first, second, expected in (
        ((1, 0.2), (1, 0.4), (1, 20, 0.3)),
        ((1, 0.2), (2, 0.4), (2, 10, 0.4)),
        ((1, 0.2), (None, 0.3), (1, 10, 0.2)),
        ((None, 0.3), (2, 0.4), (2, 10, 0.4)),
    ):
        merged = merge_old([exchanged(*first, 1.0), exchanged(*second, 2.0), *late])[0]
        assert merged.steps == 20
        assert (merged.generation, merged.bucket_steps, merged.overlapped_s) == pytest.approx(expected)
