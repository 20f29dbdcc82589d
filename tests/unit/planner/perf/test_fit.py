"""Time models from telemetry: exact without noise, honest with it, unmoved by outliers, never at a loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_planner.perf.counters import MeanVariance, Observation
from heterotrain_planner.perf.exchange import fit_exchange
from heterotrain_planner.perf.fit import fit_member
from heterotrain_planner.perf.line import FixedPart
from heterotrain_planner.perf.model import FitQuality, compute_s
from support.exported_counters import SimulatedMembers, three_pools


def watched(cluster: SimulatedMembers, *runs: tuple[Sequence[int], int]) -> list[Observation]:
    """Return observations of rank 0, a scrape after each run."""
    found = []
    for shares, steps in runs:
        cluster.run(shares, steps)
        found += [o for o in cluster.scrape() if o.member == cluster.name(0)]
    return found


def test_without_noise_every_coefficient_is_found() -> None:
    """Three shares, phases as exported: q, s, k, m and the update come back."""
    truth = three_pools()[0]
    model = fit_member(watched(SimulatedMembers(truth=[truth]), ([50], 10), ([100], 10), ([200], 10)))
    assert model.quality is FitQuality.OK
    assert model.compute is not None
    for name in ("per_sample_s", "backward_per_sample_s", "fixed_s", "backward_fixed_s", "update_s"):
        assert getattr(model.compute, name) == pytest.approx(getattr(truth, name), rel=0.02), name


def test_accumulated_steps_give_the_same_line() -> None:
    """A share in several micro-batches is so many points on the line of one, and the update is paid once."""
    truth = three_pools()[0]
    cluster = SimulatedMembers(truth=[truth], micro_caps={0: 64})
    model = fit_member(watched(cluster, ([40], 10), ([64], 10), ([128], 10), ([192], 10)))
    assert model.compute is not None
    for share, micro in ((32, 1), (256, 4), (250, 5)):
        assert compute_s(model.compute, share, micro_batches=micro) == pytest.approx(
            compute_s(truth, share, micro_batches=micro), rel=0.02
        )


def test_noise_is_averaged_out_and_the_stated_uncertainty_is_right() -> None:
    """200 noisy members: the median error at half and twice the share is small, and within what the fit states."""
    truth = ComputeTime(per_sample_s=0.001, fixed_s=0.03, backward_per_sample_s=0.002, backward_fixed_s=0.02)
    errors, ratios = [], []
    for seed in range(200):
        cluster = SimulatedMembers(truth=[truth], variation=0.08, seed=seed)
        model = fit_member(watched(cluster, *[([b], 12) for b in (100, 70, 130, 70, 130, 100)]))
        assert model.compute is not None
        for share in (50, 200):
            error = compute_s(model.compute, share) / compute_s(truth, share) - 1
            errors.append(error)
            ratios.append(error / model.uncertainty_ratio)
        assert model.variation == pytest.approx(0.08, rel=0.5)
    assert float(np.median(np.abs(errors))) < 0.025
    assert abs(float(np.mean(errors))) < 0.01
    # The stated one is the worse of the two shares, so errors are somewhat smaller than it on average.
    assert 0.5 < float(np.std(ratios)) < 1.2


@pytest.mark.parametrize("seconds", [3.3, 0.1])
def test_outliers_and_warm_up_do_not_move_it(seconds: float) -> None:
    """A scrape of steps ten times too long or four times too short is left out, and so are a process's first steps."""
    truth = three_pools()[0]
    cluster = SimulatedMembers(truth=[truth], variation=0.03, warm_up=8.0)
    seen = watched(cluster, *[([b], 20) for b in (100, 60, 140, 100, 60, 140, 100)])
    assert seen[0].warm_up
    steady = Observation(
        member=seen[0].member,
        share_samples=100,
        steps=10,
        ended_s=61.0,
        compute=MeanVariance(mean=seconds, variance=1e-4),
    )
    model = fit_member([*seen[:4], steady, *seen[4:]])
    assert model.compute is not None
    assert not model.drifted
    for share in (50, 200):
        assert compute_s(model.compute, share) == pytest.approx(compute_s(truth, share), rel=0.04)


