"""A job that starts with the speeds of an earlier one: right from its first step, and soon right if they are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_planner.perf.counters import Observation
from heterotrain_planner.perf.fit import fit_member
from heterotrain_planner.perf.model import FitQuality
from heterotrain_planner.planning.evidence import MemberEvidence
from heterotrain_planner.planning.fitting import fit_members
from heterotrain_planner.planning.kept_speed import (
    LEAST_STEPS,
    MOST_SHAPES,
    MOST_STEPS,
    KeptSpeed,
    SharesSeen,
    as_model,
    as_observed,
    holds_for,
    is_refuted,
    kept_speed,
    middle_speed,
)
from heterotrain_planner.planning.shares import SharesDecision, SharesRequest, decide_shares
from support.exported_counters import SimulatedMembers
from support.repeat import times

EXCHANGE = CommunicationTime(overlapped_s=0.05, last_bucket_s=0.01, gamma=0.2)
SCRAPE_STEPS = 5


def line(pace_s: float, fixed_s: float = 0.03) -> ComputeTime:
    return ComputeTime(
        per_sample_s=pace_s / 3,
        fixed_s=fixed_s / 3,
        backward_per_sample_s=pace_s * 2 / 3,
        backward_fixed_s=fixed_s * 2 / 3,
        update_s=0.005,
    )


class Job:
    """Members by pool that train, are scraped, and get new shares every ten steps, as with the boundary Auto."""

    def __init__(
        self, members: SimulatedMembers, pools: Sequence[str], batch: int, earlier: dict[str, KeptSpeed] | None = None
    ) -> None:
        self.members, self.pools, self.batch = members, tuple(pools), batch
        self.earlier = dict(earlier or {})
        self.observations: list[list[Observation]] = [[] for _ in pools]
        self.first = self.decide(None, probe=True)
        self.shares, self.probes = self.first.shares, len(self.first.probe)

    def decide(self, current: tuple[int, ...] | None, *, probe: bool) -> SharesDecision:
        former = tuple(
            MemberEvidence(member=pool, pool=pool, observations=as_observed(speed, pool))
            for pool, speed in self.earlier.items()
        )
        evidence = tuple(
            MemberEvidence(member=f"w{rank}/0", pool=pool, observations=tuple(self.observations[rank]))
            for rank, pool in enumerate(self.pools)
        )
        request = SharesRequest(
            total_samples=self.batch, members=evidence, former=former, current_shares=current, probe=probe
        )
        found = decide_shares(request)
        assert isinstance(found, SharesDecision)
        return found

    def train(self, steps: int) -> None:
        for done in range(1, steps + 1):
            self.members.run(self.shares)
            if done % SCRAPE_STEPS == 0:
                for each in self.members.scrape():
                    self.observations[int(each.member[1:-2])].append(each)
                for pool, seen in zip(self.pools, self.observations, strict=True):
                    if pool in self.earlier and is_refuted(self.earlier[pool], seen):
                        del self.earlier[pool]
            if done % 10 == 0:
                self.shares = self.decide(self.shares, probe=False).shares

    def kept(self) -> dict[str, KeptSpeed]:
        """Return what the next job gets."""
        models = fit_members([MemberEvidence(member="", observations=tuple(seen)) for seen in self.observations])
        found: dict[str, list[KeptSpeed]] = {}
        for pool, model, seen in zip(self.pools, models.models(), self.observations, strict=True):
            speed = kept_speed(model, model.compute, seen)
            assert speed is not None
            found.setdefault(pool, []).append(speed)
        return {pool: speed for pool, each in found.items() if (speed := middle_speed(each)) is not None}


def a_cluster(seed: int) -> tuple[list[ComputeTime], list[str], int]:
    """Return members of 2 or 3 pools that differ by up to 6 times, and a batch."""
    rng = np.random.default_rng(seed)
    truth, pools = [], []
    for pool in range(int(rng.integers(2, 4))):
        pace_s, fixed_s = float(np.exp(rng.uniform(np.log(0.001), np.log(0.006)))), float(rng.uniform(0.005, 0.06))
        for _ in range(int(rng.integers(1, 4))):
            truth.append(line(pace_s, fixed_s))
            pools.append(f"pool{pool}")
    return truth, pools, int(rng.integers(40, 120)) * len(truth)


def members(truth: Sequence[ComputeTime], seed: int) -> SimulatedMembers:
    return SimulatedMembers(truth=truth, communication=EXCHANGE, variation=0.05, seed=seed, warm_up=4.0)


def test_the_second_jobs_first_plan_is_near_the_optimum_and_probes_nothing() -> None:
    lost, later, saved = [], [], []
    for seed in range(times(gate=5, every=200)):
        truth, pools, batch = a_cluster(seed)
        first = Job(members(truth, seed), pools, batch)
        assert first.probes > 0, "without speeds of an earlier job, the first plan probes"
        first.train(200)
        second = Job(members(truth, seed + 10_000), pools, batch, first.kept())
        assert second.probes == 0
        lost.append(second.members.loss_of(second.shares))
        second.train(100)
        later.append(second.members.loss_of(second.shares))
        saved.append(1 - sum(second.members.step_seconds) / sum(first.members.step_seconds[:100]))
    assert float(np.quantile(lost, 0.95)) <= 0.02
    assert max(lost) <= 0.03
    assert float(np.quantile(later, 0.95)) <= 0.02, "and the shares stay good"
    assert min(saved) > -0.02, "of the first hundred steps: nothing to save where members are alike"
    assert float(np.mean(saved)) > 0.03


@pytest.mark.parametrize("lie", [0.125, 0.4, 3.0, 8.0], ids=str)
@pytest.mark.parametrize("seed", range(times(gate=1, every=60)))
def test_a_speed_that_lies_costs_a_few_steps(seed: int, lie: float) -> None:
    """One pool's speed is off by this factor. Without boundaries sooner, the first shares last for ten steps."""
    truth, pools, batch = a_cluster(seed)
    honest = Job(members(truth, seed), pools, batch)
    honest.train(100)
    speeds = honest.kept()
    wrong = speeds["pool0"]
    c = wrong.compute
    speeds["pool0"] = replace(
        wrong,
        compute=ComputeTime(
            per_sample_s=lie * c.per_sample_s,
            fixed_s=lie * c.fixed_s,
            backward_per_sample_s=lie * c.backward_per_sample_s,
            backward_fixed_s=lie * c.backward_fixed_s,
            update_s=lie * c.update_s,
        ),
    )
    lied_to = Job(members(truth, seed + 10_000), pools, batch, speeds)
    fresh = Job(members(truth, seed + 10_000), pools, batch)
    for job in (lied_to, fresh):
        job.train(60)
    assert lied_to.members.loss_of(lied_to.shares) <= 0.05
    best_s = min(sum(fresh.members.step_seconds[-10:]), sum(lied_to.members.step_seconds[-10:])) / 10
    lost_steps = sum(lied_to.members.step_seconds) / best_s - 60
    assert lost_steps <= 20 * max(lie, 1 / lie), lost_steps


