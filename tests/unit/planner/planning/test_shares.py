"""From telemetry to shares: quick to learn, slow to change its mind, never at a loss."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from heterotrain_core.contract.plan import Binding, CommunicationTime, ComputeTime
from heterotrain_core.split.balance import Infeasible
from heterotrain_planner.perf.counters import MeanVariance, Observation
from heterotrain_planner.perf.model import ExchangeModel, FitQuality, LineError, MemberModel, compute_s
from heterotrain_planner.planning.fitting import MemberFits
from heterotrain_planner.planning.probe import PROBE_STEPS
from heterotrain_planner.planning.shares import MemberEvidence, SharesDecision, SharesRequest, decide_shares
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exported_counters import SimulatedMembers, three_pools

BATCH = 512
EXCHANGE = CommunicationTime(overlapped_s=0.05, last_bucket_s=0.01, gamma=0.2)


class Job:
    """A job whose operator decides after each scrape, as the real one does."""

    def __init__(self, cluster: SimulatedMembers, **request: object) -> None:
        self.cluster = cluster
        self.request = SharesRequest(
            total_samples=BATCH,
            members=tuple(MemberEvidence(member=cluster.name(rank)) for rank in range(len(cluster.truth))),
            **request,
        )  # type: ignore[arg-type]  # tests pass what they mean
        self.decision = self.decide()

    def decide(self) -> SharesDecision:
        decision = decide_shares(self.request)
        assert isinstance(decision, SharesDecision)
        return decision

    def epoch(self, steps: int = 40, *, scrapes: int = 2) -> SharesDecision:
        """Run one epoch of the plan, its probe first, then decide again and take the decision."""
        probed = [vector for vector in self.decision.probe for _ in range(PROBE_STEPS)][:steps]
        sequence = probed + [self.decision.shares] * (steps - len(probed))
        for part in np.array_split(np.arange(steps), scrapes):
            for step in part:
                self.cluster.run(sequence[step])
            self.learn()
        self.request = replace(self.request, current_shares=self.decision.shares)
        self.decision = self.decide()
        return self.decision

    def learn(self) -> None:
        """Scrape, and keep the observations."""
        seen = self.cluster.scrape()
        self.request = replace(
            self.request,
            members=tuple(
                replace(m, observations=m.observations + tuple(o for o in seen if o.member == m.member))
                for m in self.request.members
            ),
        )


def pace_of(compute: ComputeTime | None) -> tuple[float, float]:
    """Return seconds at two shares."""
    assert compute is not None
    return compute_s(compute, 50), compute_s(compute, 200)


def test_shares_stay_while_a_member_is_not_measured_and_the_reason_has_no_infinite_figure() -> None:
    """A member without steps has the speed of its pool; no gain that rests on that is large enough."""
    alike = SimulatedMembers(truth=[three_pools()[0]] * 3, variation=0.01)
    job = Job(alike)
    alike.run((171, 171, 170), 20)
    job.learn()
    *measured, last = job.request.members
    members = (*measured, replace(last, observations=()))
    job.request = replace(job.request, members=members, current_shares=job.decision.shares)
    decision = job.decide()
    assert not decision.changed
    assert "a change waits until each member is measured" in decision.reason


def test_a_batch_beyond_trusted_shares_follows_observed_paces() -> None:
    """After one epoch of even shares, a batch six times as large is not shared evenly."""
    job = Job(SimulatedMembers(truth=three_pools(), variation=0.05))
    for shares in ((171, 171, 170),):
        job.cluster.run(shares, 20)
    job.learn()
    job.request = replace(job.request, total_samples=6 * BATCH)
    shares = job.decide().shares
    fastest, slowest = (choose(three_pools(), key=lambda c: compute_s(c, BATCH)) for choose in (min, max))
    assert shares[three_pools().index(fastest)] > 1.5 * shares[three_pools().index(slowest)]


def test_the_first_plan_is_even_and_probes() -> None:
    """Without evidence: even shares, variations that sum to the batch, and no prediction."""
    first = Job(SimulatedMembers(truth=three_pools())).decision
    assert first.shares == (171, 171, 170)
    assert first.changed
    assert first.prediction is None
    assert first.compute == (None, None, None)
    assert all(sum(vector) == BATCH for vector in first.probe)
    assert "even shares" in first.reason


@pytest.mark.parametrize(
    ("variation", "median", "worst"), [(0.0, 0.001, 0.001), (0.03, 0.02, 0.05), (0.05, 0.02, 0.06)]
)
def test_one_epoch_is_enough(variation: float, median: float, worst: float) -> None:
    """After one epoch of 40 steps the split is within 2 % of the optimum in the median of 15 runs."""
    lost = []
    for seed in range(15):
        cluster = SimulatedMembers(
            truth=three_pools(), communication=EXCHANGE, variation=variation, seed=seed, warm_up=4.0
        )
        decision = Job(cluster).epoch()
        assert decision.changed
        lost.append(cluster.loss_of(decision.shares))
    assert float(np.median(lost)) <= median
    assert max(lost) <= worst


def test_the_prediction_holds_for_batches_never_seen() -> None:
    """Predicted against mean step time at other batches, with noise and overhead: 3 % in the median."""
    errors = []
    for seed in range(4):
        cluster = SimulatedMembers(
            truth=three_pools(0.002), communication=EXCHANGE, variation=0.06, seed=seed, overhead_s=0.15, warm_up=4.0
        )
        job = Job(cluster)
        job.epoch()
        job.epoch()
        for batch in (200, 400, 900, 1600):
            decision = decide_shares(replace(job.request, total_samples=batch, current_shares=None))
            assert isinstance(decision, SharesDecision)
            assert decision.prediction is not None
            cluster.step_seconds.clear()
            cluster.run(decision.shares, 300)
            errors.append(abs(decision.prediction.step_s / float(np.mean(cluster.step_seconds)) - 1))
            assert decision.prediction.efficiency <= decision.prediction.efficiency_ceiling
    assert float(np.median(errors)) <= 0.03
    assert max(errors) <= 0.08


def test_deciding_again_changes_nothing() -> None:
    """The decision's own shares as current ones: the same answer, and nothing to do, in every phase of a job."""
    job = Job(SimulatedMembers(truth=three_pools(), communication=EXCHANGE, variation=0.1, seed=3))
    for _ in range(4):
        again = decide_shares(replace(job.request, current_shares=job.decision.shares))
        assert isinstance(again, SharesDecision)
        assert not again.changed
        assert (again.shares, again.probe, again.compute) == (
            job.decision.shares,
            job.decision.probe,
            job.decision.compute,
        )
        job.epoch()


