"""Raw counters become observations: differences, restarts, gaps, and whatever else telemetry brings."""

from __future__ import annotations

import math
from dataclasses import replace

from heterotrain_core.contract import metrics
from heterotrain_planner.perf.counters import (
    CounterKey,
    Counters,
    MeanVariance,
    Observation,
    PhaseSums,
    observe,
    usable,
)
from hypothesis import given
from hypothesis import strategies as st

KEY = CounterKey(member="u/0", share_samples=48, micro_batch_samples=32)


def counted(steps: float, seconds: float, squared: float, **more: float) -> Counters:
    """Return counters with one phase."""
    phase = metrics.PHASE_COMPUTE
    return Counters(steps=steps, phase_s={phase: seconds}, phase_s2={phase: squared}, **more)


def test_two_scrapes_give_mean_and_variance_of_the_steps_between() -> None:
    """Means, unbiased variances and the exchange come from differences; missing values stay missing."""
    before = counted(10, 100.0, 5000.0, bucket_steps=10, overlapped_s=1.0, last_bucket_s=0.5)
    after = counted(13, 106.0, 5014.0, bucket_steps=12, overlapped_s=1.6, last_bucket_s=0.7)
    (found,) = observe({KEY: before}, {KEY: after}, ended_s=30.0)
    assert (found.member, found.share_samples, found.micro_batches, found.steps) == ("u/0", 48, 2, 3)
    assert found.compute == MeanVariance(mean=2.0, variance=1.0)  # 1, 2, 3
    assert (found.bucket_steps, found.ended_s, found.warm_up) == (2, 30.0, False)
    assert math.isclose(found.overlapped_s or 0, 0.3)
    assert math.isclose(found.last_bucket_s or 0, 0.1)
    assert found.forward is None
    assert found.first_bucket_fraction is None


def test_without_new_steps_there_is_no_observation() -> None:
    """A key without a new step, or with a count that is not a number, gives no observation."""
    same = counted(10, 100.0, 5000.0)
    assert observe({KEY: same}, {KEY: same}, ended_s=1.0) == ()
    assert observe({}, {KEY: counted(math.nan, 1.0, 1.0)}, ended_s=1.0) == ()


def test_a_counter_that_fell_belongs_to_a_new_process() -> None:
    """Everything since that process began counts, and counts as its warm-up; other members are not touched."""
    other = CounterKey(member="v/0", share_samples=48, micro_batch_samples=0)
    before = {KEY: counted(100, 900.0, 9000.0), other: counted(100, 500.0, 2600.0)}
    after = {KEY: counted(4, 12.0, 38.0), other: counted(102, 510.0, 2652.0)}
    mine, others = observe(before, after, ended_s=1.0)
    assert (mine.steps, mine.compute, mine.warm_up) == (4, MeanVariance(mean=3.0, variance=(38 - 36) / 3), True)
    assert (others.steps, others.warm_up, others.micro_batches) == (2, False, 1)


def test_a_new_share_of_a_known_member_is_not_a_warm_up_and_keeps_the_exchange() -> None:
    """The exchange carries no shape, so a new shape is differenced against the member's other shapes."""
    fresh = CounterKey(member="u/0", share_samples=60, micro_batch_samples=60)
    before = {KEY: counted(10, 1.0, 1.0, bucket_steps=10, overlapped_s=5.0, last_bucket_s=1.0)}
    after = {
        KEY: counted(10, 1.0, 1.0, bucket_steps=14, overlapped_s=9.0, last_bucket_s=1.4),
        fresh: counted(4, 2.0, 1.0, bucket_steps=14, overlapped_s=9.0, last_bucket_s=1.4),
    }
    (found,) = observe(before, after, ended_s=1.0)
    assert (found.share_samples, found.warm_up, found.bucket_steps, found.overlapped_s) == (60, False, 4, 1.0)


def test_the_first_scrape_is_one_observation_a_share() -> None:
    """An operator that restarted, or came late, still gets all there is."""
    (found,) = observe({}, {KEY: counted(5, 10.0, 20.0)}, ended_s=1.0)
    assert (found.steps, found.compute, found.warm_up) == (5, MeanVariance(mean=2.0, variance=0.0), True)


numbers = st.floats() | st.sampled_from([0.0, 1.0, 2.0, 1e9])
counters = st.builds(
    Counters,
    steps=numbers,
    phase_s=st.dictionaries(st.sampled_from(metrics.PHASES), numbers),
    phase_s2=st.dictionaries(st.sampled_from(metrics.PHASES), numbers),
    first_bucket_fraction=st.none() | numbers,
    first_bucket_fraction_squared=st.none() | numbers,
    bucket_steps=st.none() | numbers,
    overlapped_s=st.none() | numbers,
    last_bucket_s=st.none() | numbers,
)
scrapes = st.dictionaries(
    st.builds(
        CounterKey,
        member=st.sampled_from("ab"),
        share_samples=st.integers(-1, 50),
        micro_batch_samples=st.integers(-1, 50),
    ),
    counters,
    max_size=4,
)


@given(scrapes, scrapes)
def test_no_counters_raise(before: dict[CounterKey, Counters], after: dict[CounterKey, Counters]) -> None:
    """For any counters: no exception, and every observation has steps."""
    for found in observe(before, after, ended_s=1.0):
        assert isinstance(found, Observation)
        assert found.steps >= 1
        assert usable(found) in {True, False}


def test_sums_of_phases_are_a_mapping_without_the_missing_ones() -> None:
    some = {metrics.PHASE_COMPUTE: 2.5, metrics.PHASE_STEP: 0.0}
    sums = PhaseSums({**some, metrics.PHASE_SYNC: float("nan"), "unknown": 1.0})
    assert sums == some
    assert some == sums
    assert (len(sums), sums.get(metrics.PHASE_LOAD), sums.get("unknown")) == (2, None, None)
    assert PhaseSums({}) == {}


@given(counters, counters)
def test_observations_do_not_depend_on_how_sums_are_kept(before: Counters, after: Counters) -> None:
    def packed(counters: Counters) -> Counters:
        return replace(counters, phase_s=PhaseSums(counters.phase_s), phase_s2=PhaseSums(counters.phase_s2))

    key = CounterKey(member="m", share_samples=8, micro_batch_samples=8)
    expected = observe({key: before}, {key: after}, ended_s=1.0)
    assert repr(observe({key: packed(before)}, {key: packed(after)}, ended_s=1.0)) == repr(expected)
