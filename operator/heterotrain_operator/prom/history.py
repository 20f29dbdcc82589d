"""One job's telemetry from scrape to scrape. Pure: the caller passes the time.

Losing it loses only detail: counters are sums since each process began, so the first read after a restart of the
operator yields one observation for each shape that is still exported. Observations of members that have left are kept
for their successors in the same pool.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import replace
from statistics import median

from heterotrain_planner.perf.counters import (
    SHORTEST_STEP_S,
    CounterKey,
    Counters,
    Observation,
    observe,
    usable,
)
from heterotrain_planner.perf.merge import merge_old
from heterotrain_planner.perf.packed import PackedObservations
from heterotrain_planner.planning.kept_speed import KeptSpeed, as_observed, is_refuted

from heterotrain_operator.cluster_state.links import MeasuredLink, by_pair, settled
from heterotrain_operator.cluster_state.profiles import PoolProfile
from heterotrain_operator.cluster_state.telemetry import (
    ExchangeInForce,
    MemberId,
    Rates,
    StepsInForce,
    Sustained,
    Telemetry,
)
from heterotrain_operator.prom.loss_trend import LossTrend
from heterotrain_operator.prom.snapshot import JobSeries, counter_name

RATE_WINDOW_S = 30.0
"""Shortest window of rates; with a long scrape interval, it is ``RATE_SCRAPES`` of them."""
RATE_SCRAPES = 3
KEPT_GAPS = 4
"""Gaps between scrapes that are kept, to tell the configured interval from an outage."""
FORGET_S = 600.0
"""Seconds without a scrape after which a member has left; a shorter gap may be a restart of Prometheus."""
KEPT_FORMER = 4
"""Members of each pool that are kept after they left, the newest ones: a few are enough to describe the pool."""
KEPT_EXCHANGES = 64
"""Scrapes of which the time of the exchange is kept."""
KEPT_SHAPES = 1000
"""Shapes of each member whose counters are kept, although it no longer exports them."""


def _measured(found: Observation) -> bool:
    """Return whether the observation may be a measurement; too small a time would overflow as a divisor."""
    times = [phase.mean for phase in (found.compute, found.step) if phase is not None]
    return usable(found) and all(time_s == 0 or time_s >= SHORTEST_STEP_S for time_s in times)


class TelemetryHistory:
    """One job's telemetry and what it is computed from.

    Args:
        speeds: by pool, a speed from the job's status; used until a member of the pool is observed.
    """

    def __init__(self, speeds: Mapping[str, KeptSpeed] | None = None) -> None:
        self._persisted: Mapping[str, KeptSpeed] = speeds or {}
        self._earlier: Mapping[str, KeptSpeed] = {}
        self._counters: dict[CounterKey, Counters] = {}
        self._observations: PackedObservations[MemberId] = PackedObservations()
        self._committed: deque[tuple[float, int]] = deque()
        self._generation_start: tuple[int, float, int] | None = None
        self._scraped_s: dict[MemberId, float] = {}
        self._gaps_s: deque[float] = deque(maxlen=KEPT_GAPS)
        self._times: Mapping[MemberId, float] = {}
        self._pools: dict[MemberId, str] = {}
        self._in_force: dict[MemberId, StepsInForce] = {}
        self._exchanges: deque[tuple[float, int]] = deque(maxlen=KEPT_EXCHANGES)
        self._exchanges_of = -1
        self._step: int | None = None
        self._losses = LossTrend()
        self.telemetry = Telemetry()

    def has_taken(self, times: Mapping[MemberId, float]) -> bool:
        """Return whether the scrapes of these times have been taken already."""
        return bool(times) and times == self._times

    def take(
        self,
        snapshot: JobSeries,
        times: Mapping[MemberId, float],
        *,
        pools: Mapping[str, str],
        recut: bool = False,
    ) -> bool:
        """Take the result of a read; return whether it contained anything new.

        An empty read (Prometheus was restarted, or does not reach the pods) removes nothing.

        Args:
            snapshot: the current values in Prometheus.
            times: when each member was last scraped.
            pools: by uid, the pool of each worker that has a pod now.
            recut: whether a rank computes another part of the model in each generation of the plan. Then observations
                of an earlier generation do not describe it any more.
        """
        news = snapshot.dropped != self.telemetry.dropped
        self.telemetry = replace(self.telemetry, dropped=snapshot.dropped)
        snapshot, times = self._without_older(snapshot, times)
        if times == self._times and snapshot.gauges == self.telemetry.gauges:
            return news
        self._times = dict(times)
        before_s = self.telemetry.newest_sample_s
        newest_s = max([before_s, *times.values()])
        interval_s = newest_s - before_s if before_s and newest_s > before_s else self.telemetry.scrape_interval_s
        self._pools |= {member: pools[member.worker_uid] for member in snapshot.gauges if member.worker_uid in pools}
        self._note_exchange(self._observe(snapshot, newest_s, recut=recut))
        self._store_counters(snapshot.counters)
        gaps_s = [at_s - self._scraped_s[member] for member, at_s in times.items() if member in self._scraped_s]
        if shortest_s := min((gap_s for gap_s in gaps_s if gap_s > 0), default=0.0):
            self._gaps_s.append(shortest_s)
        self._scraped_s.update(times)
        self._forget(newest_s)
        step = max((gauges.step for gauges in snapshot.gauges.values() if gauges.step is not None), default=None)
        commit_s = self.telemetry.commit_s
        if step != self._step or not commit_s:
            self._step, commit_s = step, newest_s
            self._losses = self._losses.after(snapshot.gauges.values())
        self.telemetry = replace(
            self.telemetry,
            commit_s=commit_s,
            newest_sample_s=newest_s,
            scrape_interval_s=interval_s,
            member_interval_s=min(self._gaps_s, default=None),
            gauges=snapshot.gauges,
            rates=self._rates(snapshot, newest_s),
            links=self._links(snapshot, set(pools.values())),
            in_force=dict(self._in_force),
            exchange=self._exchange(),
            loss_climb=self._losses.climb,
            sequence=self.telemetry.sequence + 1,
        )
        self._show_observations()
        return True

    def _observe(self, snapshot: JobSeries, newest_s: float, *, recut: bool) -> dict[int, Observation]:
        """Add what the counters show since the scrape before; return the first timed steps of each generation."""
        names = {counter_name(member): member for member in snapshot.gauges}
        in_another = self._in_another_generation(snapshot)
        moved = in_another if recut else frozenset()
        for member in moved:
            self._observations.discard(member)
        counting = self._counting_members(snapshot)
        timed: dict[int, Observation] = {}
        for found in observe(self._counters, snapshot.counters, ended_s=newest_s):
            if not _measured(found):
                continue
            member = names[found.member]
            if member in moved:
                continue  # a part of these steps is of the generation before
            if member in self._in_force and member not in in_another:
                found = replace(found, generation=self._in_force[member].version[0])  # noqa: PLW2901  # the same measurements, named
            self._observations.put(member, merge_old([*self._observations.get(member, ()), found]))
            if member in counting and found.step is not None and not found.warm_up:
                self._in_force[member] = self._in_force[member].after(found.share_samples, found.steps, found.step.mean)
                timed.setdefault(self._in_force[member].version[0], found)
        return timed

    def start_with(self, speeds: Mapping[str, KeptSpeed]) -> None:
        """Take the speeds of an earlier job by pool; each is used until members of its pool refute it."""
        self._earlier = speeds
        self._show_observations()

    def _show_observations(self) -> None:
        """Let telemetry have the job's own observations, and those that stand for speeds known from elsewhere."""
        since_s = self.telemetry.newest_sample_s - FORGET_S
        observed = [(pool, member) for member, pool in self._pools.items() if member in self._observations]
        refuted = {
            pool
            for pool, member in observed
            if pool in self._earlier and is_refuted(self._earlier[pool], self._observations.since(member, since_s))
        }
        self._earlier = {pool: speed for pool, speed in self._earlier.items() if pool not in refuted}
        pools = {pool for pool, _ in observed}
        speeds = {pool: speed for pool, speed in self._persisted.items() if pool not in pools} | self._earlier
        others = {MemberId(f"earlier-of-{pool}", 0): (pool, speed) for pool, speed in speeds.items()}
        self.telemetry = replace(
            self.telemetry,
            observations=self._observations.with_others(
                {member: as_observed(speed, pool) for member, (pool, speed) in others.items()}
            ),
            pools=self._pools | {member: pool for member, (pool, _) in others.items()},
        )

    def _links(self, snapshot: JobSeries, known: Collection[str]) -> dict[tuple[str, str], MeasuredLink]:
        """Return the links between pools; a pair that no member uses now keeps what was measured of it."""
        newest = by_pair(
            (self._pools[member], peer, link)
            for member, gauges in snapshot.gauges.items()
            if self._pools.get(member) in known
            for peer, link in gauges.links.items()
            if peer in known
        )
        before = self.telemetry.links
        return {**before, **{pair: settled(before.get(pair), link) for pair, link in newest.items()}}

    def _note_exchange(self, timed: Mapping[int, Observation]) -> None:
        """Note the exchange of the newest generation, as one of its members exports it: all have the same times."""
        newest = max(timed, default=-1)
        if newest < self._exchanges_of or newest < 0:
            return
        if newest > self._exchanges_of:
            self._exchanges.clear()
            self._exchanges_of = newest
        found = timed[newest]
        if found.bucket_steps and found.overlapped_s is not None and found.last_bucket_s is not None:
            self._exchanges.append((found.overlapped_s + found.last_bucket_s, found.bucket_steps))

    def _exchange(self) -> ExchangeInForce | None:
        if not self._exchanges:
            return None
        seconds = median(seconds for seconds, _ in self._exchanges)
        return ExchangeInForce(self._exchanges_of, seconds, sum(steps for _, steps in self._exchanges))

    def _store_counters(self, counters: Mapping[CounterKey, Counters]) -> None:
        """Store the newest counters; of a member with very many shapes, forget the oldest that it no longer exports."""
        self._counters.update(counters)
        number = Counter(key.member for key in self._counters)
        for key in [key for key in self._counters if number[key.member] > KEPT_SHAPES and key not in counters]:
            if number[key.member] > KEPT_SHAPES:
                number[key.member] -= 1
                del self._counters[key]

    def _without_older(
        self, snapshot: JobSeries, times: Mapping[MemberId, float]
    ) -> tuple[JobSeries, Mapping[MemberId, float]]:
        """Return the read with what is known of members whose scrape is older than the one already taken.

        One of several replicas of Prometheus may be a scrape behind, and its counters would look like a new process.
        After a longer way back, the clock was corrected.
        """
        older = {member for member, at_s in times.items() if 0 < self._scraped_s.get(member, 0.0) - at_s <= FORGET_S}
        older |= self._fallen(snapshot, times)
        if not older:
            return snapshot, times
        known = self.telemetry.gauges
        names = {counter_name(member) for member in older}
        return replace(
            snapshot,
            counters={key: counters for key, counters in snapshot.counters.items() if key.member not in names},
            gauges={
                member: known.get(member, gauges) if member in older else gauges
                for member, gauges in snapshot.gauges.items()
            },
        ), {member: self._scraped_s[member] if member in older else at_s for member, at_s in times.items()}

    def _fallen(self, snapshot: JobSeries, times: Mapping[MemberId, float]) -> set[MemberId]:
        """Return the members whose counters fell: no process counts backwards, and a new one has a new uid.

        Two reads may reach two replicas of Prometheus. A member without newer counters for ``FORGET_S`` is believed
        again.
        """
        fallen = {
            key.member
            for key, counters in snapshot.counters.items()
            if (known := self._counters.get(key)) is not None and counters.steps < known.steps
        }
        return {
            member
            for member in times
            if counter_name(member) in fallen and times[member] - self._scraped_s.get(member, 0.0) <= FORGET_S
        }

    def _in_another_generation(self, snapshot: JobSeries) -> frozenset[MemberId]:
        """Return the members whose generation in force has changed since the scrape before."""
        return frozenset(
            member
            for member, gauges in snapshot.gauges.items()
            if gauges.generation is not None
            and (member not in self._in_force or self._in_force[member].version[0] != gauges.generation)
        )

    def _counting_members(self, snapshot: JobSeries) -> set[MemberId]:
        """Return the members whose newest steps all belong to their plan in force.

        The first scrape with a new version also contains steps of the version before, so it only starts the count.
        """
        counting = set()
        for member, gauges in snapshot.gauges.items():
            if gauges.generation is None or gauges.revision is None:
                continue
            version = (gauges.generation, gauges.revision)
            if member in self._in_force and self._in_force[member].version == version:
                counting.add(member)
            else:
                self._in_force[member] = StepsInForce(version=version)
        return counting

    def _forget(self, newest_s: float) -> None:
        """Drop the counters of members that have left, and all but the newest members of each pool."""
        left = [member for member, scraped_s in self._scraped_s.items() if newest_s - scraped_s > FORGET_S]
        for member in left:
            self._in_force.pop(member, None)
        if names := {counter_name(member) for member in left}:
            self._counters = {key: counters for key, counters in self._counters.items() if key.member not in names}
        kept: dict[str, int] = {}
        for member in sorted(left, key=lambda member: -self._scraped_s[member]):
            pool = self._pools.get(member, "")
            kept[pool] = kept.get(pool, 0) + 1
            if not pool or kept[pool] > KEPT_FORMER:
                del self._scraped_s[member]
                self._observations.discard(member)
                self._pools.pop(member, None)

    def set_profile(self, pool: str, found: PoolProfile | str) -> None:
        """Take a pool's profile of the units, or the clause that says why the one that was read is of no use."""
        known = self.telemetry
        problems = {name: clause for name, clause in known.profile_problems.items() if name != pool}
        profiles = dict(known.profiles)
        if isinstance(found, str):
            problems[pool] = found
        else:
            profiles[pool] = found
        self.telemetry = replace(known, profiles=profiles, profile_problems=problems, sequence=known.sequence + 1)

    def forget_profiles(self) -> None:
        """Forget all profiles and links: the next workers may train another model, on other nodes."""
        self.telemetry = replace(self.telemetry, profiles={}, profile_problems={}, links={})

    def set_problem(self, *, reason: str, problem: str) -> bool:
        """Set what is wrong with telemetry, an empty ``problem`` for nothing; return whether that changed."""
        changed = (self.telemetry.reason, bool(self.telemetry.problem)) != (reason, bool(problem))
        self.telemetry = replace(self.telemetry, reason=reason, problem=problem)
        return changed

    def _sustained(self, snapshot: JobSeries, now_s: float) -> Sustained | None:
        """Return the newest generation's rate since the first scrape that showed it."""
        newest = max(snapshot.gauges.values(), key=lambda gauges: gauges.step or -1, default=None)
        if newest is None or newest.generation is None or newest.samples_committed is None:
            return None
        generation, samples = newest.generation, newest.samples_committed
        if (
            self._generation_start is None
            or self._generation_start[0] != generation
            or samples < self._generation_start[2]
        ):
            self._generation_start = (generation, now_s, samples)
        _, since_s, before = self._generation_start
        if now_s - since_s < RATE_WINDOW_S or samples == before:
            return None
        lasts_s = now_s - since_s
        return Sustained(generation, (samples - before) / lasts_s, lasts_s)

    def _rates(self, snapshot: JobSeries, now_s: float) -> Rates:
        samples = max(
            (g.samples_committed for g in snapshot.gauges.values() if g.samples_committed is not None), default=None
        )
        history = self._committed
        window_s = max(RATE_WINDOW_S, RATE_SCRAPES * min(self._gaps_s, default=0.0))
        if samples is not None and (not history or samples != history[-1][1]):
            if history and samples < history[-1][1]:
                history.clear()  # resumed from a checkpoint: lost samples are not negative progress
            history.append((now_s, samples))
        while len(history) > 1 and now_s - history[0][0] > window_s:
            history.popleft()
        rate = None
        if len(history) > 1 and now_s - history[-1][0] <= window_s and history[-1][0] > history[0][0]:
            rate = (history[-1][1] - history[0][1]) / (history[-1][0] - history[0][0])
        step_s, steps = 0.0, 0
        solo: dict[MemberId, float] = {}
        for member in self._observations:
            if member not in snapshot.gauges:
                continue
            found = self._observations.since(member, now_s - window_s)
            recent = [o for o in found if not o.warm_up] or found[-1:]
            step_s += sum(o.step.mean * o.steps for o in recent if o.step)
            steps += sum(o.steps for o in recent if o.step)
            own_s = sum(o.compute.mean * o.steps for o in recent if o.compute)
            done = sum(o.share_samples * o.steps for o in recent if o.compute)
            if own_s > 0:
                solo[member] = done / own_s
        return Rates(
            samples_per_s=rate,
            sustained=self._sustained(snapshot, now_s),
            step_s=step_s / steps if steps else None,
            solo_samples_per_s=solo,
        )
