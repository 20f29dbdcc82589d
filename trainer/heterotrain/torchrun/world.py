"""The fixed world of a torchrun script, from a plan: which processes a pod starts, and with which variables.

The names are those of ``torchrun`` (https://docs.pytorch.org/docs/stable/elastic/run.html): ``RANK`` and so on for a
script that is started directly, ``PET_*`` as defaults for ``torchrun`` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from heterotrain_core.contract.plan import Plan, Rank

MASTER_PORT_OFFSET = 100
"""Rank 0's port for the rendezvous is this far above its port for peers."""
MASTER_PORTS = 100
"""Ports that are used in turn, so that a process of an earlier generation cannot enter a later one's rendezvous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All ranks of one generation, as one worker's launcher needs them.

    Attributes:
        generation: of the plan.
        run_id: name of the job.
        workers: for each pod, in the plan's order, its ranks.
        own: index of this worker in ``workers``.
    """

    generation: int
    run_id: str
    workers: tuple[tuple[Rank, ...], ...]
    own: int

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """This worker's ranks, by local rank."""
        return self.workers[self.own]

    @property
    def others(self) -> tuple[Rank, ...]:
        """The first rank of each other worker: its launcher answers there."""
        return tuple(ranks[0] for index, ranks in enumerate(self.workers) if index != self.own)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.workers))

    @property
    def master(self) -> tuple[str, int]:
        """Address and port of the rendezvous, on the worker of rank 0."""
        first = self.workers[0][0]
        return first.address, first.peer_port + MASTER_PORT_OFFSET + self.generation % MASTER_PORTS

    def for_torchrun(self) -> dict[str, str]:
        """Return the defaults of torchrun's options, for a pod in which torchrun starts the processes."""
        address, port = self.master
        return {
            "PET_NNODES": str(len(self.workers)),
            "PET_NODE_RANK": str(self.own),
            "PET_NPROC_PER_NODE": str(len(self.ranks)),
            "PET_MASTER_ADDR": address,
            "PET_MASTER_PORT": str(port),
        }

    def for_rank(self, local_rank: int) -> dict[str, str]:
        """Return what torchrun gives the process with this local rank, and torchrun's own defaults."""
        address, port = self.master
        rank, size = self.ranks[0].rank + local_rank, str(self.world_size)
        return self.for_torchrun() | {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": size,
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(len(self.ranks)),
            "GROUP_RANK": str(self.own),
            "GROUP_WORLD_SIZE": str(len(self.workers)),
            "NODE_RANK": str(self.own),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": size,
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }


def world_of(plan: Plan, *, worker_uid: str, run_id: str) -> World | None:
    """Return the world of a plan for this worker; ``None`` while the plan does not name it or asks it to leave."""
    by_worker: dict[str, list[Rank]] = {}
    for rank in plan.ranks:
        by_worker.setdefault(rank.worker_uid, []).append(rank)
    if worker_uid not in by_worker or by_worker[worker_uid][0].worker in plan.drain:
        return None
    return World(
        generation=plan.generation,
        run_id=run_id,
        workers=tuple(map(tuple, by_worker.values())),
        own=list(by_worker).index(worker_uid),
    )


def commands(arguments: Sequence[str], world: World, *, python: str) -> list[tuple[list[str], dict[str, str]]]:
    """Return the processes of a pod, each with its command line and its variables.

    ``torchrun …`` runs once and starts the ranks itself; a Python script runs once for each rank.
    """
    if PurePath(arguments[0]).name == "torchrun":
        return [(list(arguments), world.for_torchrun())]
    return [([python, *arguments], world.for_rank(local_rank)) for local_rank in range(len(world.ranks))]
