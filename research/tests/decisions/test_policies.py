"""The policies' own rules, against hand-made observations and small simulated clusters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from decisions.scenarios import a_scenario, a_workload
from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_core.split.balance import Split, balance
from heterotrain_core.split.member import SplitMember
from heterotrain_planner.perf.counters import MeanVariance, Observation
from heterotrain_simulator.baselines import AdaptiveEven, AdaptiveProportional, Even, Proportional
from heterotrain_simulator.buckets import Network
from heterotrain_simulator.cannikin import Cannikin
from heterotrain_simulator.engine import simulate
from heterotrain_simulator.ground_truth import GroundTruth, Worker
from heterotrain_simulator.heterotrain_policy import HeterotrainPolicy
from heterotrain_simulator.policy import MemberSlot, View
from heterotrain_simulator.scenario import Group, Slowdown
from heterotrain_simulator.workloads import CIFAR10, IMAGENET

TIMES = {"a": (0.001, 0.01), "b": (0.004, 0.02)}


def seen(member: str, share: int, ended_s: float) -> Observation:
    """Return thirty steps of a member whose forward is a third of its time."""
    rate, fixed = TIMES[member]
    whole = rate * share + fixed
    return Observation(
        member=member,
        share_samples=share,
        steps=30,
        ended_s=ended_s,
        forward=MeanVariance(mean=whole / 3, variance=1e-10),
        backward=MeanVariance(mean=2 * whole / 3, variance=1e-10),
        compute=MeanVariance(mean=whole, variance=1e-10),
        load=MeanVariance(mean=0.0, variance=0.0),
        update=MeanVariance(mean=0.0, variance=0.0),
    )


def a_view(observations: Sequence[Observation] = (), **changes: Any) -> View:
    """Return a view of two members, a and b, with a batch of 100."""
    by_member: dict[str, list[Observation]] = {}
    for observation in observations:
        by_member.setdefault(observation.member, []).append(observation)
    fields: dict[str, Any] = {
        "slots": (
            MemberSlot(member="a", pool="a", memory_samples=1000),
            MemberSlot(member="b", pool="b", memory_samples=1000),
        ),
        "changed": False,
        "observations": {member: tuple(found) for member, found in by_member.items()},
        "noise_samples": 1000.0,
        "batch_samples": 100,
        "adaptive": False,
        "base_batch": 50,
        "most_batch": 3200,
        "boundary": 0,
        "min_gain_ratio": 0.03,
        **changes,
    }
    return View(**fields)


def the_optimum(batch: int) -> tuple[int, ...]:
    """Return the optimal shares of the two members' true models."""
    members = [
        SplitMember(
            compute=ComputeTime(
                per_sample_s=rate / 3,
                fixed_s=fixed / 3,
                backward_per_sample_s=2 * rate / 3,
                backward_fixed_s=2 * fixed / 3,
            )
        )
        for rate, fixed in TIMES.values()
    ]
    split = balance(batch, members, communication=CommunicationTime())
    assert isinstance(split, Split)
    return split.shares


def test_even_is_even() -> None:
    """For any observations."""
    assert Even().decide(a_view([seen("a", 50, 1.0), seen("b", 50, 1.0)])).shares == (50, 50)


def test_proportional_follows_measured_speed() -> None:
    """Shares are in proportion to samples per second: 50 samples in 0.06 s against 50 in 0.22 s."""
    policy = Proportional()
    assert policy.decide(a_view(changed=True)).shares == (50, 50)
    shares = policy.decide(a_view([seen("a", 50, 1.0), seen("b", 50, 1.0)])).shares
    assert shares == (round(100 * 0.22 / 0.28), round(100 * 0.06 / 0.28))


def test_proportional_never_starves_a_member() -> None:
    """A very slow member keeps one sample."""
    policy = Proportional(shares=(50, 50))
    slow = [
        seen("a", 50, 1.0),
        Observation(member="b", share_samples=50, steps=3, ended_s=1.0, compute=MeanVariance(mean=1e6)),
    ]
    assert policy.decide(a_view(slow)).shares == (99, 1)


def test_cannikin_learns_for_two_epochs_and_is_optimal_in_the_third() -> None:
    """Even, then by seconds a sample, then the optimum of lines through two points."""
    policy = Cannikin()
    first = policy.decide(a_view(changed=True)).shares
    history = [seen("a", first[0], 1.0), seen("b", first[1], 1.0)]
    second = policy.decide(a_view(history)).shares
    assert first == (50, 50)
    assert second == (round(100 * 0.22 / 0.28), round(100 * 0.06 / 0.28))
    history += [seen("a", second[0], 2.0), seen("b", second[1], 2.0)]
    third = policy.decide(a_view(history))
    assert third.shares == the_optimum(100)
    assert third.predicted_step_s is not None


