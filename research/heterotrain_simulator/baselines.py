"""Baseline policies: even shares and shares in proportion to speed, of a fixed and of an adaptive batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heterotrain_core.contract.plan import CommunicationTime
from heterotrain_core.split.balance import Split, evaluate, evenly, in_proportion
from heterotrain_core.split.member import SplitMember
from heterotrain_planner.perf.exchange import fit_exchange
from heterotrain_planner.perf.fit import fit_member

from heterotrain_simulator.policy import PolicyDecision, View, batches, best_batch

MOST_GROWTH = 2
"""Factor on the batch within one decision of ``AdaptiveProportional``."""


@dataclass(slots=True)
class Even:
    """Plain distributed data parallel: the scenario's batch in even shares throughout."""

    name: str = "even"
    restarts: bool = True

    def decide(self, view: View) -> PolicyDecision:
        """Return even shares."""
        shares = evenly(view.batch_samples, len(view.slots))
        return PolicyDecision(batch_samples=view.batch_samples, shares=shares, reason="even shares")


@dataclass(slots=True)
class AdaptiveEven:
    """Even shares of a batch chosen for goodput, as AdaptDL does (Qiao et al., "Pollux", OSDI 2021).

    AdaptDL fits one curve to rank 0 and assumes that all ranks are alike. Here it gets heterotrain's fits of every
    rank, and so the true time of an even step: an advantage over its own code on mixed GPUs.
    """

    name: str = "adaptive-even"
    restarts: bool = True
    batch_samples: int = 0

    def decide(self, view: View) -> PolicyDecision:
        """Return even shares of the batch with the best goodput."""
        self.batch_samples = max(self.batch_samples or view.batch_samples, len(view.slots))
        members = fitted(view)
        predicted = None
        if members and view.adaptive:
            communication = exchange(view)
            times = {b: _even_s(b, members, communication) for b in batches(view, self.batch_samples)}
            known = {b: step_s for b, step_s in times.items() if step_s is not None}
            self.batch_samples = best_batch(known, self.batch_samples, view)
            predicted = known.get(self.batch_samples)
        return PolicyDecision(
            batch_samples=self.batch_samples,
            shares=evenly(self.batch_samples, len(view.slots)),
            predicted_step_s=predicted,
            reason="even shares of the batch with the best goodput",
        )


@dataclass(slots=True)
class Proportional:
    """Shares in proportion to measured speed, as LB-BSP does (Chen et al., SoCC 2020); a fixed batch.

    A member's speed is its share over its compute seconds since the last boundary. Without a model of fixed costs and
    the exchange, it approaches equal compute times boundary by boundary.
    """

    name: str = "proportional"
    restarts: bool = True
    shares: tuple[int, ...] = ()

    def decide(self, view: View) -> PolicyDecision:
        """Return shares in proportion to the newest speeds."""
        if view.changed or not self.shares:
            self.shares = evenly(view.batch_samples, len(view.slots))
        speeds = [_newest_speed(view, slot.member) for slot in view.slots]
        known = [speed for speed in speeds if speed]
        if known and not view.changed:
            middle = sorted(known)[len(known) // 2]
            wanted = [speed or middle for speed in speeds]
            scale = 2**40 / max(wanted)
            self.shares = at_least_one(in_proportion(view.batch_samples, [round(s * scale) for s in wanted]))
        return PolicyDecision(
            batch_samples=view.batch_samples, shares=self.shares, reason="shares in proportion to speed"
        )


@dataclass(slots=True)
class AdaptiveProportional:
    """AdaptDL's batch with LB-BSP's shares: no such system was published, but both parts are.

    The batch has the best goodput when it is shared in proportion to the newest speeds, as judged by heterotrain's fits
    of every rank. It grows at most to twice of what was seen, as heterotrain's does.
    """

    name: str = "adaptive-proportional"
    restarts: bool = True
    batch_samples: int = 0

    def decide(self, view: View) -> PolicyDecision:
        """Return proportional shares of the batch with the best goodput."""
        self.batch_samples = max(self.batch_samples or view.batch_samples, len(view.slots))
        speeds = [_newest_speed(view, slot.member) for slot in view.slots]
        known = [speed for speed in speeds if speed]
        if view.changed or len(known) < len(speeds):
            return PolicyDecision(
                batch_samples=self.batch_samples,
                shares=evenly(self.batch_samples, len(view.slots)),
                reason="even shares until every speed is known",
            )
        scale = 2**40 / max(known)
        weights = [round(speed * scale) for speed in known]
        members = fitted(view)
        predicted = None
        if members and view.adaptive:
            communication = exchange(view)
            times: dict[int, float] = {}
            for batch in batches(view, self.batch_samples):
                split = evaluate(at_least_one(in_proportion(batch, weights)), members, communication=communication)
                if isinstance(split, Split):
                    times[batch] = split.step_s
            chosen = min(best_batch(times, self.batch_samples, view), MOST_GROWTH * self.batch_samples)
            predicted = times.get(chosen)
            self.batch_samples = chosen
        return PolicyDecision(
            batch_samples=self.batch_samples,
            shares=at_least_one(in_proportion(self.batch_samples, weights)),
            predicted_step_s=predicted,
            reason="shares in proportion to speed, of the batch with the best goodput",
        )


def fitted(view: View) -> list[SplitMember]:
    """Return a fitted member for each slot, empty while a slot has no model."""
    found = []
    for slot in view.slots:
        model = fit_member(view.observations.get(slot.member, ()))
        if model.compute is None:
            return []
        found.append(SplitMember(compute=model.compute, micro_cap_samples=slot.memory_samples))
    return found


def exchange(view: View) -> CommunicationTime:
    """Return the fitted exchange of the present members, an empty one before the first measurement."""
    seen = [o for slot in view.slots for o in view.observations.get(slot.member, ())]
    return fit_exchange(seen).communication or CommunicationTime()


def _even_s(batch_samples: int, members: Sequence[SplitMember], communication: CommunicationTime) -> float | None:
    split = evaluate(evenly(batch_samples, len(members)), members, communication=communication)
    return split.step_s if isinstance(split, Split) else None


def _newest_speed(view: View, member: str) -> float | None:
    """Return samples per second of the member's newest share, over its latest observations of that share."""
    samples = seconds = 0.0
    share = None
    for observation in reversed(view.observations.get(member, ())):
        if observation.compute is None or (share is not None and observation.share_samples != share):
            break
        share = observation.share_samples
        samples += observation.share_samples * observation.steps
        seconds += observation.compute.mean * observation.steps
    return samples / seconds if seconds > 0 else None


def at_least_one(shares: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shares with every zero raised to one, taken from the largest."""
    raised = [max(1, share) for share in shares]
    for _ in range(sum(raised) - sum(shares)):
        raised[raised.index(max(raised))] -= 1
    return tuple(raised)
