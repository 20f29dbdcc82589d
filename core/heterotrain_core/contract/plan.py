"""The plan: the operator's current decision for one job, as a value.

Ordered by ``(generation, revision)``: the generation grows with every change of membership (a new process group), the
revision with every change of shares or batch (no rebuild). The symbols q, s, k, m, T_o, T_u, gamma are
those of the performance model (docs/mathematics.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from heterotrain_core.contract.choices import Choice

SCHEMA_VERSION = 2


class BoundaryKind(Choice):
    """When a new revision's shares may take effect."""

    EPOCH = "Epoch"
    STEPS = "Steps"
    NEVER = "Never"
    """Even shares for ever: the baseline."""


class Binding(Choice):
    """The constraint that keeps a member from a smaller step time."""

    COMPUTE = "Compute"
    COMMUNICATION = "Communication"
    MEMORY = "Memory"
    FLOOR = "Floor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """The boundary kind, and for ``STEPS`` the number of committed steps between boundaries (at least 1)."""

    kind: BoundaryKind = BoundaryKind.EPOCH
    every_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTime:
    """A member's own seconds for ``b`` samples: ``a(b) = q b + s`` before and after, ``P(b) = k b + m`` in backward.

    A share that is accumulated over ``M`` micro-batches pays ``s`` and ``m`` M times, but ``update_s`` once.

    Attributes:
        per_sample_s: q, load + forward seconds per sample.
        fixed_s: s, their fixed part.
        backward_per_sample_s: k.
        backward_fixed_s: m.
        update_s: the optimizer's seconds, once a step whatever the share.
    """

    per_sample_s: float
    fixed_s: float
    backward_per_sample_s: float
    backward_fixed_s: float
    update_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationTime:
    """The cluster's gradient exchange: T_o (overlappable seconds), T_u (last bucket's seconds), gamma in [0, 1]."""

    overlapped_s: float = 0.0
    last_bucket_s: float = 0.0
    gamma: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rank of the plan.

    Attributes:
        rank: position in the process group, 0 … world size − 1.
        worker: pod name; with ``local_rank`` it names the member.
        worker_uid: pod uid; a pod of the same name with another uid is not this member.
        address: pod IP.
        peer_port: where this rank listens for its peers.
        pool: pool name.
        on_demand: whether its capacity is on-demand; those are asked first to write checkpoints.
        local_rank: rank inside the pod.
        share_samples: samples of each global batch; 0 is legal.
        micro_batch_samples: largest micro-batch; a larger share is accumulated. 0 means the whole share at once.
        cap_samples: most samples that this member may be given; ``None`` when no limit is known.
        compute: learned time model; ``None`` while nothing is known.
    """

    rank: int
    worker: str
    worker_uid: str
    address: str
    peer_port: int
    pool: str
    on_demand: bool
    local_rank: int = 0
    share_samples: int
    micro_batch_samples: int = 0
    cap_samples: int | None = None
    compute: ComputeTime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Expected step seconds, efficiency (achieved over the sum of solo rates), and each member's binding constraint.

    ``efficiency_ceiling`` is the expected efficiency that no shares exceed with the measured variances (1.0: no noise).
    """

    step_s: float
    efficiency: float
    efficiency_ceiling: float
    bindings: tuple[Binding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """One global batch divided among the members of a plan, with what the division rests on. Tuples are by rank.

    Attributes:
        shares: samples; they sum to the global batch.
        micro_batch_samples: largest micro-batch; 0 means the whole share at once.
        cap_samples: most samples that a member may be given; ``None`` where no limit is known.
        compute: learned time models; ``None`` while unknown.
        probe: share vectors for the first steps of an epoch; empty when nothing has to be learned.
        probe_steps: steps for each vector.
        communication: learned exchange model; ``None`` while unknown.
        prediction: expected step, efficiency and ceiling of ``shares``; ``None`` while a model is missing.
    """

    shares: tuple[int, ...]
    micro_batch_samples: tuple[int, ...]
    cap_samples: tuple[int | None, ...]
    compute: tuple[ComputeTime | None, ...]
    probe: tuple[tuple[int, ...], ...] = ()
    probe_steps: int = 0
    communication: CommunicationTime | None = None
    prediction: Prediction | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One decision for one job.

    Attributes:
        job_uid: a reader refuses another job's plan.
        generation: grows with membership; 0 means that nobody is named yet and workers wait.
        revision: grows with everything else; never falls when the generation grows.
        members: by rank; shares sum to ``global_batch_samples``.
        global_batch_samples: samples of one step over all members.
        boundary: when shares of a newer revision take effect.
        min_replicas: formations may not have fewer workers.
        drain: workers (pod names) that are about to go; they leave after their current step.
        probe: share vectors (by rank) of the first steps of an epoch, from which speeds are learned; each sums to the
            global batch. Empty when nothing has to be learned.
        probe_steps: steps for which each vector of ``probe`` is used in turn.
        communication: learned exchange model; ``None`` while unknown.
        prediction: ``None`` while nothing is predicted.
        reason: why this plan differs from the one before, for people.
    """

    job_uid: str
    generation: int
    revision: int
    members: tuple[Member, ...]
    global_batch_samples: int
    boundary: Boundary = Boundary()
    min_replicas: int = 1
    drain: tuple[str, ...] = ()
    probe: tuple[tuple[int, ...], ...] = ()
    probe_steps: int = 0
    communication: CommunicationTime | None = None
    prediction: Prediction | None = None
    reason: str = ""

    @property
    def version(self) -> tuple[int, int]:
        """The plan's place in the order: ``(generation, revision)``."""
        return (self.generation, self.revision)

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples per rank."""
        return tuple(member.share_samples for member in self.members)

    def with_division(self, members: Sequence[Member], division: Division) -> Plan:
        """Return the plan for these members with their shares and everything else that the division determines."""
        return replace(
            self,
            members=tuple(
                replace(member, share_samples=share, micro_batch_samples=micro, cap_samples=cap, compute=compute)
                for member, share, micro, cap, compute in zip(
                    members,
                    division.shares,
                    division.micro_batch_samples,
                    division.cap_samples,
                    division.compute,
                    strict=True,
                )
            ),
            global_batch_samples=sum(division.shares),
            probe=division.probe,
            probe_steps=division.probe_steps,
            communication=division.communication,
            prediction=division.prediction,
        )


def problems(plan: Plan) -> tuple[str, ...]:
    """Return every way in which the plan contradicts itself, each as one sentence; empty when it is sound."""
    found = []
    if plan.generation < 0 or plan.revision < 0:
        found.append(f"version {plan.version} is negative")
    if plan.generation > 0 and not plan.members:
        found.append(f"generation {plan.generation} names no member")
    if [member.rank for member in plan.members] != list(range(len(plan.members))):
        found.append("members are not listed by rank 0, 1, 2, …")
    names = {(member.worker, member.local_rank) for member in plan.members}
    if len(names) != len(plan.members):
        found.append("a member is named twice")
    for what, vector in [("shares", plan.shares), *((f"probe {i}", v) for i, v in enumerate(plan.probe))]:
        if not plan.members:
            continue
        if len(vector) != len(plan.members):
            found.append(f"{what} has {len(vector)} entries for {len(plan.members)} members")
        elif min(vector) < 0:
            found.append(f"{what} holds a negative share")
        elif sum(vector) != plan.global_batch_samples:
            found.append(f"{what} sums to {sum(vector)}, not to the global batch of {plan.global_batch_samples}")
    if plan.probe and plan.probe_steps < 1:
        found.append("a probe needs probe_steps of at least 1")
    if plan.boundary.kind is BoundaryKind.STEPS and plan.boundary.every_steps < 1:
        found.append("a boundary of kind steps needs every_steps of at least 1")
    if plan.prediction is not None and len(plan.prediction.bindings) != len(plan.members):
        found.append(f"the prediction has {len(plan.prediction.bindings)} bindings for {len(plan.members)} members")
    if plan.prediction is not None and not plan.prediction.step_s > 0:
        found.append("the prediction has a step that takes no time")
    return tuple(found)
