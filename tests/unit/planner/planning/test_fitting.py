"""One fit serves a whole decision: batch and shares are the same as with separate fits."""

from __future__ import annotations

import math

import pytest
from heterotrain_core.contract.plan import CommunicationTime
from heterotrain_planner.planning import fitting
from heterotrain_planner.planning.batch import BatchDecision, BatchRequest, decide_batch
from heterotrain_planner.planning.evidence import MemberEvidence
from heterotrain_planner.planning.fitting import MemberFits, fit_members
from heterotrain_planner.planning.shares import SharesDecision, SharesRequest, decide_shares
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exported_counters import SimulatedMembers, three_pools

EXCHANGE = CommunicationTime(overlapped_s=0.3, last_bucket_s=0.05, gamma=0.2)
VECTORS = ((40, 40, 48), (60, 40, 28), (30, 50, 48), (90, 30, 8))


def evidence_of(
    seed: int, variation: float, vectors: list[int], slow: float
) -> tuple[tuple[MemberEvidence, ...], tuple[MemberEvidence, ...]]:
    """Return members and one former member of a cluster whose last member changes its speed half-way."""
    cluster = SimulatedMembers(truth=three_pools(), communication=EXCHANGE, variation=variation, seed=seed, warm_up=3.0)
    seen = []
    for number, vector in enumerate(vectors):
        if 2 * number >= len(vectors):
            cluster.slow[2] = slow
        cluster.run(VECTORS[vector], 10)
        seen += cluster.scrape()
    found = [
        MemberEvidence(
            member=cluster.name(rank),
            pool="a" if rank < 2 else "b",
            observations=tuple(o for o in seen if o.member == cluster.name(rank)),
        )
        for rank in range(3)
    ]
    return (found[0], found[2], MemberEvidence(member="new", pool="a")), (found[1],)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    variation=st.sampled_from([0.0, 0.03, 0.1]),
    vectors=st.lists(st.integers(0, len(VECTORS) - 1), max_size=6),
    slow=st.sampled_from([1.0, 1.5]),
    total=st.sampled_from([100, 128, 512]),
)
def test_fits_handed_down_decide_the_same(
    seed: int, variation: float, vectors: list[int], slow: float, total: int
) -> None:
    """For any evidence: shares and batch from common fits equal those from separate fits."""
    members, former = evidence_of(seed, variation, vectors, slow)
    fits = fit_members(members, former)
    shares = SharesRequest(total_samples=total, members=members, former=former, current_shares=(30, 40, total - 70))
    batch = BatchRequest(
        members=members,
        former=former,
        base_samples=128,
        least_samples=64,
        most_samples=4096,
        current_samples=total,
        noise_samples=3000.0,
    )
    assert decide_batch(batch, fits=fits) == decide_batch(batch)
    assert decide_shares(shares, fits=fits) == decide_shares(shares)


def test_a_decision_summarizes_each_member_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch and shares with shared fits read each member's observations once."""
    members, former = evidence_of(1, 0.0, [0, 1, 2], 1.0)
    calls = []
    summarize = fitting.summarize
    monkeypatch.setattr(fitting, "summarize", lambda *args, **more: calls.append(1) or summarize(*args, **more))
    fits = fit_members(members, former)
    batch = decide_batch(
        BatchRequest(
            members=members, former=former, base_samples=128, least_samples=64, most_samples=4096, noise_samples=3e3
        ),
        fits=fits,
    )
    assert isinstance(batch, BatchDecision)
    shares = decide_shares(SharesRequest(total_samples=batch.samples, members=members, former=former), fits=fits)
    assert isinstance(shares, SharesDecision)
    assert len(calls) == len(members) + len(former)


def test_models_follow_the_batch_they_are_asked_for() -> None:
    """The same fits give models for a batch like the last one and for any other batch."""
    members, former = evidence_of(2, 0.02, [0, 1, 2, 3], 1.0)
    fits = fit_members(members, former)
    assert isinstance(fits, MemberFits)
    assert len(fits.models()) == len(fits.models(total_samples=128)) == len(members)
    assert all(model.compute is not None for model in fits.models())
    assert math.isfinite(fits.now_ratio)