def test_noise_does_not_move_the_shares() -> None:
    """Once balanced, gains that chance could suggest are ignored: one correction in ten more epochs, rarely two."""
    moves = []
    for seed in range(6):
        job = Job(SimulatedMembers(truth=three_pools(), communication=EXCHANGE, variation=0.06, seed=seed))
        job.epoch()
        moves.append(sum(job.epoch().changed for _ in range(10)))
        assert job.decision.probe == ()
    assert max(moves) <= 2
    assert sum(moves) <= 6


def test_the_baseline_stays_even() -> None:
    """With rebalancing off: always even shares, no probe, but a prediction for comparison."""
    job = Job(SimulatedMembers(truth=three_pools(), communication=EXCHANGE, variation=0.03), rebalance=False)
    assert job.decision.probe == ()
    decision = job.epoch()
    assert decision.shares == (171, 171, 170)
    assert not decision.changed
    assert decision.prediction is not None
    assert decision.prediction.efficiency < 0.6


def test_a_throttled_member_is_learned_again() -> None:
    """Its change is named and probed, and after two epochs the split is right again."""
    cluster = SimulatedMembers(truth=three_pools(), communication=EXCHANGE, variation=0.03, seed=2)
    job = Job(cluster)
    job.epoch()
    job.epoch()
    cluster.slow[0] = 1.8
    noticed = job.epoch(scrapes=2)
    assert noticed.relearn == ("w0/0",)
    assert noticed.changed
    assert noticed.probe
    job.epoch()
    c = cluster.truth[0]
    slowed = [
        ComputeTime(
            per_sample_s=1.8 * c.per_sample_s,
            fixed_s=1.8 * c.fixed_s,
            backward_per_sample_s=1.8 * c.backward_per_sample_s,
            backward_fixed_s=1.8 * c.backward_fixed_s,
            update_s=1.8 * c.update_s,
        ),
        *cluster.truth[1:],
    ]
    assert SimulatedMembers(truth=slowed, communication=EXCHANGE).loss_of(job.decision.shares) < 0.04
    assert job.decision.relearn == ()


