"""Rare long steps that were learned with a few members and one batch, for other members and batches: against draws.

The oracle draws steps and takes means of maxima; it uses none of the formulas under test.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from heterotrain_core.contract.hiccups import Hiccups
from heterotrain_core.contract.plan import ComputeTime, Prediction
from heterotrain_core.split.member import SplitMember
from heterotrain_planner.allocate.noise import noise_ceilings
from heterotrain_planner.allocate.problem import JobDemand, JobPool
from heterotrain_planner.allocate.value import rates
from heterotrain_planner.perf.counters import MeanVariance, Observation
from heterotrain_planner.perf.expected_maximum import balanced_ceiling, common_variation
from heterotrain_planner.planning.evidence import MemberEvidence
from heterotrain_planner.planning.fitting import fit_members
from heterotrain_planner.planning.shares import SharesDecision, SharesRequest, decide_shares
from heterotrain_planner.split.expected import efficiency_ceiling
from support.repeat import times

PER_SAMPLE_S, FIXED_S = 0.01, 0.1
SCALING = Hiccups(rate=0.01, ratio=2.0)
PAUSES = Hiccups(rate=0.01, pause_s=2.0)
NOISE = 0.03


def drawn(
    own_s: np.ndarray, hiccups: Hiccups, variation: float, steps: int, rng: np.random.Generator, *, members: int = 0
) -> np.ndarray:
    """Return own seconds of single steps; ``own_s`` are those without long steps, of each member or of all alike."""
    own_s = own_s if own_s.ndim else np.full(members, float(own_s))
    times = own_s * (1 + variation * rng.standard_normal((steps, len(own_s))))
    long = rng.random(times.shape) < hiccups.rate
    return np.asarray(times + long * (hiccups.ratio * own_s + hiccups.pause_s))


def told(
    shares: list[tuple[list[int], int]], hiccups: Hiccups, rng: np.random.Generator, *, scrape: int = 10
) -> tuple[MemberEvidence, ...]:
    """Return the evidence of members of one speed after so many steps at each division."""

    def spread(values: np.ndarray) -> MeanVariance:
        return MeanVariance(mean=float(values.mean()), variance=float(values.var(ddof=1)))

    zero = MeanVariance(mean=0.0, variance=0.0)
    found: list[list[Observation]] = [[] for _ in shares[0][0]]
    now_s = 0.0
    for division, steps in shares:
        own_s = PER_SAMPLE_S * np.array(division) + FIXED_S
        for _ in range(steps // scrape):
            times = drawn(own_s, hiccups, NOISE, scrape, rng)
            step_s = times.max(axis=1)
            now_s += float(step_s.sum())
            for rank, share in enumerate(division):
                own = times[:, rank]
                found[rank].append(
                    Observation(
                        member=f"m{rank}",
                        share_samples=share,
                        steps=scrape,
                        ended_s=now_s,
                        load=zero,
                        forward=spread(own / 3),
                        backward=spread(own * 2 / 3),
                        compute=spread(own),
                        sync=spread(step_s - own),
                        step=spread(step_s),
                        update=zero,
                    )
                )
    return tuple(MemberEvidence(member=f"m{rank}", observations=tuple(o)) for rank, o in enumerate(found))


def prediction_of(members: tuple[MemberEvidence, ...]) -> Prediction:
    """Return the prediction for the batch of the last steps."""
    shares = tuple(each.observations[-1].share_samples for each in members)
    decision = decide_shares(SharesRequest(total_samples=sum(shares), members=members, current_shares=shares))
    assert isinstance(decision, SharesDecision)
    assert decision.prediction is not None
    return decision.prediction


def expected_ceiling(found: Prediction, members: int, own_s: float) -> float:
    """Return the efficiency that is expected of other members and another batch, as the allocation computes it."""
    variation = common_variation(
        found.efficiency_ceiling, len(found.bindings), found.hiccups.relative_to(found.own_s or 1.0)
    )
    return float(noise_ceilings(variation, np.array([members]), found.hiccups, np.array([own_s]))[0])


@pytest.mark.parametrize(("members", "error"), [(2, 0.01), (8, 0.02), (16, 0.03), (32, 0.05)])
def test_the_efficiency_of_other_numbers_of_members_follows_from_three(members: int, error: float) -> None:
    """Three times as long steps, one in a hundred; 600 steps of three members were seen."""
    rng = np.random.default_rng(1)
    times = drawn(np.array(1.0), SCALING, NOISE, 100_000, rng, members=members)
    true = float(times.mean() / times.max(axis=1).mean())
    seen = [prediction_of(told([([100] * 3, 600)], SCALING, rng)) for _ in range(6)]
    found = float(np.mean([expected_ceiling(each, members, 1.1) for each in seen]))
    assert found == pytest.approx(true, abs=error)


@pytest.mark.parametrize("hiccups", [SCALING, PAUSES], ids=["longer by a part", "longer by a pause"])
@pytest.mark.parametrize(("members", "share"), [(3, 800), (16, 200), (16, 800)])
def test_the_efficiency_of_another_batch_follows_from_two_batches(hiccups: Hiccups, members: int, share: int) -> None:
    """The batch doubled once, so it shows whether long steps grow with it; four times as much was never seen."""
    rng = np.random.default_rng(2)
    own_s = PER_SAMPLE_S * share + FIXED_S
    times = drawn(np.array(own_s), hiccups, NOISE, 100_000, rng, members=members)
    true = float(times.mean() / times.max(axis=1).mean())
    seen = [prediction_of(told([([100] * 3, 300), ([200] * 3, 300)], hiccups, rng)) for _ in range(12)]
    found = float(np.mean([expected_ceiling(each, members, own_s) for each in seen]))
    assert found == pytest.approx(true, abs=0.02)


@pytest.mark.parametrize("hiccups", [SCALING, PAUSES], ids=["longer by a part", "longer by a pause"])
def test_a_changed_batch_shows_of_which_kind_long_steps_are(hiccups: Hiccups) -> None:
    """In ten runs of ten; with one size only, they are taken for parts of the step."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        fits = fit_members(told([([100] * 3, 300), ([200] * 3, 300)], hiccups, rng))
        found = fits.models(total_samples=600)[0].hiccups
        assert (found.pause_s > 0) == (hiccups.pause_s > 0)
        assert found.rate == pytest.approx(0.01, rel=0.7)
        assert (found.ratio, found.pause_s) == pytest.approx((hiccups.ratio, hiccups.pause_s), rel=0.15)
        one = fit_members(told([([100] * 3, 600)], hiccups, rng)).models(total_samples=300)[0].hiccups
        assert one.pause_s == 0
        assert one.ratio == pytest.approx(hiccups.ratio + hiccups.pause_s / 1.1, rel=0.15)


