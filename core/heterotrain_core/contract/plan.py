"""The plan: the operator's current decision for one job, as a value.

Ordered by ``(generation, revision)``: the generation grows with every change of membership (a new process group), the
revision with every change of shares or batch (no rebuild). Shares belong to members; a member is one rank or several
that hold the model together. The symbols q, s, k, m, T_o, T_u, gamma are those of the performance model
(docs/mathematics.md). ``consistency`` lists the rules that a plan has to keep.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from heterotrain_core.contract.choices import Choice
from heterotrain_core.contract.hiccups import NO_HICCUPS, Hiccups

SCHEMA_VERSION = 3


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
    FILL = "Fill"
    """Stages of a pipeline wait for the first micro-batches to arrive and for the last ones to leave."""


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


class LayoutKind(Choice):
    """How the model's state lies on the ranks of a member."""

    REPLICATED = "Replicated"
    """One rank holds everything."""
    SHARDED = "Sharded"
    """Each rank holds a part of every tensor and computes the whole model on a part of the member's share."""
    PIPELINE = "Pipeline"
    """Each stage holds contiguous units of the model; a stage may be sharded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the model lies on the ranks of a member.

    Attributes:
        kind: replicated, sharded or pipeline.
        cuts: first unit of each stage but the first one, ascending; only for a pipeline.
        recomputing: stages, ascending, that compute activations again in the backward pass: all units of the stage but
            the model's first and last one. Not for a sharded member.
        shards: ranks of each stage.
        state_weights: parts of parameters, gradients and optimizer state by shard, in proportion to these numbers;
            empty for equal parts. Only for a sharded member.
        sample_weights: parts of the member's share by shard, likewise.
    """

    kind: LayoutKind = LayoutKind.REPLICATED
    cuts: tuple[int, ...] = ()
    recomputing: tuple[int, ...] = ()
    shards: int = 1
    state_weights: tuple[int, ...] = ()
    sample_weights: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """Number of stages; 1 unless the model is cut."""
        return len(self.cuts) + 1

    @property
    def ranks(self) -> int:
        """Ranks of a member with this layout."""
        return self.stages * self.shards

    def place(self, position: int) -> tuple[int, int]:
        """Return (stage, shard) of the member's rank at this position: stage by stage, in each shard by shard."""
        return divmod(position, self.shards)

    def state_part(self, elements: int, shard: int) -> tuple[int, int]:
        """Return the part ``[start, stop)`` of a tensor's elements, or of several tensors in a row, that a shard holds.

        With ``state_weights`` only; equal shards are those of ``torch.distributed.fsdp.fully_shard``.
        """
        return _part(elements, self.state_weights or (1,) * self.shards, shard)

    def sample_part(self, samples: int, shard: int) -> tuple[int, int]:
        """Return the part ``[start, stop)`` of a member's samples that a shard computes."""
        return _part(samples, self.sample_weights or (1,) * self.shards, shard)


