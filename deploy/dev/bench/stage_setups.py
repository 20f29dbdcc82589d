"""Training workers that hold a model in stages, of which some are lost or leave; this module is their operator."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import heterotrain.session  # noqa: F401  # loaded once for the forked workers
import namespaces
import torch._dynamo  # noqa: F401  # every optimizer needs it
from heterotrain_core.contract.config import TrainingConfig
from heterotrain_core.contract.plan import Layout, LayoutKind, Member, Plan, Rank
from machine import free_port
from setups import SHARE_SAMPLES, Process, commits, deliver, environment_of, forked, is_ready, until

MICRO_SAMPLES = 4


class Cut(NamedTuple):
    """A member: its workers by stage, and the first unit of each stage but the first one."""

    workers: tuple[Process, ...]
    cuts: tuple[int, ...]


def plan_of(members: Sequence[Cut], spares: Sequence[Process], *, generation: int, least: int) -> Plan:
    """Return a plan with these members and equal shares.

    Args:
        members: each worker is in one of them.
        spares: workers in no member.
        generation: of the plan.
        least: members without which no formation trains.
    """
    ranks: list[Rank] = []
    for index, member in enumerate(members):
        for stage, worker in enumerate(member.workers):
            ranks.append(Rank(
                rank=len(ranks), member=index, worker=worker.name, worker_uid=worker.name, address=worker.address,
                peer_port=worker.peer_port, on_demand=True, stage=stage,
            ))  # fmt: skip
    return Plan(
        job_uid="job", generation=generation, revision=generation, ranks=tuple(ranks), min_replicas=least,
        members=tuple(
            Member(
                index=index, pool="pool", share_samples=SHARE_SAMPLES, micro_batch_samples=MICRO_SAMPLES,
                layout=Layout(kind=LayoutKind.PIPELINE, cuts=member.cuts) if member.cuts else Layout(),
            )
            for index, member in enumerate(members)
        ),
        global_batch_samples=SHARE_SAMPLES * len(members), spares=tuple(worker.name for worker in spares),
    )  # fmt: skip


@dataclass(slots=True)
class Stages:
    """Workers of this trainer in a job whose members are pipelines.

    Attributes:
        folder: of their files.
        width: of the model's layers.
        bridge: joins a network namespace for each worker; ``None`` leaves all on the loopback interface.
        workers: all that were started and not ended.
    """

    folder: Path
    width: int
    bridge: namespaces.Bridge | None = None
    workers: list[Process] = field(default_factory=list)
    started: int = 0
    generation: int = 0

    def start(self) -> Process:
        """Start a worker and wait until it is ready for a plan."""
        name = f"w{self.started}"
        self.started += 1
        plans = self.folder / name
        plans.mkdir()
        namespace, address = self.bridge.add() if self.bridge else ("", "127.0.0.1")
        worker = Process(name, 0, free_port(), free_port(), address, namespace)
        config = TrainingConfig(epochs=10**6, base_batch_samples=2 * SHARE_SAMPLES, parallelism="Pipeline")
        environ = environment_of(worker, self.folder, plans, config) | {"WIDTH": str(self.width)}
        worker.pid = forked("stages", self.folder, environ, name, namespace=namespace)
        self.workers.append(worker)
        until(lambda: is_ready(worker), f"{name} is ready")
        return worker

    def plan(self, members: Sequence[Cut], *, least: int = 1) -> float:
        """Give all living workers a plan with these members, the rest of them as spares; return the time."""
        self.generation += 1
        busy = {worker.name for member in members for worker in member.workers}
        spares = [worker for worker in self.workers if worker.name not in busy]
        plan = plan_of(members, spares, generation=self.generation, least=least)
        at_s = time.time()
        for worker in self.workers:
            deliver(plan, self.folder / worker.name)
        return at_s

    def kill(self, *victims: Process) -> float:
        """Kill workers at once; return the time, after they have ended."""
        at_s = time.time()
        for victim in victims:
            victim.send(signal.SIGKILL)
        self._end(*victims)
        return at_s

    def _end(self, *gone: Process) -> None:
        """Wait until these workers have ended."""
        for worker in gone:
            worker.reap()
            self.workers.remove(worker)

    def left(self, worker: Process) -> None:
        """Wait until a worker that was asked to leave has ended."""
        until(lambda: os.waitpid(worker.pid, os.WNOHANG)[0] != 0, f"{worker.name} ends")
        self.workers.remove(worker)

    def trains(self, worker: Process, steps: int) -> None:
        """Wait until a worker has committed some more steps."""
        begun = len(commits(self.folder, worker.name))
        until(lambda: len(commits(self.folder, worker.name)) >= begun + steps, f"{worker.name} trains")

    def close(self) -> None:
        """Kill all workers."""
        self.kill(*self.workers)