def test_the_predicted_step_has_the_pauses_of_every_batch() -> None:
    """A pause adds the same seconds to a step of 100 and of 400 samples."""
    rng = np.random.default_rng(3)
    errors = []
    for _ in range(8):
        fits = fit_members(told([([100] * 3, 300), ([200] * 3, 300)], PAUSES, rng))
        model = fits.models(total_samples=600)[0]
        assert model.compute is not None
        more_s = PAUSES.rate * PAUSES.pause_s
        slope = model.compute.per_sample_s + model.compute.backward_per_sample_s
        fixed = model.compute.fixed_s + model.compute.backward_fixed_s + model.compute.update_s
        errors.append((slope * 400 + fixed) / (400 * PER_SAMPLE_S + FIXED_S + more_s) - 1)
    assert float(np.mean(errors)) == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("seed", range(times(gate=10, every=400)))
def test_ceilings_match_draws(seed: int) -> None:
    """Any noise, number of members, length of a step, and long steps of both kinds at once."""
    rng = np.random.default_rng(seed)
    members, own_s, variation = int(rng.integers(2, 40)), float(rng.uniform(0.05, 5)), float(rng.uniform(0.0, 0.2))
    hiccups = Hiccups(
        rate=float(rng.uniform(0.001, 0.1)), ratio=float(rng.uniform(0, 3)), pause_s=float(rng.uniform(0, 3))
    )
    mean_s = own_s
    short_s = mean_s - hiccups.rate * (hiccups.ratio * mean_s + hiccups.pause_s)
    times = short_s + mean_s * variation * rng.standard_normal((40_000, members))
    times += (rng.random(times.shape) < hiccups.rate) * (hiccups.ratio * mean_s + hiccups.pause_s)
    last = times.max(axis=1)
    error = 4.5 * float(last.std()) / math.sqrt(len(last)) / float(last.mean())
    found = float(noise_ceilings(variation, np.array([members]), hiccups, np.array([own_s]))[0])
    assert found == pytest.approx(mean_s / float(last.mean()), rel=error + 0.01)