def test_a_joiner_is_taken_to_be_like_its_pool() -> None:
    """Without evidence, it gets its pool's model and no probe; without a pool, the middle member's and a probe."""
    job = Job(SimulatedMembers(truth=three_pools(), communication=EXCHANGE, variation=0.02))
    job.epoch()
    named = tuple(replace(m, pool=pool) for m, pool in zip(job.request.members, ("a", "b", "c"), strict=True))
    for pool, like, shapes in (("c", 2, 0), ("", 1, 3)):
        joined = replace(job.request, members=(*named, MemberEvidence(member="new/0", pool=pool)), current_shares=None)
        decision = decide_shares(joined)
        assert isinstance(decision, SharesDecision)
        assert pace_of(decision.compute[3]) == pytest.approx(pace_of(decision.compute[like]), rel=1e-3)
        assert abs(decision.shares[3] - decision.shares[like]) <= 1
        assert decision.models[3].quality is FitQuality.THIN
        assert "assumed to be like" in decision.models[3].reason
        assert decision.prediction is not None
        assert len({vector[3] for vector in decision.probe}) == shapes


def test_one_share_is_enough_for_a_member_of_a_known_pool() -> None:
    """A returning worker that is 1.3 times as slow as its pool: its steps tell its pace, the pool tells its shape."""
    cluster = SimulatedMembers(truth=[*three_pools(), three_pools()[0]], communication=EXCHANGE, variation=0.03, seed=4)
    cluster.slow[3] = 1.3
    for _ in range(20):
        cluster.run((170, 170, 60, 0))
        cluster.run((100, 100, 40, 0))
    cluster.run((130, 130, 50, 90), 20)
    seen = cluster.scrape()
    members = tuple(
        MemberEvidence(
            member=cluster.name(rank), pool=pool, observations=tuple(o for o in seen if o.member == cluster.name(rank))
        )
        for rank, pool in enumerate("abca")
    )
    decision = decide_shares(SharesRequest(total_samples=400, members=members))
    assert isinstance(decision, SharesDecision)
    assert decision.models[3].pooled
    assert decision.probe == ()
    mate, own = decision.models[0].compute, decision.models[3].compute
    assert mate is not None
    assert own is not None
    for share in (25, 100, 150):
        assert compute_s(own, share) == pytest.approx(1.3 * compute_s(mate, share), rel=0.06)
    strange = decide_shares(SharesRequest(total_samples=400, members=(*members[:3], replace(members[3], pool="d"))))
    assert isinstance(strange, SharesDecision)
    assert not strange.models[3].pooled
    assert strange.probe


def test_a_newcomer_is_like_those_of_its_pool_that_left() -> None:
    """All members of its pool have left, but their evidence remains: the newcomer gets their share at once."""
    job = Job(SimulatedMembers(truth=three_pools(), communication=EXCHANGE, variation=0.02))
    job.epoch()
    known = tuple(replace(m, pool=pool) for m, pool in zip(job.request.members, ("a", "b", "c"), strict=True))
    for rank, pool in ((2, "c"), (0, "a")):
        staying = tuple(m for i, m in enumerate(known) if i != rank)
        newcomer = MemberEvidence(member="new/0", pool=pool)
        returned = replace(job.request, members=(*staying, newcomer), former=(known[rank],), current_shares=None)
        decision = decide_shares(returned)
        assert isinstance(decision, SharesDecision)
        assert pace_of(decision.compute[2]) == pytest.approx(pace_of(job.decision.compute[rank]), rel=1e-3)
        assert abs(decision.shares[2] - job.decision.shares[rank]) <= 2
        blind = decide_shares(replace(returned, former=()))
        assert isinstance(blind, SharesDecision)
        assert abs(blind.shares[2] - job.decision.shares[rank]) > 20


