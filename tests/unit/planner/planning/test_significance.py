"""When a predicted gain is believed: often enough where it is real, seldom where chance alone makes it up."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from heterotrain_core.contract.plan import ComputeTime
from heterotrain_core.split.balance import Split, balance, evaluate
from heterotrain_core.split.member import SplitMember
from heterotrain_planner.perf.counters import Observation
from heterotrain_planner.perf.expected_maximum import quantile_of_maximum
from heterotrain_planner.perf.model import FitQuality, LineError, MemberModel
from heterotrain_planner.planning.shares import MemberEvidence, SharesDecision, SharesRequest, decide_shares
from heterotrain_planner.planning.significance import FALSE_CHANGES, false_positive_gain
from scipy import stats
from support.exported_counters import SimulatedMembers, three_pools

PACE_S, FIXED_S, SHARE = 0.002, 0.04, 100


@pytest.mark.parametrize("count", [1, 3, 40])
def test_the_quantile_of_equal_variables_is_the_closed_form(count: int) -> None:
    """Of n alike: the p^(1/n) quantile of one."""
    expected = 0.3 * stats.norm.ppf(0.95 ** (1 / count))
    assert quantile_of_maximum([0.3] * count, 0.95) == pytest.approx(expected, rel=1e-3)


def test_the_quantile_of_unequal_variables_is_that_of_draws() -> None:
    """One large deviation among small ones, and one that is zero."""
    deviations = [0.0, 0.1, 0.2, 0.2, 1.0]
    drawn = np.random.default_rng(1).normal(size=(200_000, 5)) * deviations
    assert quantile_of_maximum(deviations, 0.95) == pytest.approx(float(np.quantile(drawn.max(axis=1), 0.95)), abs=0.01)


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("error", [0.005, 0.02])
def test_chance_alone_rarely_suggests_a_larger_gain(count: int, error: float) -> None:
    """Equal members with even shares, which are best; their lines have random errors, so the optimum seems to gain."""
    chance = np.random.default_rng(7)
    steps_s = PACE_S * SHARE + FIXED_S
    beyond, runs = 0, 400
    for _ in range(runs):
        found = [a_model(1 + error * float(x), error * steps_s) for x in chance.standard_normal(count)]
        members = [SplitMember(compute=model.compute) for model in found if model.compute is not None]
        now, best = evaluate((SHARE,) * count, members), balance(SHARE * count, members)
        assert isinstance(now, Split)
        assert isinstance(best, Split)
        beyond += 1 - best.step_s / now.step_s > false_positive_gain(found, now)
    # Fewer than 5 in 100: what one member gives up makes the others slower.
    assert beyond <= FALSE_CHANGES * runs + 3 * math.sqrt(FALSE_CHANGES * runs)


def a_model(pace: float, error_s: float) -> MemberModel:
    """Return a line that is known to ``error_s`` around its usual share."""
    compute = ComputeTime(
        per_sample_s=pace * PACE_S / 3,
        fixed_s=pace * FIXED_S / 3,
        backward_per_sample_s=pace * PACE_S * 2 / 3,
        backward_fixed_s=pace * FIXED_S * 2 / 3,
    )
    error = LineError(centre_samples=SHARE, centre_s=error_s, slope_s=0.0)
    return MemberModel(compute=compute, error=error, quality=FitQuality.OK, reason="")


def test_without_observations_any_gain_may_be_false() -> None:
    """Without an error the user's own threshold decides."""
    model = replace(a_model(1.0, 0.01), error=None)
    now = evaluate((SHARE,), [SplitMember(compute=model.compute or ComputeTime())])
    assert isinstance(now, Split)
    assert false_positive_gain([model], now) == math.inf


@pytest.mark.parametrize(("steps", "variation", "spread"), [(4, 0.3, 0.3), (64, 0.3, 0.3), (64, 0.02, 0.1)])
def test_a_member_seen_at_one_share_errs_as_the_mean_of_its_steps_does(
    steps: int, variation: float, spread: float
) -> None:
    """Against drawn means of its steps; steps that were alike by chance count as usual ones."""
    model = replace(a_model(1.0, 0.01), error=None, steps=steps, variation=variation)
    now = evaluate((SHARE,), [SplitMember(compute=model.compute or ComputeTime())])
    assert isinstance(now, Split)
    means = np.random.default_rng(2).normal(1.0, spread, size=(40_000, steps)).mean(axis=1)
    assert false_positive_gain([model], now) == pytest.approx(float(np.quantile(means, 0.95)) - 1, rel=0.05)


def test_the_threshold_falls_with_evidence_but_not_below_the_least_gain() -> None:
    """Shares 2.5 % off stay after few noisy steps and are corrected after many, unless the least gain is large."""
    changed = []
    for scrapes in (1, 30):
        cluster = SimulatedMembers(truth=three_pools(), variation=0.08, seed=3)
        best = balance(512, [SplitMember(compute=c) for c in three_pools()])
        assert isinstance(best, Split)
        off = (best.shares[0] - 5, best.shares[1] + 3, best.shares[2] + 2)
        seen: list[Observation] = []
        for _ in range(scrapes):
            for vector in (off, (200, 200, 112), (300, 120, 92)):
                cluster.run(vector, 8)
            seen.extend(cluster.scrape())
        members = tuple(
            MemberEvidence(member=cluster.name(r), observations=tuple(o for o in seen if o.member == cluster.name(r)))
            for r in range(3)
        )
        request = SharesRequest(total_samples=512, members=members, current_shares=off)
        decision = decide_shares(request)
        assert isinstance(decision, SharesDecision)
        changed.append(decision.changed)
        never = decide_shares(replace(request, least_gain_ratio=0.5))
        assert isinstance(never, SharesDecision)
        assert not never.changed
    assert changed == [False, True]
