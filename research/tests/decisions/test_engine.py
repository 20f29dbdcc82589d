"""The event loop: every sample once, complete accounts of time and cost, and losses of one step in flight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from decisions.scenarios import a_scenario, a_workload
from heterotrain_core.split.balance import evenly
from heterotrain_simulator.baselines import Even, Proportional
from heterotrain_simulator.buckets import Network
from heterotrain_simulator.cannikin import Cannikin
from heterotrain_simulator.engine import simulate
from heterotrain_simulator.ground_truth import GroundTruth, Worker
from heterotrain_simulator.heterotrain_policy import HeterotrainPolicy
from heterotrain_simulator.policy import PolicyDecision, View
from heterotrain_simulator.result import RunResult
from heterotrain_simulator.scenario import Change, Group, Noise, Pauses, Slowdown

QUIET = Noise(variation=0.0)


@dataclass
class Recorder:
    """Even shares, and a record of the policy's input."""

    name: str = "recorder"
    restarts: bool = False
    views: list[View] = field(default_factory=list)

    def decide(self, view: View) -> PolicyDecision:
        self.views.append(view)
        shares = evenly(view.batch_samples, len(view.slots))
        return PolicyDecision(batch_samples=view.batch_samples, shares=shares)


def members(outcome: RunResult) -> list[tuple[str, ...]]:
    return [period.members for period in outcome.periods]


@pytest.mark.parametrize("policy", [Even, Proportional, Cannikin, HeterotrainPolicy])
def test_one_seed_one_outcome(policy: type[Any]) -> None:
    """The same seed gives the same run; another one does not."""
    first = simulate(a_scenario(), policy(), seed=5)
    assert simulate(a_scenario(), policy(), seed=5) == first
    assert simulate(a_scenario(), policy(), seed=6).end_s != first.end_s


@pytest.mark.parametrize("policy", [Even, Proportional, Cannikin, HeterotrainPolicy])
def test_every_sample_once(policy: type[Any]) -> None:
    """Each epoch is exactly the data set, the last, smaller step included."""
    outcome = simulate(a_scenario(workload=a_workload(epoch_samples=20_001)), policy(), seed=1)
    assert outcome.epochs == 2
    assert outcome.samples == 2 * 20_001
    assert outcome.steps == 2 * 51
    assert sum(period.steps for period in outcome.periods) == outcome.steps


def test_accounts_of_time_and_cost_are_complete() -> None:
    """Training, pauses and idle time add up to the end; the cost is the price of the present workers."""
    changes = (Change(pool="slow", at_s=20.0, lost=2), Change(pool="slow", at_s=30.0, joined=1))
    pauses = Pauses(loss_s=2.0, join_s=1.0, start_s=5.0)
    outcome = simulate(a_scenario(changes=changes, pauses=pauses, end_epochs=4), Recorder(), seed=1)
    assert outcome.changes == 2
    assert outcome.training_s + outcome.paused_s + outcome.idle_s == pytest.approx(outcome.end_s)
    assert outcome.idle_s == 0
    # 10 an hour until the loss and its pause are over, 8 until the join, 9 after it.
    lost_s, joined_s = 22.0, next(period.from_s for period in outcome.periods if len(period.members) == 3)
    spent = 10 * lost_s + 8 * (joined_s - lost_s) + 9 * (outcome.end_s - joined_s)
    assert outcome.cost == pytest.approx(spent / 3600, rel=1e-9)


def test_a_loss_costs_the_step_in_flight() -> None:
    """Without noise, the steps before and after are exactly those of the present members."""
    scenario = a_scenario(
        noise=QUIET,
        changes=(Change(pool="slow", at_s=4.1, lost=2),),
        network=Network(bytes_per_s=1e15),
        pauses=Pauses(loss_s=1.5),
    )
    outcome = simulate(scenario, Even(restarts=False), seed=1)
    # 100 samples take the slow ones 0.41 s: nine whole steps in 3.69 s, the tenth would end at 4.1 s exactly.
    before, after = outcome.periods[0], outcome.periods[1]
    assert before.step_s == pytest.approx(0.41)
    assert before.steps in (9, 10)  # the tenth ends at the very moment of the loss, up to rounding
    assert outcome.repeated_steps == 10 - before.steps or outcome.repeated_steps == 1
    assert after.step_s == pytest.approx(0.21)
    assert after.from_s == pytest.approx(4.1 + 1.5)
    assert outcome.samples == 40_000