def test_lost_telemetry_does_not_change_good_shares() -> None:
    """Without any evidence, valid shares stay; with a new batch they become even."""
    blind = SharesRequest(
        total_samples=100, members=tuple(MemberEvidence(member=m) for m in "abc"), current_shares=(60, 30, 10)
    )
    kept = decide_shares(blind)
    assert isinstance(kept, SharesDecision)
    assert (kept.shares, kept.changed) == ((60, 30, 10), False)
    fresh = decide_shares(replace(blind, total_samples=99))
    assert isinstance(fresh, SharesDecision)
    assert fresh.shares == (33, 33, 33)


def test_a_thin_model_limits_the_share() -> None:
    """With one observed share only, a member gets at most twice that share."""

    def seen(member: str, seconds: float) -> MemberEvidence:
        fast = Observation(
            member=member, share_samples=50, steps=30, ended_s=0.0, compute=MeanVariance(mean=seconds, variance=0.0)
        )
        return MemberEvidence(member=member, observations=(fast,))

    members = (seen("a", 0.01), *(seen(m, 1.0) for m in "bcd"))
    decision = decide_shares(SharesRequest(total_samples=200, members=members))
    assert isinstance(decision, SharesDecision)
    assert decision.shares[0] == 100
    assert decision.probe


def test_limits_hold_in_every_plan() -> None:
    """Caps, floors and micro-batches are kept from the first even plan on; the plan states the micro-batches."""
    cluster = SimulatedMembers(truth=three_pools(), communication=EXCHANGE, micro_caps={0: 64})
    job = Job(cluster)
    limited = (
        replace(job.request.members[0], micro_cap_samples=64, cap_samples=240),
        replace(job.request.members[1], floor_samples=200),
        job.request.members[2],
    )
    job.request = replace(job.request, members=limited)
    job.decision = job.decide()
    for _ in range(3):
        for vector in (job.decision.shares, *job.decision.probe):
            assert sum(vector) == BATCH
            assert vector[0] <= 240
            assert vector[1] >= 200
        job.epoch()
    assert job.decision.prediction is not None
    assert job.decision.shares[0] == 240
    assert job.decision.prediction.bindings[0] is Binding.MEMORY


def test_a_straggler_is_named() -> None:
    """The decision names it and the gain."""
    truth = [*three_pools()[:2], replace(three_pools()[2], fixed_s=3.0)]
    job = Job(SimulatedMembers(truth=truth, communication=EXCHANGE))
    decision = job.epoch()
    assert [straggler.member for straggler in decision.stragglers] == [2]
    assert "w2/0 holds up the others" in decision.reason


@pytest.mark.parametrize(
    "request_",
    [
        SharesRequest(total_samples=10, members=()),
        SharesRequest(total_samples=1, members=(MemberEvidence(member="a"), MemberEvidence(member="b"))),
        SharesRequest(total_samples=100, members=(MemberEvidence(member="a", cap_samples=30),)),
    ],
)
def test_an_infeasible_request_returns_a_value(request_: SharesRequest) -> None:
    """Nobody, floors above the batch, caps below it."""
    assert isinstance(decide_shares(request_), Infeasible)


