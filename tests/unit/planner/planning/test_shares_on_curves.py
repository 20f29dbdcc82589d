"""Shares where times are no lines: decided by time curves, and consistent with what the plan then carries."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from heterotrain_core.contract.plan import CommunicationTime
from heterotrain_core.split.balance import Split, evaluate
from heterotrain_core.split.member import CurveTime, SplitMember
from heterotrain_planner.perf.counters import MeanVariance, Observation
from heterotrain_planner.perf.model import FitQuality, MemberModel, TimeCurve
from heterotrain_planner.planning import shares as planning_shares
from heterotrain_planner.planning.evidence import MOST_TABULATED, MemberEvidence, split_member, with_curves
from heterotrain_planner.planning.fitting import fit_members
from heterotrain_planner.planning.shares import SharesDecision, SharesRequest, decide_shares
from heterotrain_planner.planning.significance import false_positive_gain
from support.repeat import times
from unit.core.oracles import table_at

# Seconds of ResNet-50 by micro-batch (Sia's artifact); the fall of the RTX 6000 from 231 to 327 samples is left out.
TIMES = {
    "a100": ((20, 0.151), (115, 0.201), (231, 0.298), (462, 0.489), (653, 0.642), (800, 0.773)),
    "rtx6000": ((20, 0.173), (115, 0.278), (231, 0.597), (327, 0.600), (400, 0.963)),
}
POOLS = ("a100", "rtx6000", "rtx6000")
LIMIT = {"a100": 800, "rtx6000": 400}
BATCH = 1200
NOISE = 0.02


def own_s(pool: str, share: int) -> float:
    """Return true seconds of a share, accumulated where it does not fit."""
    count = -(-share // LIMIT[pool])
    return sum(table_at(TIMES[pool], share // count + (part < share % count)) for part in range(count))


def best_s() -> float:
    """Return the least step over all shares; members of one pool have equal ones, as their times are."""
    return min(
        max(own_s("a100", BATCH - 2 * share), own_s("rtx6000", share)) for share in range(100, 500) if 2 * share < BATCH
    )


def trained(epochs: int, *, seed: int, pools: tuple[str, ...] = POOLS) -> tuple[SharesRequest, SharesDecision]:
    """Return the last request and its decision, after so many epochs of 100 steps by the decisions before."""
    rng = np.random.default_rng(seed)
    members = tuple(
        MemberEvidence(member=f"m{rank}", pool=pool, micro_cap_samples=LIMIT[pool]) for rank, pool in enumerate(pools)
    )
    request = SharesRequest(total_samples=BATCH, members=members)
    now_s = 0.0
    for epoch in itertools.count():
        decision = decide_shares(request)
        assert isinstance(decision, SharesDecision)
        if epoch == epochs:
            return request, decision
        probe = [vector for vector in decision.probe for _ in range(2)]
        evidence = list(request.members)
        for vector in (*probe, *[decision.shares] * 10):
            now_s += 10.0
            for rank, (pool, share) in enumerate(zip(pools, vector, strict=True)):
                drawn = own_s(pool, share) * (1 + NOISE * rng.standard_normal(9))
                seen = Observation(
                    member=f"m{rank}",
                    share_samples=share,
                    micro_batches=-(-share // LIMIT[pool]),
                    steps=9,
                    ended_s=now_s,
                    compute=MeanVariance(mean=float(drawn.mean()), variance=float(drawn.var(ddof=1))),
                )
                evidence[rank] = replace(evidence[rank], observations=(*evidence[rank].observations, seen))
        request = replace(request, members=tuple(evidence), current_shares=decision.shares)
    raise AssertionError


def over_optimum(decision: SharesDecision) -> float:
    """Return how much longer than the optimum a step is, relative."""
    return max(own_s(pool, share) for pool, share in zip(POOLS, decision.shares, strict=True)) / best_s() - 1


@pytest.mark.parametrize("seed", range(times(gate=4, every=40)))
def test_an_edge_between_two_sizes_costs_little(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that jump beyond 327 samples: curves are within 4 % of the optimum at once, lines are not after epochs."""
    by_curves = [over_optimum(trained(epochs, seed=seed)[1]) for epochs in (1, 3)]
    assert by_curves[0] < 0.04
    assert by_curves[1] < 0.025
    monkeypatch.setattr(planning_shares, "with_curves", lambda _total, members, _models: tuple(members))
    by_lines = [over_optimum(trained(epochs, seed=seed)[1]) for epochs in (1, 3)]
    assert by_lines[0] > 0.06
    assert by_lines[1] > 0.035


def test_deciding_again_changes_nothing() -> None:
    """The decided shares as current ones, and the same evidence."""
    request, decision = trained(5, seed=1)
    assert any(model.curve is not None for model in decision.models)
    again = decide_shares(replace(request, current_shares=decision.shares))
    assert isinstance(again, SharesDecision)
    assert again.shares == decision.shares
    assert not again.changed


def test_the_plans_lines_give_the_predicted_times() -> None:
    """Survivors, allocation and forecast have lines only: they pass through the curves at the planned shares."""
    request, decision = trained(5, seed=1)
    bent = [rank for rank, model in enumerate(decision.models) if model.curve is not None]
    assert bent
    members = [split_member(m, c) for m, c in zip(request.members, decision.compute, strict=True) if c is not None]
    found = evaluate(decision.shares, members)
    assert isinstance(found, Split)
    curved = evaluate(decision.shares, with_curves(BATCH, members, decision.models))
    assert isinstance(curved, Split)
    assert found.own_s == pytest.approx(curved.own_s, rel=1e-9)
    for rank in bent:
        truth = own_s(POOLS[rank], decision.shares[rank])
        assert found.own_s[rank] == pytest.approx(truth, rel=0.01)


def test_another_batch_is_judged_by_lines() -> None:
    """Curves say nothing about shares far from those seen."""
    request, _ = trained(3, seed=1)
    fits = fit_members(request.members)
    assert any(model.curve for model in fits.models(total_samples=BATCH))
    assert not any(model.curve for model in fits.models(total_samples=2 * BATCH))
    assert not any(model.curve for model in fits.models())


def a_bent_model(largest_share: int) -> tuple[SplitMember, MemberModel]:
    """Return a member with a curve."""
    request, decision = trained(2, seed=1)
    model = next(model for model in decision.models if model.compute is not None)
    assert model.compute is not None
    curve = TimeCurve(points=((10.0, 0.1), (100.0, 0.2)), errors=(0.02, 0.04))
    found = replace(model, curve=curve, largest_share_samples=largest_share, quality=FitQuality.OK)
    return split_member(request.members[0], model.compute), found


def test_curves_are_tabulated_only_while_they_are_small() -> None:
    """Many members with many samples keep their lines, because a table of all shares would be too large."""
    member, model = a_bent_model(100)
    (small,) = with_curves(150, [member], [model])
    assert isinstance(small.compute, CurveTime)
    many = MOST_TABULATED // 1000
    _, large = a_bent_model(1000)
    assert with_curves(10**9, [member] * many, [large] * many) == (member,) * many


def test_the_significance_of_a_gain_follows_the_curves_errors() -> None:
    """The error of a member with a curve is the curve's at the present share."""
    member, model = a_bent_model(100)
    now = evaluate((55,), with_curves(55, [member], [model]), communication=CommunicationTime())
    assert isinstance(now, Split)
    # One member: the 95 % quantile of a normal error of 3 % in the middle between 2 % and 4 %.
    assert false_positive_gain([model], now) == pytest.approx(1.645 * 0.03, rel=0.01)