def a_speed(*shares: tuple[int, int]) -> KeptSpeed:
    return KeptSpeed(compute=line(0.002), variation=0.05, seen=tuple(SharesSeen(n, 1, steps) for n, steps in shares))


def test_a_kept_speed_is_known_as_well_as_its_steps_show_it() -> None:
    wide, narrow, single = a_speed((64, 100), (128, 100)), a_speed((64, 100), (66, 100)), a_speed((64, 200))
    for speed in (wide, narrow, single):
        model = as_model(speed, "w")
        assert model.compute is not None
        assert model.largest_share_samples == max(speed.seen)[0]
        assert model.steps == 200
    found = as_model(wide, "w")
    assert found.quality is FitQuality.OK
    assert found.compute is not None
    for size in (32, 64, 128, 256):
        expected_s = wide.seconds(size)
        c = found.compute
        own_s = (c.per_sample_s + c.backward_per_sample_s) * size + c.fixed_s + c.backward_fixed_s + c.update_s
        assert own_s == pytest.approx(expected_s, rel=0.01)
    assert as_model(narrow, "w").uncertainty_ratio > 3 * found.uncertainty_ratio
    assert as_model(single, "w").quality is FitQuality.THIN, "one share shows no fixed part"


def test_accumulated_micro_batches_give_the_same_line() -> None:
    speed = replace(a_speed(), seen=(SharesSeen(64, 1, 100), SharesSeen(256, 2, 100)))
    found = as_model(speed, "w")
    assert found.quality is FitQuality.OK
    assert found.compute is not None
    assert found.compute.per_sample_s == pytest.approx(speed.compute.per_sample_s, rel=0.02)