def test_an_outlier_among_its_own_scrape_is_left_out() -> None:
    """Five shares of one scrape, one of them always four times too short: an outlier, not a change of speed."""
    truth = three_pools()[0]
    seen = [
        Observation(
            member="m",
            share_samples=n,
            steps=20,
            ended_s=1.0,
            compute=MeanVariance(mean=compute_s(truth, n) * (0.25 if n == 100 else 1.0), variance=1e-4),
        )
        for n in (60, 80, 100, 120, 140)
    ]
    model = fit_member(seen)
    assert model.compute is not None
    for share in (50, 200):
        assert compute_s(model.compute, share) == pytest.approx(compute_s(truth, share), rel=0.03)


def test_a_quarter_of_wrong_observations_is_tolerated() -> None:
    """300 members of which every fourth share was measured 2 to 5 times off: 3 % in 9 of 10, and never led astray."""
    truth = three_pools()[0]
    errors = []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        count = int(rng.integers(5, 12))
        wrong = set(rng.choice(count, max(1, count // 4), replace=False).tolist())
        seen = []
        for i in range(count):
            n = int(rng.integers(40, 200))
            factor = float(rng.choice([0.2, 0.5, 2, 5])) if i in wrong else 1.0
            mean = compute_s(truth, n) * factor * (1 + 0.01 * rng.standard_normal())
            seen.append(
                Observation(
                    member="m",
                    share_samples=n,
                    steps=20,
                    ended_s=1.0,
                    compute=MeanVariance(mean=mean, variance=(0.03 * mean) ** 2),
                )
            )
        model = fit_member(seen)
        assert model.compute is not None
        errors.append(max(abs(compute_s(model.compute, n) / compute_s(truth, n) - 1) for n in (60, 180)))
    assert float(np.quantile(errors, 0.9)) < 0.03
    assert max(errors) < 0.2


def test_slowing_down_rescales_what_was_learned_before() -> None:
    """After a change the new speed holds at shares that were only seen at the old one, and is marked for learning."""
    truth = three_pools()[0]
    cluster = SimulatedMembers(truth=[truth], variation=0.03)
    seen = watched(cluster, *[([b], 20) for b in (70, 100, 130, 100, 100)])
    cluster.slow[0] = 2.0
    seen += watched(cluster, ([100], 20), ([100], 20))
    model = fit_member(seen)
    assert model.drifted
    assert model.drift_ratio == pytest.approx(2.0, rel=0.1)
    assert model.compute is not None
    for share in (60, 150):
        assert compute_s(model.compute, share) == pytest.approx(2 * compute_s(truth, share), rel=0.06)
    seen += watched(cluster, ([130], 20))
    assert not fit_member(seen).drifted


def test_one_share_uses_the_assumption_and_the_reason_states_it() -> None:
    """The time at the seen share is right; the fixed part is the assumed one; the quality is thin."""
    truth = three_pools()[0]
    seen = watched(SimulatedMembers(truth=[truth]), ([100], 20), ([100], 20))
    here = compute_s(truth, 100)
    for assumed in (0.0, 0.4):
        model = fit_member(seen, assumed=FixedPart(ratio=assumed, deviation=0.1))
        assert model.quality is FitQuality.THIN
        assert "one share" in model.reason
        assert model.compute is not None
        assert compute_s(model.compute, 100) == pytest.approx(here, rel=0.01)
        fixed = model.compute.fixed_s + model.compute.backward_fixed_s
        assert fixed == pytest.approx(assumed * (here - truth.update_s), abs=0.02 * here)
        assert model.uncertainty_ratio == float("inf")


def test_few_steps_are_thin_and_no_steps_are_degenerate() -> None:
    """Each quality has a reason; a process's first steps and implausible values do not count."""
    truth = three_pools()[0]
    few = fit_member(watched(SimulatedMembers(truth=[truth]), ([100], 2), ([50], 2)))
    assert (few.quality, few.reason) == (FitQuality.THIN, "only 2 steps were observed")
    nothing = fit_member([])
    assert (nothing.quality, nothing.compute) == (FitQuality.DEGENERATE, None)
    broken = Observation(
        member="w0/0", share_samples=10, steps=5, ended_s=0.0, compute=MeanVariance(mean=float("nan"), variance=1.0)
    )
    assert fit_member([broken]).quality is FitQuality.DEGENERATE


def test_times_that_do_not_grow_give_no_negative_coefficient() -> None:
    """A constant or falling time has slope zero, not less; a line through the origin has no negative fixed part."""
    for seconds in ((0.2, 0.2, 0.2), (0.3, 0.25, 0.2), (0.1, 0.25, 0.6)):
        seen = [
            Observation(
                member="m", share_samples=n, steps=50, ended_s=float(i), compute=MeanVariance(mean=t, variance=1e-6)
            )
            for i, (n, t) in enumerate(zip((50, 100, 200), seconds, strict=True))
        ]
        model = fit_member(seen)
        assert model.compute is not None
        assert min(model.compute.per_sample_s, model.compute.fixed_s) >= 0
        assert min(model.compute.backward_per_sample_s, model.compute.backward_fixed_s) >= 0


def test_the_exchange_is_averaged_and_gamma_weighted_by_its_certainty() -> None:
    """T_o and T_u are recovered from noise; a member that measures gamma badly barely counts."""
    cluster = SimulatedMembers(
        truth=three_pools(),
        communication=CommunicationTime(overlapped_s=0.04, last_bucket_s=0.01, gamma=0.2),
        variation=0.05,
        overhead_s=0.003,
    )
    seen = []
    for _ in range(4):
        cluster.run([100, 60, 30], 20)
        seen += cluster.scrape()
    bad = [
        Observation(
            member="w9/0",
            share_samples=10,
            steps=2,
            ended_s=1.0,
            first_bucket_fraction=MeanVariance(mean=0.9, variance=0.5),
        )
    ]
    # One scrape in which the network was busy: left out, not averaged in.
    bad.append(
        Observation(
            member="w0/0",
            share_samples=100,
            steps=20,
            ended_s=9.0,
            bucket_steps=20,
            overlapped_s=4.0,
            last_bucket_s=1.0,
        )
    )
    found = fit_exchange(seen + bad)
    assert found.communication is not None
    assert found.communication.overlapped_s == pytest.approx(0.04, rel=1e-6)
    assert found.communication.last_bucket_s == pytest.approx(0.01, rel=1e-6)
    assert found.communication.gamma == pytest.approx(0.2, abs=0.01)
    assert found.gamma_deviation < 0.01
    assert found.overhead_s == pytest.approx(0.003, rel=1e-6)


def test_an_untimed_exchange_is_unknown() -> None:
    """Missing is missing, never zero."""
    assert fit_exchange([]).communication is None
    assert fit_exchange([Observation(member="m", share_samples=1, steps=1, ended_s=0.0)]).communication is None


def timed(generation: int | None, exchange_s: float, steps: int, at_s: float, member: str = "m") -> Observation:
    return Observation(
        member=member, share_samples=50, steps=steps, ended_s=at_s, generation=generation,
        bucket_steps=steps, overlapped_s=0.75 * exchange_s, last_bucket_s=0.25 * exchange_s,
    )  # fmt: skip


def test_the_exchange_is_that_of_the_newest_members_once_it_is_measured() -> None:
    before = [timed(4, 0.1, 300, 1.0), timed(None, 0.25, 20, 2.0)]
    for steps, exchange_s, generation in ((3, 0.1, 4), (12, 0.3, 5)):
        found = fit_exchange([*before, timed(5, 0.3, steps, 3.0)])
        assert found.communication is not None
        assert found.communication.overlapped_s == pytest.approx(0.75 * exchange_s)
        assert found.generation == generation
    few = [timed(5, 0.3, 4, 3.0, member) for member in ("a", "b", "c")]
    assert fit_exchange([*before, *few]).generation == 4, "three members saw the same four exchanges"
    assert fit_exchange([timed(None, 0.2, 50, 1.0)]).generation is None