def test_adaptive_proportional_shares_follow_speed() -> None:
    """Even shares until both speeds are known, then by samples per second, and a batch that at most doubles."""
    policy = AdaptiveProportional()
    assert policy.decide(a_view()).shares == (50, 50)
    assert policy.decide(a_view([seen("a", 50, 1.0)])).shares == (50, 50)
    both = [seen(member, share, at_s) for at_s, share in ((1.0, 30), (2.0, 50)) for member in "ab"]
    # 50 samples take 0.06 s and 0.22 s.
    assert policy.decide(a_view(both)).shares == (79, 21)
    grown = policy.decide(a_view(both, adaptive=True, noise_samples=1e5))
    assert 100 < grown.batch_samples <= 200
    assert sum(grown.shares) == grown.batch_samples
    assert grown.shares[0] / grown.shares[1] == pytest.approx(0.22 / 0.06, rel=0.05)
    assert policy.decide(a_view(both, changed=True)).shares == (grown.batch_samples // 2,) * 2


def test_cannikin_starts_again_with_new_members() -> None:
    """A change of members makes it learn again."""
    policy = Cannikin()
    for at in (1.0, 2.0, 3.0):
        policy.decide(a_view([seen("a", 50, at), seen("b", 40, at)]))
    assert policy.decide(a_view(changed=True)).shares == (50, 50)


@pytest.mark.parametrize("policy", [AdaptiveEven, AdaptiveProportional, Cannikin, HeterotrainPolicy])
def test_adaptive_batches_grow_with_the_noise_scale(policy: type[Any]) -> None:
    """Late in training the batch is larger than early, within its limits; the target comes earlier than with B_0."""
    workload = a_workload(
        step_ms={"fast": ((1, 101.0), (400, 500.0)), "slow": ((1, 104.0), (400, 1700.0))},
        noise=((0.0, 50.0), (300.0, 5000.0)),
        target_steps=2000.0,
    )
    scenario = a_scenario(workload=workload, batch_samples=100, adaptive=True, end_epochs=0)
    adaptive = simulate(scenario, policy(), seed=1)
    batches = [row.batch_samples for row in adaptive.periods]
    assert batches[0] == 100
    assert max(batches) <= workload.most_batch
    assert batches[-1] > 2 * batches[0]
    fixed = simulate(a_scenario(workload=workload, batch_samples=100, end_epochs=0), Even(), seed=1)
    assert adaptive.target_s is not None
    assert fixed.target_s is not None
    assert adaptive.target_s < 0.8 * fixed.target_s


def test_a_jump_of_the_batch_does_not_run_away() -> None:
    """At small shares noise hides the A100's slope; a fitted slope of zero must not attract an eightfold batch."""
    scenario = a_scenario(
        workload=CIFAR10,
        batch_samples=512,
        adaptive=True,
        end_epochs=6,
        network=Network(bytes_per_s=2.5e9),
        groups=tuple(Group(pool=gpu, gpu=gpu, count=n) for gpu, n in (("a100", 4), ("v100", 4), ("rtx6000", 8))),
    )
    truth = GroundTruth(scenario)
    rows = simulate(scenario, HeterotrainPolicy(), seed=1).periods
    assert rows[1].batch_samples > 3 * rows[0].batch_samples
    for row in rows[1:]:
        workers = [Worker(name=m, pool=p, gpu=p, index=0) for m, p in zip(row.members, row.pools, strict=True)]
        even = truth.planned_s(workers, [row.batch_samples // 16] * 16, 0.0)
        assert row.planned_s <= 1.05 * even


def test_heterotrain_follows_a_throttled_member() -> None:
    """After a slowdown to half the speed its share falls, and after its end it rises again."""
    slow = (Slowdown(pool="fast", worker=0, from_s=40.0, until_s=110.0, ratio=2.0),)
    workload = a_workload(target_steps=1e9)
    scenario = a_scenario(workload=workload, slowdowns=slow, end_epochs=16, boundary_steps=10, scrape_s=1.0)
    rows = simulate(scenario, HeterotrainPolicy(), seed=1).periods
    before = next(row for row in reversed(rows) if row.until_s < 40.0).shares[0]
    during = next(row for row in reversed(rows) if row.until_s < 110.0).shares[0]
    after = rows[-1].shares[0]
    assert during < 0.7 * before
    assert after > 0.9 * before


def test_a_noisy_pool_gets_fewer_samples_than_balance_gives_it() -> None:
    """Four members with steps that vary by 30 %: the step is shorter than with the same speeds balanced by Cannikin."""
    scenario = a_scenario(
        workload=IMAGENET,
        batch_samples=3200,
        end_epochs=1,
        boundary_steps=40,
        network=Network(bytes_per_s=1e10),
        groups=(
            Group(pool="quiet", gpu="a100", count=12, variation=0.02),
            Group(pool="noisy", gpu="v100", count=4, variation=0.3),
        ),
    )
    ours = simulate(scenario, HeterotrainPolicy(), seed=1)
    balanced = simulate(scenario, Cannikin(), seed=1)
    assert ours.periods[-1].shares[-1] < 0.9 * balanced.periods[-1].shares[-1]
    assert ours.periods[-1].until_s < 0.95 * balanced.periods[-1].until_s