def test_only_steps_at_the_present_speed_are_kept() -> None:
    """A member that is throttled in the middle of its job leaves the speed that it had at the end."""
    job = Job(members([line(0.002), line(0.004)], 5), ["a", "b"], 200)
    job.train(60)
    job.members.slow = {0: 1.6}
    job.train(120)
    speed = job.kept()["a"]
    assert sum(each.steps for each in speed.seen) <= 120
    assert speed.seconds(job.shares[0]) == pytest.approx(1.6 * a_speed((1, 1)).seconds(job.shares[0]), rel=0.06)


def test_too_few_steps_or_an_unknown_line_keep_nothing() -> None:
    seen = as_observed(a_speed((64, LEAST_STEPS - 1)), "w")
    model = fit_member(seen)
    assert kept_speed(model, model.compute, seen) is None
    seen = as_observed(a_speed((64, LEAST_STEPS)), "w")
    model = fit_member(seen)
    kept = kept_speed(model, model.compute, seen)
    assert kept is not None
    slower = replace(kept, compute=line(1.0))
    assert middle_speed((slower, kept)) is middle_speed((kept, slower)) is slower
    assert kept_speed(model, model.compute, [replace(each, warm_up=True) for each in seen]) is None
    assert kept_speed(model, None, seen) is None
    assert kept_speed(replace(model, drifted=True), model.compute, seen) is None
    assert kept_speed(fit_member(()), line(0.002), ()) is None
    assert middle_speed(()) is None


def test_what_is_kept_is_bounded_and_has_the_smallest_and_the_largest_share() -> None:
    seen = as_observed(a_speed((10, 1), *((100 + n, 50 + n) for n in range(30)), (500, 1)), "w")
    many = [replace(each, steps=10_000) if each.share_samples == 110 else each for each in seen]
    model = fit_member(many)
    speed = kept_speed(model, model.compute, many)
    assert speed is not None
    assert len(speed.seen) == MOST_SHAPES
    assert (speed.seen[0].share_samples, speed.seen[-1].share_samples) == (10, 500)
    assert max(each.steps for each in speed.seen) == MOST_STEPS
    assert {each.share_samples for each in speed.seen} >= {110, 129, 128}


def test_a_batch_far_from_those_that_were_seen_starts_without() -> None:
    two = [a_speed((80, 50), (120, 50)), a_speed((80, 50), (120, 50))]
    assert [holds_for(batch, two) for batch in (78, 80, 200, 480, 484)] == [False, True, True, True, False]
    assert not holds_for(1, two)
    assert not holds_for(100, [])


@pytest.mark.parametrize(("ratio", "refuted"), [(0.6, True), (0.75, False), (1.4, False), (1.6, True)])
def test_ten_steps_refute_a_speed_that_is_far_off(ratio: float, refuted: bool) -> None:
    kept = a_speed((64, 100), (128, 100))
    seen = as_observed(replace(kept, compute=replace(line(0.002 * ratio, 0.03 * ratio), update_s=0.005 * ratio)), "w")
    assert is_refuted(kept, seen) is refuted
    assert not is_refuted(kept, [replace(each, steps=4) for each in seen])
    assert not is_refuted(kept, [replace(each, warm_up=True) for each in seen])
    assert not is_refuted(kept, ())
