"""The input and the decision of a policy, and the published choice of an adaptive batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from heterotrain_planner.goodput import LEAST_GAIN, candidate_batches, statistical_efficiency
from heterotrain_planner.perf.counters import Observation
from heterotrain_planner.perf.merge import merge_old


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSlot:
    """One member, as known before any measurement.

    Attributes:
        member: its name, as in its observations.
        pool: members of one pool have the same hardware.
        memory_samples: largest micro-batch that fits.
    """

    member: str
    pool: str
    memory_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The input of a policy at a boundary or a change of members.

    Attributes:
        slots: members by rank.
        changed: whether the members differ from those of the last call.
        observations: by member, oldest first, from scrapes only.
        noise_samples: the gradient noise scale; every policy gets the true one.
        batch_samples: the scenario's batch.
        adaptive: whether the batch may be chosen.
        base_batch, most_batch: limits of the batch.
        boundary: number of boundaries so far.
        min_gain_ratio: least gain for which shares change (``planning.shares``).
        may_probe: whether shares may vary to learn speeds.
    """

    slots: tuple[MemberSlot, ...]
    changed: bool
    observations: Mapping[str, Sequence[Observation]]
    noise_samples: float
    batch_samples: int
    adaptive: bool
    base_batch: int
    most_batch: int
    boundary: int
    min_gain_ratio: float
    may_probe: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyDecision:
    """The decision until the next call.

    Attributes:
        batch_samples: global batch.
        shares: by rank; they sum to the batch.
        probe: share vectors for the first steps of an epoch, in turn.
        probe_steps: steps for each of them.
        predicted_step_s: predicted step time with ``shares``; ``None`` without a prediction.
        reason: one sentence.
    """

    batch_samples: int
    shares: tuple[int, ...]
    probe: tuple[tuple[int, ...], ...] = ()
    probe_steps: int = 0
    predicted_step_s: float | None = None
    reason: str = ""


class Policy(Protocol):
    """A way to divide the batch, with its state."""

    name: str
    restarts: bool
    """Whether the job checkpoints and restarts at a change of members."""

    def decide(self, view: View) -> PolicyDecision:
        """Return the decision for this input."""
        ...


@dataclass(slots=True)
class ObservationHistory:
    """Observations by member, merged as in the operator."""

    by_member: dict[str, tuple[Observation, ...]] = field(default_factory=dict)

    def add(self, observations: Sequence[Observation]) -> None:
        """Add the observations of one scrape."""
        fresh: dict[str, list[Observation]] = {}
        for observation in observations:
            fresh.setdefault(observation.member, []).append(observation)
        for member, found in fresh.items():
            self.by_member[member] = merge_old([*self.by_member.get(member, ()), *found])

    def of(self, members: Sequence[str]) -> dict[str, tuple[Observation, ...]]:
        """Return the observations of these members."""
        return {member: self.by_member[member] for member in members if member in self.by_member}


def batches(view: View, current: int) -> tuple[int, ...]:
    """Return the candidates for an adaptive batch: a geometric series and the current one."""
    least = max(view.base_batch, len(view.slots))
    return candidate_batches(least=least, most=max(view.most_batch, least), also=(current,))


def best_batch(step_s: Mapping[int, float], current: int, view: View) -> int:
    """Return the batch with the best goodput, or the current one if the gain is small (AdaptDL's hysteresis)."""

    def goodput(batch: int) -> float:
        worth = statistical_efficiency(batch, base_samples=view.base_batch, noise_samples=view.noise_samples)
        return batch / step_s[batch] * worth

    best = max(step_s, key=lambda batch: (goodput(batch), -batch), default=current)
    if best not in step_s or (current in step_s and goodput(best) < (1 + LEAST_GAIN) * goodput(current)):
        return current
    return best
