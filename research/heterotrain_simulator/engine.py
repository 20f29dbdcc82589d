"""The discrete-event loop: steps, scrapes, boundaries and changes of members in simulated time.

All steps between two events are drawn at once, so an hour of training takes milliseconds. Events are a scrape, a
boundary (the policy decides again), a change of members (the step in flight is lost and repeated; the policy decides at
once), the begin or end of a slowdown, and the end. Legend: ``N`` steps, ``W`` ranks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from heterotrain_core.split.balance import in_proportion
from heterotrain_planner.planning.boundary import steps_to_boundary
from numpy.typing import NDArray

from heterotrain_simulator.accounting import Accounting
from heterotrain_simulator.convergence import noise_scale
from heterotrain_simulator.counters import SimulatedTelemetry
from heterotrain_simulator.ground_truth import GroundTruth, Worker
from heterotrain_simulator.policy import MemberSlot, ObservationHistory, Policy, PolicyDecision, View
from heterotrain_simulator.result import RunResult
from heterotrain_simulator.scenario import Scenario, problems

Floats = NDArray[np.float64]

_MOST_STEPS_AT_ONCE = 512
_SCRAPES_PER_EPOCH = 8
"""Most simulated scrapes in each epoch; more of them add no information within an epoch."""


def simulate(
    scenario: Scenario, policy: Policy, *, seed: int, report: Callable[[float], None] | None = None
) -> RunResult:
    """Run one policy through a scenario until the target, the last epoch or the time limit.

    Args:
        scenario: the job, the cluster and their events.
        policy: a new one; it keeps state.
        seed: of all random draws; one seed gives the same workers the same draws under every policy.
        report: called now and then with the completed fraction of the run, in [0, 1].

    Raises:
        ValueError: the scenario contradicts itself (see ``scenario.problems``) or never ends.
    """
    if found := problems(scenario):
        raise ValueError(f"scenario {scenario.name}: {'; '.join(found)}")
    if not (scenario.end_s or scenario.end_epochs or scenario.workload.target_steps):
        raise ValueError(f"scenario {scenario.name} never ends: give it an end_s")
    run = _Run(scenario=scenario, policy=policy, rng=np.random.default_rng(seed))
    run.prepare()
    while not run.done:
        run.advance()
        if report is not None:
            report(run.fraction_done)
    return run.result()


@dataclass(frozen=True, slots=True, order=True)
class _Event:
    at_s: float
    order: int
    pool: str = ""
    lost: int = 0
    joined: int = 0


@dataclass(slots=True)
class _Run:
    scenario: Scenario
    policy: Policy
    rng: np.random.Generator
    truth: GroundTruth = field(init=False)
    accounting: Accounting = field(init=False)
    telemetry: SimulatedTelemetry = field(default_factory=SimulatedTelemetry)
    history: ObservationHistory = field(default_factory=ObservationHistory)
    workers: list[Worker] = field(default_factory=list)
    started: dict[str, int] = field(default_factory=dict)
    last_deviate: dict[str, float] = field(default_factory=dict)
    in_phase: set[str] = field(default_factory=set)
    events: list[_Event] = field(default_factory=list)
    decision: PolicyDecision | None = None
    scraped_s: float = 0.0
    epoch: int = 0
    epoch_began_s: float = 0.0
    epoch_s: float = 0.0
    done_samples: int = 0
    epoch_steps: int = 0
    boundary_steps: int = 0
    kept_steps: int = 0
    kept_s: float = 0.0
    boundaries: int = 0
    ended: bool = False

    def prepare(self) -> None:
        """Place the first workers and queue all events."""
        self.truth = GroundTruth(self.scenario)
        prices = {group.pool: group.price_per_hour for group in self.scenario.groups}
        self.accounting = Accounting(workload=self.scenario.workload, truth=self.truth, prices=prices)
        for group in self.scenario.groups:
            self._join(group.pool, group.count)
        for order, change in enumerate(self.scenario.changes):
            if change.lost:
                heapq.heappush(self.events, _Event(change.at_s, order, change.pool, lost=change.lost))
            if change.joined:
                ready_s = change.at_s + self.scenario.pauses.start_s
                heapq.heappush(self.events, _Event(ready_s, order, change.pool, joined=change.joined))
        for slow in self.scenario.slowdowns:
            for at_s in (slow.from_s, slow.until_s):
                if math.isfinite(at_s) and at_s > 0:
                    heapq.heappush(self.events, _Event(at_s, -1))
        if self.workers:
            self._decide(changed=True)

    @property
    def done(self) -> bool:
        """Whether the run is over."""
        return self.ended or self.accounting.target_s is not None or 0 < self.scenario.end_epochs <= self.epoch

    @property
    def fraction_done(self) -> float:
        """Completed fraction of the run."""
        ways = [
            self.accounting.progress / self.scenario.workload.target_steps
            if self.scenario.workload.target_steps
            else 0.0
        ]
        if self.scenario.end_epochs:
            ways.append(
                (self.epoch + self.done_samples / self.scenario.workload.epoch_samples) / self.scenario.end_epochs
            )
        if self.scenario.end_s:
            ways.append(self.accounting.now_s / self.scenario.end_s)
        return min(1.0, max(ways))

    def advance(self) -> None:
        """Apply due events, or train up to the next event."""
        limit_s = self.scenario.end_s or math.inf
        if self.accounting.now_s >= limit_s:
            self._close()
            self.ended = True
        elif self.events and self.events[0].at_s <= self.accounting.now_s:
            self._apply_events()
        elif self.workers:
            self._train(limit_s)
        else:
            event_s = min(self.events[0].at_s if self.events else math.inf, limit_s)
            if math.isinf(event_s):
                self.ended = True  # no worker is left, and none will join
                return
            self.accounting.idle(event_s - self.accounting.now_s)

    def _train(self, limit_s: float) -> None:
        """Make steps until the next scrape, boundary or event.

        A loss and the time limit abort the step in flight; all other events wait for it.
        """
        shares, is_probe, most = self._next_shares()
        scrape_s = max(self.scenario.scrape_s, self.epoch_s / _SCRAPES_PER_EPOCH)
        event = self.events[0] if self.events else None
        cut_s = min(event.at_s, limit_s) if event is not None and event.lost else limit_s
        until_s = min(self.scraped_s + scrape_s, event.at_s if event is not None else math.inf)
        times = [self.truth.times(w.gpu, share) for w, share in zip(self.workers, shares, strict=True)]
        before_W = np.array([self.last_deviate.get(worker.name, math.nan) for worker in self.workers])
        deviate_NW = self.truth.deviates(before_W, most, self.rng)
        phase_W = np.array([worker.name in self.in_phase for worker in self.workers])
        phase_NW = self.truth.phases(phase_W, most, self.rng)
        factor_NW = self.truth.factors(self.workers, deviate_NW, phase_NW, self.accounting.now_s, self.rng)
        finish_N = self.truth.steps_s(times, factor_NW)
        ends_N = self.accounting.now_s + np.cumsum(finish_N)
        whole = int(np.searchsorted(ends_N, cut_s, side="right"))
        count = min(whole, int(np.searchsorted(ends_N, until_s, side="left")) + 1)
        if count:
            self.last_deviate.update(
                zip((worker.name for worker in self.workers), deviate_NW[count - 1].tolist(), strict=True)
            )
            self.in_phase = {w.name for w, slow in zip(self.workers, phase_NW[count - 1], strict=True) if slow}
            self._commit(shares, factor_NW[:count], finish_N[:count], is_probe=is_probe)
        if count == whole < most:
            self._lose_step_in_flight(cut_s, lost=event is not None and cut_s == event.at_s)
        if self.accounting.now_s >= self.scraped_s + scrape_s:
            self.history.add(self.telemetry.scrape(self.accounting.now_s))
            self.scraped_s = self.accounting.now_s
        self._maybe_boundary()

    def _next_shares(self) -> tuple[tuple[int, ...], bool, int]:
        """Return the next steps' shares, whether they are a probe's, and their number of steps."""
        decision = self._current_decision
        left = self.scenario.workload.epoch_samples - self.done_samples
        batch = decision.batch_samples
        if left < batch:
            return in_proportion(left, decision.shares), True, 1
        most = min(left // batch, _MOST_STEPS_AT_ONCE)
        if every := self._steps_to_boundary():
            most = min(most, every - self.boundary_steps)
        turn, at = divmod(self.epoch_steps, decision.probe_steps) if decision.probe_steps else (0, 0)
        if turn < len(decision.probe):
            return decision.probe[turn], True, min(most, decision.probe_steps - at)
        return decision.shares, False, most

    def _commit(self, shares: Sequence[int], factor_NW: Floats, finish_N: Floats, *, is_probe: bool) -> None:
        count = len(finish_N)
        ranks = len(self.workers)
        transfer_s_K = self.truth.transfer_s(ranks)
        bucket_s = (float(transfer_s_K[:-1].sum()), float(transfer_s_K[-1])) if ranks > 1 else None
        fraction_NW = self.truth.first_bucket_fractions(count, ranks, self.rng)
        for rank, worker in enumerate(self.workers):
            memory = self.truth.memory_samples(worker.gpu)
            self.telemetry.record(
                worker.name,
                share=shares[rank],
                micro_batch=min(memory, shares[rank]),
                times=self.truth.times(worker.gpu, shares[rank]),
                factor_N=factor_NW[:, rank],
                finish_N=finish_N,
                fraction_N=fraction_NW[:, rank],
                bucket_s=bucket_s,
            )
        batch = sum(shares)
        self.accounting.train(self.workers, batch, finish_N, is_probe=is_probe)
        self.done_samples += count * batch
        self.epoch_steps += count
        self.boundary_steps += count
        self.kept_steps += count
        self.kept_s += float(finish_N.sum())

    def _steps_to_boundary(self) -> int:
        """Return the steps between two boundaries now, 0 for none but the ends of epochs."""
        if self.scenario.boundary_steps is not None:
            return self.scenario.boundary_steps
        steps = self.kept_steps
        return steps_to_boundary(steps, self.kept_s / steps if steps else 0.0)

    def _maybe_boundary(self) -> None:
        epoch_over = self.done_samples >= self.scenario.workload.epoch_samples
        if epoch_over:
            self.epoch += 1
            self.epoch_s = self.accounting.now_s - self.epoch_began_s
            self.done_samples = self.epoch_steps = 0
            self.epoch_began_s = self.accounting.now_s
        if epoch_over or 0 < self._steps_to_boundary() <= self.boundary_steps:
            self.boundary_steps = 0
            self.boundaries += 1
            if self.done:
                self._close()
            else:
                self._decide(changed=False)
        elif self.done:
            self._close()

    def _apply_events(self) -> None:
        """Apply all due events; simultaneous changes of members become one."""
        gone: set[str] = set()
        joined: list[tuple[str, int]] = []
        while self.events and self.events[0].at_s <= self.accounting.now_s:
            event = heapq.heappop(self.events)
            left = [w.name for w in self.workers if w.pool == event.pool and w.name not in gone]
            gone.update(left[: event.lost])
            if event.joined:
                joined.append((event.pool, event.joined))
        if not gone and not joined:
            return  # begin or end of a slowdown: only the draws change
        if self.workers:
            self._close()
            self.accounting.changes += 1
            self._pause(lost=bool(gone))
        self.telemetry.forget(sorted(gone))
        self.workers = [w for w in self.workers if w.name not in gone]
        for pool, count in joined:
            self._join(pool, count)
        if self.workers:
            self._decide(changed=True)
        else:
            self.decision = None

    def _pause(self, *, lost: bool) -> None:
        pauses = self.scenario.pauses
        pause_s = pauses.loss_s if lost else pauses.join_s
        if self.policy.restarts:
            pause_s = pauses.restart_s
        self.accounting.lose(self.workers, pause_s)

    def _lose_step_in_flight(self, at_s: float, *, lost: bool) -> None:
        """Lose the step in flight; after a lost worker it is repeated, at the time limit it is not."""
        if lost:
            self.accounting.repeated_steps += 1
        self.accounting.lose(self.workers, at_s - self.accounting.now_s)

    def _join(self, pool: str, count: int) -> None:
        gpu = next(group.gpu for group in self.scenario.groups if group.pool == pool)
        for _ in range(count):
            index = self.started.get(pool, 0)
            self.started[pool] = index + 1
            self.workers.append(Worker(name=f"{pool}-{index}", pool=pool, gpu=gpu, index=index))

    def _decide(self, *, changed: bool) -> None:
        """Call the policy and begin a new period."""
        self._close()
        workload = self.scenario.workload
        view = View(
            slots=tuple(
                MemberSlot(member=w.name, pool=w.pool, memory_samples=self.truth.memory_samples(w.gpu))
                for w in self.workers
            ),
            changed=changed,
            observations=self.history.of([w.name for w in self.workers]),
            noise_samples=noise_scale(workload, self.accounting.progress),
            batch_samples=max(self.scenario.batch_samples, len(self.workers)),
            adaptive=self.scenario.adaptive,
            base_batch=workload.base_batch,
            most_batch=min(workload.most_batch, workload.epoch_samples),
            boundary=self.boundaries,
            may_probe=self.scenario.boundary_steps is not None,
            min_gain_ratio=self.scenario.min_gain_ratio,
        )
        before, self.decision = self.decision, self.policy.decide(view)
        if changed or before is None or before.shares != self.decision.shares:
            self.kept_steps, self.kept_s = 0, 0.0
        self.accounting.open_period(self.epoch)

    def _close(self) -> None:
        """End the current period, if it has any step."""
        self.accounting.close_period(self.workers, self.decision, self.epoch)

    @property
    def _current_decision(self) -> PolicyDecision:
        assert self.decision is not None  # noqa: S101  # with workers there is a decision
        return self.decision

    def result(self) -> RunResult:
        """Return the result of the run."""
        return self.accounting.result(self.policy.name, self.epoch)