@pytest.mark.parametrize("seed", range(times(gate=6, every=200)))
def test_the_variation_is_what_a_ceiling_has_beyond_its_long_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    members, variation = int(rng.integers(2, 40)), float(rng.uniform(0.01, 0.3))
    hiccups = Hiccups(rate=float(rng.uniform(0, 0.1)), ratio=float(rng.uniform(0, 3)))
    ceiling = balanced_ceiling([variation] * members, hiccups)
    assert common_variation(ceiling, members, hiccups) == pytest.approx(variation, abs=3e-3)
    assert common_variation(1.0, members, hiccups) == 0.0


@pytest.mark.parametrize("seed", range(times(gate=4, every=80)))
def test_no_shares_exceed_the_ceiling_with_pauses(seed: int) -> None:
    """Random divisions of one batch, judged by drawn steps, stay below it."""
    rng = np.random.default_rng(seed)
    members = int(rng.integers(2, 9))
    rate_per_s, variations = rng.uniform(0.5, 2, members), rng.uniform(0.01, 0.3, members)
    hiccups = Hiccups(rate=0.02, ratio=float(rng.uniform(0, 1)), pause_s=float(rng.uniform(0, 2)))
    ceiling = efficiency_ceiling(variations.tolist(), rate_per_s.tolist(), hiccups=hiccups)
    for _ in range(10):
        mean_s = rng.uniform(0.7, 1.3, members) ** rng.uniform(0, 1)
        mean_s *= float(rate_per_s.sum() / (rate_per_s * mean_s).sum())  # the same batch
        long = rng.random((20_000, members)) < hiccups.rate
        times = mean_s * (1 + variations * rng.standard_normal(long.shape))
        times += (long - hiccups.rate) * (hiccups.ratio * mean_s + hiccups.pause_s)
        last = times.max(axis=1)
        assert 1 / float(last.mean()) <= ceiling + 4 * float(last.std()) / math.sqrt(len(last))


def demand(rng: np.random.Generator, pools: int, workers: int) -> JobDemand:
    """Return a job over pools of random speeds, with long steps of both kinds."""
    return JobDemand(
        key="a/job",
        pools=tuple(
            JobPool(
                pool=f"p{i}",
                max_workers=workers,
                member=SplitMember(
                    compute=ComputeTime(
                        per_sample_s=float(rng.uniform(0.001, 0.01)),
                        fixed_s=float(rng.uniform(0, 0.05)),
                        backward_per_sample_s=0.0,
                        backward_fixed_s=0.0,
                    ),
                    micro_cap_samples=int(rng.integers(16, 64)) if rng.random() < 0.5 else None,
                ),
            )
            for i in range(pools)
        ),
        min_workers=1,
        max_workers=pools * workers,
        batch_samples=512,
        largest_batch_samples=4096 if rng.random() < 0.5 else None,
        noise_samples=float(rng.uniform(100, 5000)),
        variation=float(rng.uniform(0, 0.1)),
        hiccups=Hiccups(
            rate=float(rng.uniform(0.001, 0.05)), ratio=float(rng.uniform(0, 2)), pause_s=float(rng.uniform(0, 1))
        ),
    )


@pytest.mark.parametrize("seed", range(times(gate=5, every=100)))
def test_the_allocation_expects_the_rate_of_drawn_steps(seed: int) -> None:
    """One pool and one batch, balanced: so many members with noise, drawn."""
    rng = np.random.default_rng(seed)
    job = replace(demand(rng, 1, 24), largest_batch_samples=None)
    members = int(rng.integers(1, 25))
    compute = job.pools[0].member.compute if job.pools[0].member else None
    assert isinstance(compute, ComputeTime)
    share = job.batch_samples / members
    cap = job.pools[0].member.micro_cap_samples if job.pools[0].member else None
    own_s = compute.per_sample_s * share + compute.fixed_s * (math.ceil(share / cap) if cap else 1)
    times = own_s * (1 + job.variation * rng.standard_normal((40_000, members)))
    long = rng.random(times.shape) < job.hiccups.rate
    times += (long - job.hiccups.rate) * (job.hiccups.ratio * own_s + job.hiccups.pause_s)
    found = float(rates(job, np.array([[members]]))[0])
    assert found == pytest.approx(job.batch_samples / float(times.max(axis=1).mean()), rel=0.02)
