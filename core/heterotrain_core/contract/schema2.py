"""Plans of schema 2, in which each member was one rank: read, and never written.

A new operator finds them in the ConfigMaps of running jobs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from heterotrain_core.contract.plan import (
    Boundary,
    CommunicationTime,
    ComputeTime,
    Member,
    Plan,
    Prediction,
    Rank,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member2:
    """A rank with its share; the fields are those of ``Member`` and ``Rank``."""

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
class Plan2:
    """A plan of schema 2; the fields are those of ``Plan``, with vectors by rank."""

    job_uid: str
    generation: int
    revision: int
    members: tuple[Member2, ...]
    global_batch_samples: int
    boundary: Boundary = field(default_factory=Boundary)
    min_replicas: int = 1
    drain: tuple[str, ...] = ()
    probe: tuple[tuple[int, ...], ...] = ()
    probe_steps: int = 0
    communication: CommunicationTime | None = None
    prediction: Prediction | None = None
    reason: str = ""


def upgraded(old: Plan2) -> Plan:
    """Return the same plan with one replicated member for each rank."""
    return Plan(
        job_uid=old.job_uid,
        generation=old.generation,
        revision=old.revision,
        members=tuple(
            Member(
                index=each.rank,
                pool=each.pool,
                share_samples=each.share_samples,
                micro_batch_samples=each.micro_batch_samples,
                cap_samples=each.cap_samples,
                compute=each.compute,
            )
            for each in old.members
        ),
        ranks=tuple(
            Rank(
                rank=each.rank,
                member=each.rank,
                worker=each.worker,
                worker_uid=each.worker_uid,
                address=each.address,
                peer_port=each.peer_port,
                on_demand=each.on_demand,
                local_rank=each.local_rank,
            )
            for each in old.members
        ),
        global_batch_samples=old.global_batch_samples,
        boundary=old.boundary,
        min_replicas=old.min_replicas,
        drain=old.drain,
        probe=old.probe,
        probe_steps=old.probe_steps,
        communication=old.communication,
        prediction=old.prediction,
        reason=old.reason,
    )
