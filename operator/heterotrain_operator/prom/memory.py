"""What is remembered of one job's telemetry from scrape to scrape. Pure: it is told the time.

Losing it costs nothing but detail: counters are sums since each process began, so the first read after a restart of the
operator brings one observation for each shape that is still exported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from heterotrain_core.perf.condense import condense
from heterotrain_core.perf.samples import CounterKey, Counters, Observation, observe

from heterotrain_operator.prom.queries import Snapshot, counter_name
from heterotrain_operator.world.telemetry import MemberId, Rates, Telemetry

RATE_WINDOW_S = 30.0
FORGET_S = 600.0
"""A member that was not scraped for so long is forgotten; before, it may just be that Prometheus was restarted."""


class JobTelemetry:
    """One job's telemetry."""

    def __init__(self) -> None:
        self._counters: dict[CounterKey, Counters] = {}
        self._observations: dict[MemberId, tuple[Observation, ...]] = {}
        self._committed: deque[tuple[float, int]] = deque()
        self._scraped_s: dict[MemberId, float] = {}
        self._times: Mapping[MemberId, float] = {}
        self.telemetry = Telemetry()

    def take(self, snapshot: Snapshot, times: Mapping[MemberId, float]) -> bool:
        """Take what a read brought; tell whether there was anything new in it.

        An empty read (Prometheus was restarted, or does not reach the pods) takes nothing of what is known away.
        """
        if times == self._times and snapshot.gauges == self.telemetry.gauges:
            return False
        self._times = dict(times)
        newest_s = max([self.telemetry.newest_sample_s, *times.values()])
        names = {counter_name(member): member for member in snapshot.gauges}
        for found in observe(self._counters, snapshot.counters, ended_s=newest_s):
            member = names[found.member]
            self._observations[member] = condense([*self._observations.get(member, ()), found])
        self._counters.update(snapshot.counters)
        self._scraped_s.update(times)
        self._forget(newest_s)
        self.telemetry = replace(
            self.telemetry,
            newest_sample_s=newest_s,
            gauges=snapshot.gauges,
            rates=self._rates(snapshot, newest_s),
            observations=dict(self._observations),
            sequence=self.telemetry.sequence + 1,
        )
        return True

    def _forget(self, newest_s: float) -> None:
        old = {member for member, scraped_s in self._scraped_s.items() if newest_s - scraped_s > FORGET_S}
        names = {counter_name(member) for member in old}
        for member in old:
            del self._scraped_s[member]
            self._observations.pop(member, None)
        if names:
            self._counters = {key: counters for key, counters in self._counters.items() if key.member not in names}

    def judge(self, *, reason: str, problem: str) -> bool:
        """Set what is wrong with telemetry (an empty ``problem`` for nothing); tell whether that changed."""
        changed = (self.telemetry.reason, bool(self.telemetry.problem)) != (reason, bool(problem))
        self.telemetry = replace(self.telemetry, reason=reason, problem=problem)
        return changed

    def _rates(self, snapshot: Snapshot, now_s: float) -> Rates:
        samples = max(
            (g.samples_committed for g in snapshot.gauges.values() if g.samples_committed is not None), default=None
        )
        history = self._committed
        if samples is not None and (not history or samples != history[-1][1]):
            if history and samples < history[-1][1]:
                history.clear()  # resumed from a checkpoint: what was lost is no negative progress
            history.append((now_s, samples))
        while len(history) > 1 and now_s - history[0][0] > RATE_WINDOW_S:
            history.popleft()
        rate = None
        if len(history) > 1 and now_s - history[-1][0] <= RATE_WINDOW_S and history[-1][0] > history[0][0]:
            rate = (history[-1][1] - history[0][1]) / (history[-1][0] - history[0][0])
        step_s, steps = 0.0, 0
        solo: dict[MemberId, float] = {}
        for member, found in self._observations.items():
            if member not in snapshot.gauges:
                continue
            recent = [o for o in found if now_s - o.ended_s <= RATE_WINDOW_S and not o.warm_up] or found[-1:]
            step_s += sum(o.step.mean * o.steps for o in recent if o.step)
            steps += sum(o.steps for o in recent if o.step)
            own_s = sum(o.compute.mean * o.steps for o in recent if o.compute)
            done = sum(o.share_samples * o.steps for o in recent if o.compute)
            if own_s > 0:
                solo[member] = done / own_s
        return Rates(samples_per_s=rate, step_s=step_s / steps if steps else None, solo_samples_per_s=solo)
