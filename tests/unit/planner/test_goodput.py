"""The batch that learns fastest, and the planning around it."""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from dataclasses import replace

import pytest
from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_core.split.balance import Infeasible
from heterotrain_core.split.member import SplitMember
from heterotrain_planner.goodput import (
    LEAST_GAIN,
    BatchChoice,
    candidate_batches,
    choose_batch,
    statistical_efficiency,
)
from heterotrain_planner.planning.batch import BatchDecision, BatchRequest, decide_batch
from heterotrain_planner.planning.evidence import TRUSTED_GROWTH, UNSURE_GROWTH, MemberEvidence
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exported_counters import SimulatedMembers, three_pools
from unit.core.oracles import member_step_s

EXCHANGE = CommunicationTime(overlapped_s=0.1, last_bucket_s=0.05, gamma=0.2)
MEMBERS = tuple(SplitMember(compute=c) for c in three_pools())


def chosen(noise: float | None, current: int | None, members: tuple[SplitMember, ...] = MEMBERS) -> BatchChoice:
    """Return the choice for three pools between 64 and 8,192 samples."""
    found = choose_batch(
        members,
        communication=EXCHANGE,
        base_samples=128,
        least_samples=64,
        most_samples=8192,
        current_samples=current,
        noise_samples=noise,
    )
    assert isinstance(found, BatchChoice)
    return found


def test_more_noise_leads_to_larger_batches() -> None:
    """From the smallest noise scale to the largest the batch never falls, and it is the best of the table."""
    batches = []
    for phi in (1.0, 50.0, 500.0, 5000.0, 1e6):
        choice = chosen(phi, 128)
        batches.append(choice.samples)
        best = max(c.goodput_per_s for c in choice.candidates)
        mine = next(c for c in choice.candidates if c.samples == choice.samples)
        assert mine.goodput_per_s >= best / (1 + LEAST_GAIN)
        assert sum(choice.split.shares) == choice.samples
    assert batches == sorted(batches)
    assert batches[-1] > 10 * batches[0]


@settings(max_examples=20)
@given(st.floats(0, 1e7), st.integers(64, 8192))
def test_choosing_again_changes_nothing(phi: float, current: int) -> None:
    """No flip-flop: the chosen batch is chosen again."""
    choice = chosen(phi, current)
    again = chosen(phi, choice.samples)
    assert (again.samples, again.changed) == (choice.samples, False)


def test_small_gains_are_left_alone() -> None:
    """Nobody changes the batch for less than 5 %."""
    moved = [chosen(phi, 512) for phi in (100.0, 200.0, 400.0, 800.0, 1600.0, 3200.0)]
    assert any(choice.changed for choice in moved)
    for choice in moved:
        table = {c.samples: c.goodput_per_s for c in choice.candidates}
        gained = max(table.values()) / table[512] - 1
        assert choice.changed == (gained >= LEAST_GAIN)


def test_without_a_noise_scale_the_batch_stays() -> None:
    """The base batch at the start, the current one later."""
    assert chosen(None, None).samples == 128
    assert chosen(None, 700).samples == 700
    assert chosen(math.nan, 700).samples == 700


def test_only_batches_that_fit_are_candidates() -> None:
    """Caps end the table; a batch that does not fit any more is left for the nearest that does."""
    capped = tuple(replace(m, cap_samples=200) for m in MEMBERS)
    choice = chosen(1e6, 4096, capped)
    assert max(c.samples for c in choice.candidates) <= 600
    assert choice.samples <= 600
    assert choice.changed
    accumulated = tuple(replace(m, micro_cap_samples=64) for m in MEMBERS)
    assert chosen(1e6, 4096, accumulated).samples > 600
    none = choose_batch(
        tuple(replace(m, cap_samples=10) for m in MEMBERS),
        communication=EXCHANGE,
        base_samples=128,
        least_samples=64,
        most_samples=100,
        current_samples=None,
        noise_samples=1.0,
    )
    assert isinstance(none, Infeasible)
    assert none.limit == 30


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 16), st.integers(1, 60))
def test_candidates_are_geometric_multiples_within_limits(least: int, more: int, unit: int, count: int) -> None:
    """Both ends, at most so many, and never two further apart than a geometric step and rounding."""
    found = candidate_batches(least=least, most=least + more, unit=unit, count=count)
    assert list(found) == sorted(set(found))
    assert len(found) <= max(2, count)
    assert all(least <= b <= least + more and b % unit == 0 for b in found)
    if found:
        assert found[0] - least < unit
        assert least + more - found[-1] < unit


