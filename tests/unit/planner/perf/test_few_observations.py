"""No estimate needs many observations: none, one or two of them, of one step or two, give finite values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from heterotrain_core.contract.plan import CommunicationTime
from heterotrain_planner.perf.counters import MeanVariance, Observation
from heterotrain_planner.perf.drift import Point, changes
from heterotrain_planner.perf.exchange import fit_exchange
from heterotrain_planner.perf.exchange_sizes import MeasuredExchange
from heterotrain_planner.perf.memory import MemoryPeak, micro_batch_cap
from heterotrain_planner.perf.merge import merge_old
from heterotrain_planner.perf.ranks import observations_of_member
from heterotrain_planner.planning.batch import BatchRequest, decide_batch
from heterotrain_planner.planning.evidence import MemberEvidence
from heterotrain_planner.planning.fitting import fit_members
from heterotrain_planner.planning.shares import SharesRequest, decide_shares
from support.repeat import first_seed, times

_PHASES = ("load", "forward", "backward", "sync", "update", "compute", "step", "first_bucket_fraction")


def _observations(rng: np.random.Generator, member: str, count: int) -> tuple[Observation, ...]:
    """Return a rank's observations of one or two steps; each phase may be missing, zero, and without a variance."""
    found = []
    for number in range(count):
        steps = int(rng.integers(1, 3))
        phases = {}
        for phase in _PHASES:
            if rng.random() < 0.2:
                continue
            mean = float(rng.choice([0.0, 1e-9, 0.4, rng.random()]))
            spread = float(rng.choice([0.0, 1e-4])) if steps > 1 and rng.random() < 0.8 else None
            phases[phase] = MeanVariance(mean=mean, variance=spread)
        timed = bool(rng.integers(2))
        found.append(
            Observation(
                member=member,
                share_samples=int(rng.choice([0, 1, 8, 8, 8])),
                steps=steps,
                ended_s=float(number),
                warm_up=rng.random() < 0.2,
                bucket_steps=steps if timed else 0,
                overlapped_s=float(rng.choice([0.0, 0.1])) if timed else None,
                last_bucket_s=float(rng.choice([0.0, 0.1])) if timed else None,
                generation=int(rng.integers(2)) if rng.integers(2) else None,
                **phases,
            )
        )
    return tuple(found)


def _numbers(value: Any) -> Iterator[float]:
    """Return all numbers of a value."""
    if isinstance(value, (int, float)):
        yield float(value)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _numbers(getattr(value, field.name))
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _numbers(each)


def _assert_no_nonsense(value: Any) -> None:
    assert not any(math.isnan(number) for number in _numbers(value)), value


def test_members_of_several_ranks_with_few_observations_have_models_and_shares() -> None:
    """Ranks are scraped at different times, so that one may show a single step where another shows two."""
    first = first_seed(gate=0)
    for seed in range(first, first + times(gate=300, every=4000)):
        rng = np.random.default_rng(seed)
        members = []
        for number in range(int(rng.integers(1, 4))):
            ranks = [
                _observations(rng, f"{number}/{rank}", int(rng.integers(3))) for rank in range(int(rng.integers(1, 3)))
            ]
            observations = merge_old(observations_of_member(ranks))
            members.append(MemberEvidence(member=str(number), pool=str(number % 2), observations=observations))
        kept = int(rng.integers(1, len(members) + 1))
        fits = fit_members(members[:kept], members[kept:])
        for total in (None, 8 * kept):
            for model in fits.models(total_samples=total):
                _assert_no_nonsense(model)
        _assert_no_nonsense(fits.exchange)
        shares = decide_shares(SharesRequest(total_samples=8 * kept, members=fits.evidence, former=fits.former))
        _assert_no_nonsense(shares)
        request = BatchRequest(
            members=fits.evidence, former=fits.former, base_samples=8 * kept, least_samples=4 * kept,
            most_samples=64 * kept, current_samples=8 * kept, noise_samples=100.0,
        )  # fmt: skip
        _assert_no_nonsense(decide_batch(request))


def test_a_single_step_next_to_several_of_another_rank_has_no_spread() -> None:
    """The slower rank's variance is one over its own steps."""
    one = Observation(member="m", share_samples=8, steps=1, ended_s=1.0, compute=MeanVariance(mean=0.5))
    two = Observation(member="m", share_samples=8, steps=2, ended_s=1.0, compute=MeanVariance(mean=0.9, variance=0.01))
    later = [Observation(member="m", share_samples=8, steps=4, ended_s=2.0, compute=MeanVariance(mean=0.5))]
    (first, _) = observations_of_member([(one, *later), (two,)])
    assert first.compute == MeanVariance(mean=0.9)
    fit_members([MemberEvidence(member="m", observations=(first,))])


def test_the_other_estimators() -> None:
    for count in range(3):
        points = [Point(size=8.0, seconds=0.5, variation=0.0, steps=1, scraped_s=float(i)) for i in range(count)]
        assert changes(points) == ()
        peaks = [MemoryPeak(micro_batch_samples=8, peak_bytes=1e9) for _ in range(count)]
        assert micro_batch_cap(peaks, memory_bytes=2e9).samples is None
        _assert_no_nonsense(fit_exchange(_observations(np.random.default_rng(count), "m", count)))
    known = MeasuredExchange()
    for members in (2, 2, 3):
        found = CommunicationTime(overlapped_s=0.1, last_bucket_s=0.1, gamma=0.1)
        known = MeasuredExchange(communication=found, seen=known.seen).measured_among(members, across=True, steps=1)
        for other in (1, 2, 5):
            _assert_no_nonsense(known.among(other, across=False))