def _part(total: int, weights: Sequence[int], index: int) -> tuple[int, int]:
    """Return part ``index`` of ``[0, total)``, divided in proportion to weights and rounded down at each edge."""
    whole, before = sum(weights), sum(weights[:index])
    return total * before // whole, total * (before + weights[index]) // whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What gets one share of the global batch: the ranks that hold the model together, once.

    Attributes:
        index: position in the plan, 0 … members − 1.
        pool: pool name; for a pipeline over several pools a name of their combination (see ``Rank.pool``).
        share_samples: samples of each global batch; 0 is legal.
        micro_batch_samples: largest micro-batch of the whole member; a larger share is accumulated. 0 means the whole
            share at once.
        cap_samples: most samples that this member may be given; ``None`` when no limit is known.
        granularity_samples: the number of which shares should be multiples. A share that is not one is legal.
        compute: learned time model; ``None`` while nothing is known.
        layout: how the model lies on the member's ranks.
    """

    index: int
    pool: str
    share_samples: int
    micro_batch_samples: int = 0
    cap_samples: int | None = None
    granularity_samples: int = 1
    compute: ComputeTime | None = None
    layout: Layout = Layout()

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the share; the last one of them may be smaller."""
        return -(-self.share_samples // (self.micro_batch_samples or max(1, self.share_samples)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One training process of the plan.

    The ranks of a member are consecutive, in the order of ``Layout.place``; members follow each other by index.

    Attributes:
        rank: position in the plan, 0 … world size − 1.
        member: index of its member.
        worker: pod name; with ``local_rank`` it names the rank.
        worker_uid: pod uid; a pod of the same name with another uid is not this rank's.
        address: pod IP.
        peer_port: where this rank listens for its peers.
        on_demand: whether its capacity is on-demand; those are asked first to write checkpoints.
        local_rank: rank inside the pod.
        stage: which of the member's stages it holds.
        shard: which shard of that stage.
        pool: name of its pod's pool where that is not the member's ``pool``; otherwise empty.
    """

    rank: int
    member: int
    worker: str
    worker_uid: str
    address: str
    peer_port: int
    on_demand: bool
    local_rank: int = 0
    stage: int = 0
    shard: int = 0
    pool: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Expected step seconds, efficiency (achieved over the sum of solo rates), and each member's binding constraint.

    Attributes:
        efficiency_ceiling: the expected efficiency that no shares exceed with the measured variances (1.0: no noise).
        hiccups: rare long steps of every member.
        own_s: mean own seconds of a step at the balanced level, the batch over the sum of solo rates; 0 without
            hiccups, where nothing depends on it.
    """

    step_s: float
    efficiency: float
    efficiency_ceiling: float
    bindings: tuple[Binding, ...]
    hiccups: Hiccups = NO_HICCUPS
    own_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One decision for one job.

    Attributes:
        job_uid: a reader refuses another job's plan.
        generation: grows with membership; 0 means that nobody is named yet and workers wait.
        revision: grows with everything else; never falls when the generation grows.
        members: by index; shares sum to ``global_batch_samples``.
        ranks: by rank: those of the first member, then those of the second, and so on.
        global_batch_samples: samples of one step over all members.
        boundary: when shares of a newer revision take effect.
        min_replicas: formations may not have fewer replicas (see ``replicas``).
        drain: workers (pod names) that are about to go: after their current step, or as stages with the next plan.
        spares: workers (pod names) that are ready and in no member; they wait for a newer plan and keep their state.
        probe: share vectors (by member) of the first steps of an epoch, from which speeds are learned; each sums to the
            global batch. Empty when nothing has to be learned.
        probe_steps: steps for which each vector of ``probe`` is used in turn.
        communication: learned exchange model; ``None`` while unknown.
        prediction: ``None`` while nothing is predicted.
        checkpoint_request: another value than before asks for a checkpoint at the next step boundary; empty asks for
            nothing.
        reason: why this plan differs from the one before, for people.
    """

    job_uid: str
    generation: int
    revision: int
    members: tuple[Member, ...]
    ranks: tuple[Rank, ...]
    global_batch_samples: int
    boundary: Boundary = Boundary()
    min_replicas: int = 1
    drain: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    probe: tuple[tuple[int, ...], ...] = ()
    probe_steps: int = 0
    communication: CommunicationTime | None = None
    prediction: Prediction | None = None
    checkpoint_request: str = ""
    reason: str = ""

    @property
    def version(self) -> tuple[int, int]:
        """The plan's place in the order: ``(generation, revision)``."""
        return (self.generation, self.revision)

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples per member."""
        return tuple(member.share_samples for member in self.members)

    @property
    def ranks_by_member(self) -> tuple[tuple[Rank, ...], ...]:
        """The ranks of each member, by index."""
        found: list[list[Rank]] = [[] for _ in self.members]
        for rank in self.ranks:
            found[rank.member].append(rank)
        return tuple(map(tuple, found))

    def pool_of(self, rank: Rank) -> str:
        """Return the pool of a rank's pod."""
        return rank.pool or self.members[rank.member].pool

    def whole_members(self, ranks: Collection[int]) -> tuple[int, ...]:
        """Return the members, by index, all of whose ranks are among these."""
        there = set(ranks)
        broken = {rank.member for rank in self.ranks if rank.rank not in there}
        return tuple(member.index for member in self.members if member.index not in broken)

    def ranks_of_whole_members(self, ranks: Collection[int]) -> tuple[int, ...]:
        """Return those of these ranks whose member is whole, ascending."""
        whole = set(self.whole_members(ranks))
        return tuple(rank.rank for rank in self.ranks if rank.member in whole)

    def replicas(self, ranks: Collection[int]) -> int:
        """Return how many replicas these ranks are, as ``min_replicas`` counts them.

        Whole members count, but those on the same pods count once, because they are lost together: a pod of eight
        replicated ranks is one replica, and so are a sharded pod and a pipeline over several pods.
        """
        whole = set(self.whole_members(ranks))
        pods: dict[int, set[str]] = {}
        for rank in self.ranks:
            if rank.member in whole:
                pods.setdefault(rank.member, set()).add(rank.worker)
        return len({frozenset(each) for each in pods.values()})