def test_efficiency_is_one_at_the_base_and_falls() -> None:
    """Pollux' statistical efficiency: half at phi much smaller than B = 2 B_0 … and one where noise is all there is."""
    assert statistical_efficiency(128, base_samples=128, noise_samples=77) == 1.0
    assert statistical_efficiency(256, base_samples=128, noise_samples=0) == 0.5
    assert statistical_efficiency(256, base_samples=128, noise_samples=1e9) == pytest.approx(1.0, abs=1e-6)


def test_the_plan_of_an_adaptive_job() -> None:
    """Blind: the base batch. With speeds and noise: the best batch, and the same when asked again."""
    cluster = SimulatedMembers(truth=three_pools(), communication=EXCHANGE)
    members = tuple(MemberEvidence(member=cluster.name(rank)) for rank in range(3))
    request = BatchRequest(
        members=members,
        base_samples=128,
        least_samples=64,
        most_samples=8192,
        noise_samples=3000.0,
    )
    blind = decide_batch(request)
    assert isinstance(blind, BatchDecision)
    assert (blind.samples, blind.choice) == (128, None)
    seen = []
    for shares in ((40, 40, 48), (60, 40, 28), (30, 50, 48)):
        cluster.run(shares, 20)
        seen += cluster.scrape()
    known = replace(
        request,
        current_samples=128,
        members=tuple(replace(m, observations=tuple(o for o in seen if o.member == m.member)) for m in members),
    )
    decision = decide_batch(known)
    assert isinstance(decision, BatchDecision)
    assert decision.changed
    assert decision.samples > 300
    again = decide_batch(replace(known, current_samples=decision.samples))
    assert isinstance(again, BatchDecision)
    assert (again.samples, again.changed) == (decision.samples, False)


def learned_members(cluster: SimulatedMembers, *shares: tuple[int, ...]) -> tuple[MemberEvidence, ...]:
    """Return evidence of 20 steps at each of these share vectors."""
    seen = []
    for vector in shares:
        cluster.run(vector, 20)
        seen += cluster.scrape()
    names = [cluster.name(rank) for rank in range(len(cluster.truth))]
    return tuple(MemberEvidence(member=n, observations=tuple(o for o in seen if o.member == n)) for n in names)


@pytest.mark.parametrize("vectors", [[(40, 40, 48)] * 3, [(90, 40, 20), (70, 35, 15), (50, 50, 28)]])
def test_a_batch_grows_no_faster_than_the_evidence(vectors: list[tuple[int, int, int]]) -> None:
    """Where the exchange dominates, a larger batch pays even by pessimistic lines: up to eight times the observed."""
    slow_exchange = CommunicationTime(overlapped_s=3.0, last_bucket_s=1.0, gamma=0.2)
    cluster = SimulatedMembers(truth=three_pools(), communication=slow_exchange)
    members = learned_members(cluster, *vectors)
    request = BatchRequest(
        members=members, base_samples=128, least_samples=128, most_samples=10**6, current_samples=128, noise_samples=1e9
    )
    decision = decide_batch(request)
    assert isinstance(decision, BatchDecision)
    assert decision.choice is not None
    assert decision.samples > 2 * TRUSTED_GROWTH * sum(largest(member) for member in members)
    for share, member in zip(decision.choice.split.shares, members, strict=True):
        assert share <= UNSURE_GROWTH * largest(member)
    again = decide_batch(replace(request, current_samples=decision.samples))
    assert isinstance(again, BatchDecision)
    assert not again.changed
    # An operator that has seen little of a large batch keeps it.
    large = decide_batch(replace(request, current_samples=5000))
    assert isinstance(large, BatchDecision)
    assert not large.changed