def test_members_change_as_the_scenario_says() -> None:
    """Lost workers are gone, joined ones are new, and start_s passes before they take part."""
    changes = (Change(pool="fast", at_s=10.0, lost=1), Change(pool="slow", at_s=12.0, joined=2, lost=1))
    scenario = a_scenario(changes=changes, pauses=Pauses(start_s=8.0))
    outcome = simulate(scenario, Even(restarts=False), seed=1)
    assert members(outcome)[:4] == [
        ("fast-0", "fast-1", "slow-0", "slow-1"),
        ("fast-1", "slow-0", "slow-1"),
        ("fast-1", "slow-1"),
        ("fast-1", "slow-1", "slow-2", "slow-3"),
    ]
    assert outcome.periods[3].from_s > 20.0


def test_time_without_members_is_idle() -> None:
    """Time without members is idle and free."""
    changes = (
        Change(pool="fast", at_s=5.0, lost=2),
        Change(pool="slow", at_s=5.0, lost=2),
        Change(pool="fast", at_s=50.0, joined=1),
    )
    outcome = simulate(a_scenario(changes=changes, pauses=Pauses(loss_s=1.0, start_s=10.0)), Recorder(), seed=1)
    assert outcome.idle_s == pytest.approx(54.0, abs=0.5)
    assert outcome.epochs == 2
    assert outcome.effective_part == pytest.approx(outcome.training_s / (outcome.end_s - outcome.idle_s))


def test_a_run_without_future_members_ends() -> None:
    """A job that lost all workers for good ends at once."""
    changes = (Change(pool="fast", at_s=5.0, lost=2), Change(pool="slow", at_s=5.0, lost=2))
    outcome = simulate(a_scenario(changes=changes), Recorder(), seed=1)
    assert outcome.target_s is None
    assert outcome.samples < 20_000


def test_a_restarting_policy_pauses_longer() -> None:
    """The same change costs one second without a restart and thirty with it."""
    scenario = a_scenario(changes=(Change(pool="slow", at_s=10.0, lost=1),), pauses=Pauses(loss_s=1, restart_s=30))
    assert simulate(scenario, Even(restarts=True), seed=1).paused_s == pytest.approx(
        simulate(scenario, Even(restarts=False), seed=1).paused_s + 29
    )


def test_a_policy_sees_telemetry_only() -> None:
    """Nothing at the start, then the observations of scrapes; a replacement starts without any."""
    policy = Recorder()
    changes = (Change(pool="slow", at_s=30.0, lost=1), Change(pool="slow", at_s=31.0, joined=1))
    simulate(a_scenario(changes=changes, end_epochs=4, pauses=Pauses(start_s=5.0)), policy, seed=1)
    assert not policy.views[0].observations
    at_boundary = policy.views[1]
    assert not at_boundary.changed
    observations = [o for mine in at_boundary.observations.values() for o in mine]
    assert observations
    assert max(o.ended_s for o in observations) <= 25.0
    assert {o.share_samples for o in observations} == {100}
    newcomer = next(view for view in policy.views if any(slot.member == "slow-2" for slot in view.slots))
    assert newcomer.changed
    assert "slow-2" not in newcomer.observations


def test_a_measured_step_is_what_was_drawn() -> None:
    """Mean compute in the telemetry is the table's, and the step phase adds up to the training time."""
    policy = Recorder()
    outcome = simulate(a_scenario(), policy, seed=1)
    view = policy.views[-1]
    slow = [o for o in view.observations["slow-0"] if o.compute is not None]
    mean = sum(o.compute.mean * o.steps for o in slow if o.compute) / sum(o.steps for o in slow)
    assert mean == pytest.approx(0.41, rel=0.01)
    seen = sum(o.step.mean * o.steps for o in slow if o.step)
    assert seen <= outcome.training_s
    assert seen == pytest.approx(outcome.training_s, rel=0.6)