numbers = st.floats() | st.sampled_from([0.0, 1.0, 0.5, 1e-9, 1e9])
moments = st.none() | st.builds(MeanVariance, mean=numbers, variance=st.none() | numbers)
observations = st.builds(
    Observation,
    member=st.just("a"),
    share_samples=st.integers(-2, 100),
    micro_batches=st.integers(-1, 5),
    steps=st.integers(-1, 100),
    ended_s=numbers,
    warm_up=st.booleans(),
    load=moments,
    forward=moments,
    backward=moments,
    sync=moments,
    update=moments,
    compute=moments,
    step=moments,
    first_bucket_fraction=moments,
    bucket_steps=st.integers(-1, 50),
    overlapped_s=st.none() | numbers,
    last_bucket_s=st.none() | numbers,
)
evidence = st.builds(
    MemberEvidence,
    member=st.sampled_from("abc"),
    pool=st.sampled_from(["", "p", "q"]),
    observations=st.lists(observations, max_size=5).map(tuple),
    floor_samples=st.integers(0, 5),
    cap_samples=st.none() | st.integers(0, 200),
    micro_cap_samples=st.none() | st.integers(1, 30),
    granularity_samples=st.integers(1, 4),
)


@settings(max_examples=120)
@given(
    st.builds(
        SharesRequest,
        total_samples=st.integers(0, 300),
        members=st.lists(evidence, max_size=4).map(tuple),
        current_shares=st.none() | st.lists(st.integers(-5, 300), max_size=4).map(tuple),
        least_gain_ratio=st.sampled_from([0.0, 0.03]),
        rebalance=st.booleans(),
    )
)
def test_no_telemetry_raises(request_: SharesRequest) -> None:
    """Whatever arrives: shares that sum up within limits, finite predictions, and the same answer when asked again."""
    decision = decide_shares(request_)
    if isinstance(decision, Infeasible):
        return
    for vector in (decision.shares, *decision.probe):
        assert sum(vector) == request_.total_samples
        for share, member in zip(vector, request_.members, strict=True):
            assert share >= member.floor_samples
            assert member.cap_samples is None or share <= member.cap_samples
            assert share % member.granularity_samples == 0
    if decision.prediction is not None:
        assert 0 < decision.prediction.step_s < math.inf
        assert 0 < decision.prediction.efficiency <= 1 + 1e-9
        assert 0 < decision.prediction.efficiency_ceiling <= 1
    again = decide_shares(replace(request_, current_shares=decision.shares))
    assert isinstance(again, SharesDecision)
    assert (again.shares, again.probe, again.changed) == (
        decision.shares,
        decision.probe,
        False,
    )


@pytest.mark.parametrize("variations", [(0.0, 0.0, 0.0, 0.0), (0.02, 0.02, 0.02, 0.3)])
@pytest.mark.parametrize("overhead_s", [0.0, 1.0])
def test_the_gain_is_of_a_whole_step(variations: tuple[float, ...], overhead_s: float) -> None:
    """Saved seconds by drawn steps, over all that a step takes: what no share changes makes the same saving smaller."""
    line = ComputeTime(per_sample_s=0.002, fixed_s=0.05, backward_per_sample_s=0.004, backward_fixed_s=0.05)
    members = tuple(MemberEvidence(member=f"w{rank}/0") for rank in range(4))
    known = tuple(
        MemberModel(
            compute=line,
            variation=variation,
            uncertainty_ratio=0.001,
            error=LineError(centre_samples=100.0, centre_s=1e-4, slope_s=1e-6),
            largest_share_samples=200,
            steps=100_000,
            shapes=2,
            steps_at_speed=100_000,
            quality=FitQuality.OK,
            reason="known",
        )
        for variation in variations
    )
    fits = MemberFits(
        evidence=members,
        former=(),
        data=(None,) * 4,
        alone=known,
        now_ratio=1.0,
        exchange=ExchangeModel(communication=CommunicationTime(), overhead_s=overhead_s, reason="known"),
    )
    current = (80, 80, 80, 160)
    decision = decide_shares(SharesRequest(total_samples=400, members=members, current_shares=current), fits=fits)
    assert isinstance(decision, SharesDecision)
    noise = 1 + np.array(variations) * np.random.default_rng(4).standard_normal((400_000, 4))

    def mean_step_s(shares: tuple[int, ...]) -> float:
        return float(((0.1 + 0.006 * np.array(shares)) * noise).max(axis=1).mean()) + overhead_s

    saved = 1 - mean_step_s(decision.shares) / mean_step_s(current)
    assert decision.changed
    assert decision.gain_ratio == pytest.approx(saved, abs=0.002)