def test_a_batch_that_may_not_pay_grows_within_trusted_shares() -> None:
    """Equal members at one size, no exchange: only an assumed fixed part speaks for a larger batch."""
    alike = ComputeTime(per_sample_s=0.001, fixed_s=0.02, backward_per_sample_s=0.002, backward_fixed_s=0.04)
    members = learned_members(SimulatedMembers(truth=[alike] * 3), *[(43, 43, 42)] * 3)
    decision = decide_batch(
        BatchRequest(
            members=members,
            base_samples=128,
            least_samples=128,
            most_samples=10**6,
            current_samples=128,
            noise_samples=1e9,
        )
    )
    assert isinstance(decision, BatchDecision)
    assert decision.choice is not None
    assert decision.samples > 128
    for share, member in zip(decision.choice.split.shares, members, strict=True):
        assert share <= TRUSTED_GROWTH * largest(member)


def largest(member: MemberEvidence) -> int:
    """Return the largest observed share."""
    return max(observation.share_samples for observation in member.observations)


def test_an_even_division_is_judged_by_its_slowest_member() -> None:
    """Against the closed form: all members have the same share, so the slowest one determines the step."""
    truth = three_pools()
    choice = choose_batch(
        tuple(SplitMember(compute=c) for c in truth),
        communication=CommunicationTime(),
        base_samples=120,
        least_samples=120,
        most_samples=1200,
        current_samples=120,
        noise_samples=400.0,
        even=True,
    )
    assert isinstance(choice, BatchChoice)
    slow = truth[2]
    for candidate in choice.candidates:
        share = -(-candidate.samples // 3)
        least = (
            share if candidate.samples % 3 == 0 else share - 1
        )  # the slowest is the last: it never has the extra one
        seconds = [
            n * (slow.per_sample_s + slow.backward_per_sample_s) + slow.fixed_s + slow.backward_fixed_s + slow.update_s
            for n in (least, share)
        ]
        assert min(seconds) - 1e-9 <= candidate.step_s <= max(seconds) + 1e-9
    best = max(choice.candidates, key=lambda c: c.samples / c.step_s * 520 / (400 + c.samples))
    assert choice.samples == best.samples


def test_an_impossible_adaptive_range_is_a_value() -> None:
    """No batch in range fits: a reason, not an exception."""
    slow = ComputeTime(per_sample_s=1.0, fixed_s=0.0, backward_per_sample_s=0.0, backward_fixed_s=0.0)
    found = choose_batch(
        (SplitMember(compute=slow, granularity_samples=64),),
        communication=EXCHANGE,
        base_samples=10,
        least_samples=10,
        most_samples=20,
        current_samples=None,
        noise_samples=1.0,
    )
    assert isinstance(found, Infeasible)
    assert "multiple of 64" in found.reason


def test_seconds_outside_of_all_phases_count_for_every_batch() -> None:
    """Each candidate's step by a level search over whole samples, plus the loop's own half second; the best is chosen.

    Such seconds are spread over more samples in a larger batch, so without them a smaller batch would be chosen.
    """
    members = tuple(SplitMember(compute=c, micro_cap_samples=48) for c in three_pools())
    best = {}
    for overhead_s in (0.0, 0.5):
        choice = choose_batch(
            members,
            communication=EXCHANGE,
            base_samples=64,
            least_samples=64,
            most_samples=600,
            current_samples=64,
            noise_samples=150.0,
            overhead_s=overhead_s,
        )
        assert isinstance(choice, BatchChoice)
        goodput = {}
        for candidate in choice.candidates:
            least_s = level_s(candidate.samples, members)
            assert candidate.step_s == pytest.approx(least_s + overhead_s, rel=1e-9)
            goodput[candidate.samples] = candidate.samples / (least_s + overhead_s) * 214 / (150 + candidate.samples)
        best[overhead_s] = max(goodput, key=lambda batch: goodput[batch])
        assert choice.samples == best[overhead_s]
    assert best[0.5] > 1.2 * best[0.0]


def test_the_batches_before_a_jump_are_ranked_by_whole_steps() -> None:
    """By hand: 32 samples take 0.1 s of micro-batches, and every step 5 s; the best batch is near 894, at 28 times 32.

    At the same rate without these 5 s, the ten smallest of the 32 batches before a jump would be worth most.
    """
    compute = ComputeTime(per_sample_s=0.0, fixed_s=0.1, backward_per_sample_s=1e-9, backward_fixed_s=0.0)
    choice = choose_batch(
        (SplitMember(compute=compute, micro_cap_samples=16),) * 2,
        communication=CommunicationTime(),
        base_samples=32,
        least_samples=32,
        most_samples=1024,
        current_samples=32,
        noise_samples=500.0,
        overhead_s=5.0,
    )
    assert isinstance(choice, BatchChoice)
    best = max(range(32, 1025), key=lambda batch: batch / (0.1 * -(-batch // 32) + 5.0) / (500.0 + batch))
    assert choice.samples == best == 896


def level_s(total: int, members: tuple[SplitMember, ...]) -> float:
    """Return the least time within which these members' largest shares hold ``total`` samples."""
    table = [[member_step_s(member, n, EXCHANGE) for n in range(total + 1)] for member in members]
    times = sorted(time_s for times in table for time_s in times)
    enough = bisect_left(
        times, x=True, key=lambda level: sum(max(0, bisect_right(each, level) - 1) for each in table) >= total
    )
    return max(times[enough], *(each[0] for each in table))


def test_a_batch_is_decided_with_the_seconds_outside_of_all_phases() -> None:
    """What telemetry shows beyond compute and exchange is part of each candidate's step: 0.4 s, from counters."""
    for overhead_s in (0.0, 0.4):
        cluster = SimulatedMembers(truth=three_pools(), communication=EXCHANGE, overhead_s=overhead_s)
        request = BatchRequest(
            members=learned_members(cluster, (90, 40, 20), (70, 35, 15), (50, 50, 28)),
            base_samples=128,
            least_samples=128,
            most_samples=250,
            current_samples=128,
            noise_samples=500.0,
        )
        decision = decide_batch(request)
        assert isinstance(decision, BatchDecision)
        assert decision.choice is not None
        truth = tuple(cluster.members())
        for candidate in decision.choice.candidates:
            assert candidate.step_s == pytest.approx(level_s(candidate.samples, truth) + overhead_s, rel=0.02)


def test_little_is_lost_against_every_batch() -> None:
    """Random clusters whose members accumulate, each integer batch divided on its own: 1 % at most, 0.2 % on average.

    Equal ratios alone lose up to 2.4 %: they miss the batch just before a further micro-batch of all members.
    """
    rng = random.Random(7)
    lost = []
    for _ in range(25):
        same, base = rng.randint(4, 40), rng.randint(16, 64)
        members = tuple(
            SplitMember(
                compute=ComputeTime(
                    per_sample_s=slowness / 3,
                    fixed_s=rng.uniform(0, 0.06),
                    backward_per_sample_s=2 * slowness / 3,
                    backward_fixed_s=rng.uniform(0, 0.06),
                ),
                micro_cap_samples=rng.choice([same, same, rng.randint(4, 64)]),
            )
            for slowness in (math.exp(rng.uniform(math.log(5e-4), math.log(5e-3))) for _ in range(rng.randint(2, 4)))
        )
        phi, most = math.exp(rng.uniform(math.log(50), math.log(3000))), rng.randint(200, 500)
        choice = choose_batch(
            members,
            communication=EXCHANGE,
            base_samples=base,
            least_samples=base,
            most_samples=most,
            current_samples=None,
            noise_samples=phi,
        )
        assert isinstance(choice, BatchChoice)
        table = [sorted(member_step_s(member, n, EXCHANGE) for n in range(most + 1)) for member in members]
        times = sorted({time_s for each in table for time_s in each})
        most_at = [(sum(max(0, bisect_right(each, level) - 1) for each in table), level) for level in times]
        # The largest batch within a level is the best one of that level; all batches below ``most`` are covered.
        best = max(min(batch, most) / level / (phi + min(batch, most)) for batch, level in most_at if batch >= base) * (
            phi + base
        )
        found = max(candidate.goodput_per_s for candidate in choice.candidates)
        lost.append(best / found - 1)
    assert min(lost) > -1e-9
    assert max(lost) < 0.01
    assert sum(lost) / len(lost) < 0.002