def test_slowdowns_begin_and_end() -> None:
    """The slowed worker delays all others during its slowdown, at any step, not only at boundaries."""
    slow = (Slowdown(pool="slow", worker=1, from_s=10.0, until_s=20.0, ratio=2.0),)
    outcome = simulate(a_scenario(noise=QUIET, slowdowns=slow, end_epochs=1), Recorder(), seed=1)
    plain = simulate(a_scenario(noise=QUIET, end_epochs=1), Recorder(), seed=1)
    # Ten seconds at half speed: five seconds' worth of steps are late.
    assert outcome.end_s - plain.end_s == pytest.approx(5.0, abs=1.0)


def test_the_target_is_reached_when_the_gains_add_up() -> None:
    """With a noise scale far above the batch, a step of four base batches is worth four steps of the base batch."""
    workload = a_workload(noise=((0.0, 1e12),), target_steps=199.99)
    outcome = simulate(a_scenario(workload=workload, end_epochs=0, noise=QUIET), Recorder(), seed=1)
    assert outcome.target_s is not None
    assert outcome.target_s == pytest.approx(50 * 0.41, rel=0.01)
    assert outcome.cost_at_target == pytest.approx(outcome.target_s * 10 / 3600, rel=1e-6)


def test_it_stops_at_the_end_of_time() -> None:
    """end_s cuts the step in flight."""
    outcome = simulate(a_scenario(end_s=7.77), Recorder(), seed=1)
    assert outcome.end_s == pytest.approx(7.77)
    assert outcome.epochs == 0


def test_progress_is_reported() -> None:
    """The report never decreases and ends at one."""
    parts: list[float] = []
    simulate(a_scenario(), Recorder(), seed=1, report=parts.append)
    assert parts == sorted(parts)
    assert parts[-1] == 1.0


def test_boundaries_by_steps() -> None:
    """With boundary_steps the policy is called after this many steps, also within epochs."""
    policy = Recorder()
    simulate(a_scenario(boundary_steps=20, end_epochs=1), policy, seed=1)
    assert policy.views[-1].boundary == 2
    assert [
        period.steps for period in simulate(a_scenario(boundary_steps=20, end_epochs=1), Recorder(), seed=1).periods
    ] == [
        20,
        20,
        10,
    ]


def test_the_optimum_bounds_every_policy() -> None:
    """No policy's shares are faster than the true optimum, and the optimum has its true step time."""
    scenario = a_scenario(end_epochs=6)
    truth = GroundTruth(scenario)
    workers = [
        Worker(name=f"{g.pool}-{i}", pool=g.pool, gpu=g.gpu, index=i) for g in scenario.groups for i in range(g.count)
    ]
    best = truth.optimum(workers, 400, 0.0)
    assert best is not None
    assert truth.planned_s(workers, best.shares, 0.0) == pytest.approx(best.step_s, rel=1e-9)
    for policy in (Even(), Proportional(), Cannikin(), HeterotrainPolicy()):
        for period in simulate(scenario, policy, seed=1).periods:
            assert period.planned_s >= best.step_s * (1 - 1e-9)


def test_heterotrain_is_within_two_percent_after_one_epoch() -> None:
    """With linear times and noise, for ten seeds."""
    scenario = a_scenario(batch_samples=1200, workload=a_workload(epoch_samples=60_000))
    truth = GroundTruth(scenario)
    workers = [
        Worker(name=f"{g.pool}-{i}", pool=g.pool, gpu=g.gpu, index=i) for g in scenario.groups for i in range(g.count)
    ]
    best = truth.optimum(workers, 1200, 0.0)
    assert best is not None
    for seed in range(10):
        periods = simulate(scenario, HeterotrainPolicy(), seed=seed).periods
        assert periods[0].planned_s > 1.5 * best.step_s
        assert periods[1].planned_s <= 1.02 * best.step_s


