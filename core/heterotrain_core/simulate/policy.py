"""What a policy sees, and what it orders; and the batches that adaptive policies choose from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from heterotrain_core.perf.samples import Observation
from heterotrain_core.simulate.convergence import efficiency

CANDIDATES = 50
"""Global batches that adaptive policies compare, in geometric steps."""
LEAST_GAIN = 1.05
"""Goodput has to grow by this factor before the batch changes (AdaptDL's hysteresis, which all adaptive policies use)."""
KEPT_OBSERVATIONS = 200
"""Newest observations of each member that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One member as policies know it before anything is measured.

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
    """What is known at a boundary or a change of members.

    Attributes:
        seats: members by rank.
        changed: whether the members are others than at the last call.
        observations: by member, oldest first, only what scrapes have brought.
        noise_samples: the gradient noise scale; every policy is told the true one.
        batch_samples: the scenario's batch.
        adaptive: whether the batch may be chosen.
        base_batch, most_batch: between which it may.
        boundary: how many boundaries have passed.
        min_gain_ratio: gain below which shares stay.
    """

    seats: tuple[Seat, ...]
    changed: bool
    observations: Mapping[str, Sequence[Observation]]
    noise_samples: float
    batch_samples: int
    adaptive: bool
    base_batch: int
    most_batch: int
    boundary: int
    min_gain_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What is to be done until the next call.

    Attributes:
        batch_samples: global batch.
        shares: by rank; they sum to the batch.
        probe: share vectors for the first steps of an epoch, in turn.
        probe_steps: steps for each of them.
        predicted_step_s: what the policy expects of ``shares``; ``None`` when it expects nothing.
        reason: why.
    """

    batch_samples: int
    shares: tuple[int, ...]
    probe: tuple[tuple[int, ...], ...] = ()
    probe_steps: int = 0
    predicted_step_s: float | None = None
    reason: str = ""


class Policy(Protocol):
    """A way to divide the batch, with what it remembers."""

    name: str
    restarts: bool
    """Whether a change of members costs a checkpoint and a restart."""

    def decide(self, view: View) -> Orders:
        """Return the orders for what is known."""
        ...


@dataclass(slots=True)
class Memory:
    """Observations by member, the newest ``KEPT_OBSERVATIONS`` of each."""

    by_member: dict[str, list[Observation]] = field(default_factory=dict)

    def take(self, observations: Sequence[Observation]) -> None:
        """Add observations, oldest first."""
        for observation in observations:
            mine = self.by_member.setdefault(observation.member, [])
            mine.append(observation)
            del mine[:-KEPT_OBSERVATIONS]

    def of(self, members: Sequence[str]) -> dict[str, tuple[Observation, ...]]:
        """Return what is known of these members now."""
        return {member: tuple(self.by_member[member]) for member in members if member in self.by_member}


def candidates(view: View) -> tuple[int, ...]:
    """Return the global batches to compare: geometric from the least sensible to the largest allowed one."""
    low = max(view.base_batch, len(view.seats))
    high = max(view.most_batch, low)
    ratio = (high / low) ** (1 / (CANDIDATES - 1))
    return tuple(sorted({round(low * ratio**i) for i in range(CANDIDATES)}))


def goodput(batch_samples: int, step_s: float, view: View) -> float:
    """Return useful samples per second: throughput times what a sample of this batch is worth."""
    worth = efficiency(batch_samples, base_batch=view.base_batch, noise_samples=view.noise_samples)
    return batch_samples / step_s * worth
