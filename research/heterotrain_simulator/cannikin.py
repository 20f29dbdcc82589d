"""Cannikin as published (Nie et al., Middleware 2024): the same two-term model, with its own way of learning.

From the paper: even shares in the first epoch; shares in proportion to 1 / (seconds per sample) in the second; from the
third on, a least-squares line through each node's epoch means, gamma by inverse variance, T_comm by minimum over nodes,
and the optimal split of the two-term model. The paper solves its equal-finish conditions; heterotrain's exact split
gives the same optimum. An adaptive global batch has the best goodput of a table of candidates.

Added here: accumulation of shares beyond the memory, non-negative coefficients, optimal integer rounding, and a limit
to the newest ten epochs. A change of members restarts the learning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_core.split.balance import Split, balance, balance_many, evenly, in_proportion
from heterotrain_core.split.member import SplitMember
from heterotrain_planner.perf.counters import Observation

from heterotrain_simulator.baselines import at_least_one, exchange
from heterotrain_simulator.policy import PolicyDecision, View, batches, best_batch

_EPOCHS_KEPT = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mean:
    """One node's means over one epoch: samples, a(b) and P(b)."""

    samples: int
    before_s: float
    backward_s: float


@dataclass(slots=True)
class Cannikin:
    """The policy; the module docstring has its rules."""

    name: str = "cannikin"
    restarts: bool = True
    batch_samples: int = 0
    epochs: int = 0
    means: dict[str, list[_Mean]] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)
    shares: tuple[int, ...] = ()

    def decide(self, view: View) -> PolicyDecision:
        """Return the shares of the next epoch."""
        self.batch_samples = max(self.batch_samples or view.batch_samples, len(view.slots))
        if view.changed:
            self.epochs, self.shares = 0, evenly(self.batch_samples, len(view.slots))
        self._take(view)
        self.epochs += 1
        members = [self._member(slot.member, slot.memory_samples) for slot in view.slots]
        known = [member for member in members if member is not None]
        if len(known) == len(members):
            return self._optimal(known, view)
        paces = [self._pace(slot.member) for slot in view.slots]
        if self.epochs > 1 and all(pace is not None for pace in paces):
            scale = 2**40 * min(pace for pace in paces if pace is not None)
            wanted = [round(scale / pace) for pace in paces if pace is not None]
            self.shares = at_least_one(in_proportion(self.batch_samples, wanted))
        return PolicyDecision(batch_samples=self.batch_samples, shares=self.shares, reason="learning")

    def _take(self, view: View) -> None:
        """Add each member's means since the last call, by share."""
        for slot in view.slots:
            observations = list(view.observations.get(slot.member, ()))
            fresh = [o for o in observations if o.ended_s > self.seen.get(slot.member, -1.0)]
            if fresh:
                self.seen[slot.member] = fresh[-1].ended_s
            kept = self.means.setdefault(slot.member, [])
            kept.extend(_means(fresh))
            del kept[:-_EPOCHS_KEPT]

    def _pace(self, member: str) -> float | None:
        """Return the newest seconds per sample."""
        kept = self.means.get(member)
        return (kept[-1].before_s + kept[-1].backward_s) / kept[-1].samples if kept else None

    def _member(self, member: str, memory_samples: int) -> SplitMember | None:
        """Return the member's line, through the origin if both epochs had the same share."""
        kept = self.means.get(member, [])
        if self.epochs <= 2 or not kept:  # noqa: PLR2004  # two epochs of learning
            return None
        before = _line([(mean.samples, mean.before_s) for mean in kept])
        backward = _line([(mean.samples, mean.backward_s) for mean in kept])
        compute = ComputeTime(
            per_sample_s=before[0], fixed_s=before[1], backward_per_sample_s=backward[0], backward_fixed_s=backward[1]
        )
        return SplitMember(compute=compute, micro_cap_samples=memory_samples)

    def _optimal(self, members: Sequence[SplitMember], view: View) -> PolicyDecision:
        communication: CommunicationTime = exchange(view)
        if view.adaptive:
            compared = batches(view, self.batch_samples)
            splits = balance_many(compared, members, communication=communication)
            times = {b: split.step_s for b, split in zip(compared, splits, strict=True) if isinstance(split, Split)}
            self.batch_samples = best_batch(times, self.batch_samples, view)
        best = balance(self.batch_samples, members, communication=communication)
        if isinstance(best, Split):
            self.shares = best.shares
            return PolicyDecision(
                batch_samples=self.batch_samples,
                shares=best.shares,
                predicted_step_s=best.step_s,
                reason="optimal shares of the two-term model",
            )
        self.shares = evenly(self.batch_samples, len(members))
        return PolicyDecision(batch_samples=self.batch_samples, shares=self.shares, reason=best.reason)


def _means(observations: Sequence[Observation]) -> list[_Mean]:
    """Return means by share, in order of first appearance."""
    sums: dict[int, tuple[float, float, float]] = {}
    for o in observations:
        if o.compute is None or o.backward is None or o.share_samples < 1 or o.warm_up:
            continue
        steps, before_s, backward_s = sums.get(o.share_samples, (0.0, 0.0, 0.0))
        sums[o.share_samples] = (
            steps + o.steps,
            before_s + o.steps * (o.compute.mean - o.backward.mean),
            backward_s + o.steps * o.backward.mean,
        )
    return [
        _Mean(samples=share, before_s=before_s / steps, backward_s=backward_s / steps)
        for share, (steps, before_s, backward_s) in sums.items()
    ]


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the least-squares (slope, fixed part), negative values replaced by 0."""
    x_mean = sum(x for x, _ in points) / len(points)
    y_mean = sum(y for _, y in points) / len(points)
    spread = sum((x - x_mean) ** 2 for x, _ in points)
    if spread == 0:
        return y_mean / x_mean, 0.0
    slope = max(0.0, sum((x - x_mean) * (y - y_mean) for x, y in points) / spread)
    return slope, max(0.0, y_mean - slope * x_mean)