def test_scenarios_that_contradict_themselves_are_refused() -> None:
    """The message has the contradiction."""
    with pytest.raises(ValueError, match="was not measured on h100, only on fast, slow"):
        simulate(a_scenario(groups=(Group(pool="x", gpu="h100", count=1),)), Even(), seed=1)
    with pytest.raises(ValueError, match="a slowdown names the pool y"):
        simulate(a_scenario(slowdowns=(Slowdown(pool="y", from_s=0, until_s=1, ratio=2),)), Even(), seed=1)
    with pytest.raises(ValueError, match="never ends"):
        simulate(a_scenario(workload=a_workload(target_steps=0.0), end_epochs=0), Even(), seed=1)


@pytest.mark.parametrize("correlation", [0.0, 0.8])
def test_deviates_have_the_scenario_s_correlation(correlation: float) -> None:
    """For any number of steps drawn at once, moments and the correlation at two distances are those of the process."""
    truth = GroundTruth(a_scenario(noise=Noise(variation=0.1, correlation=correlation)))
    rng, drawn, before_W = np.random.default_rng(2), [], np.full(4, np.nan)
    for steps in (1, 7, 500) * 40:
        drawn.append(truth.deviates(before_W, steps, rng))
        before_W = drawn[-1][-1]
    deviate_NW = np.concatenate(drawn)
    assert float(deviate_NW.mean()) == pytest.approx(0.0, abs=0.05)
    assert float(deviate_NW.var()) == pytest.approx(1.0, abs=0.05)
    for apart in (1, 3):
        found = float((deviate_NW[apart:] * deviate_NW[:-apart]).mean())
        assert found == pytest.approx(correlation**apart, abs=0.03)
    between = np.corrcoef(deviate_NW.T) - np.eye(4)
    assert float(np.abs(between).max()) < 0.05


def test_slow_phases_have_the_length_and_the_part_of_a_chain_of_two_states() -> None:
    """Closed form: a part ``a / (a + b)`` of steps is slow, in runs of ``1 / b``, however many are drawn at once."""
    truth = GroundTruth(a_scenario(noise=Noise(phase_probability=1 / 90, phase_steps=30.0)))
    rng, drawn, before_W = np.random.default_rng(3), [], np.zeros(8, dtype=bool)
    for steps in (1, 7, 500) * 60:
        drawn.append(truth.phases(before_W, steps, rng))
        before_W = drawn[-1][-1]
    slow_NW = np.concatenate(drawn)
    begins = (slow_NW[1:] & ~slow_NW[:-1]).sum()
    assert float(slow_NW.mean()) == pytest.approx(0.25, abs=0.02)
    assert float(slow_NW.sum() / begins) == pytest.approx(30.0, rel=0.06)
    assert not GroundTruth(a_scenario()).phases(before_W, 50, rng).any()


def test_a_heavy_tail_and_phases_lengthen_the_run_by_their_means() -> None:
    """One worker alone takes its own time: ``1 + p (r k / (k - 1) - 1)``, and ``1 + (r - 1) a / (a + b)``."""
    groups = (Group(pool="fast", gpu="fast", count=1),)

    def end_s(noise: Noise) -> float:
        return simulate(a_scenario(groups=groups, noise=noise, end_epochs=120), Even(), seed=4).end_s

    usual_s = end_s(Noise(variation=0.0))
    tail = Noise(variation=0.0, hiccup_probability=0.2, hiccup_ratio=2.0, hiccup_index=5.0)
    assert end_s(tail) / usual_s == pytest.approx(1 + 0.2 * (2 * 5 / 4 - 1), rel=0.03)
    phases = Noise(variation=0.0, phase_probability=0.05, phase_steps=20.0, phase_ratio=1.5)
    assert end_s(phases) / usual_s == pytest.approx(1.25, rel=0.03)
