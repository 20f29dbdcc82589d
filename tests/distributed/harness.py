"""Real worker processes on loopback, and a simulated operator that writes plan files for them."""

from __future__ import annotations

import contextlib
import http.client
import os
import queue
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from distributed.scripts import net, optimizer_of, problem, token_weights
from heterotrain.data.order import permutation
from heterotrain_core.contract import env, keys
from heterotrain_core.contract.codec import encode_plan
from heterotrain_core.contract.config import TrainingConfig, encode_config
from heterotrain_core.contract.outcome import Outcome, decode_outcome
from heterotrain_core.contract.plan import Boundary, Member, Plan, Rank
from heterotrain_core.split.proportion import evenly
from support import patience
from support.ports import free_port
from support.waiting import wait_until
from support.zygote import START_S, Inbox, Zygote

ROOT = Path(__file__).parents[2]
LIMIT_S = 180.0
"""A condition that comes at all comes within this, by the clock of patience."""
REAL_START_S = START_S * patience.RELUCTANCE
"""For a process that the standard library waits for in real time."""
JOB_UID = "job-uid"


@dataclass(slots=True)
class Worker:
    """One worker process."""

    name: str
    uid: str
    folder: Path
    peer_port: int
    metrics_port: int
    inbox: Inbox
    pid: int = 0
    code: int | None = None

    @property
    def outcome(self) -> Outcome | None:
        """Its termination message, ``None`` without one."""
        path = self.folder / "termination"
        return decode_outcome(path.read_text()) if path.exists() else None

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal if it still exists."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        """Return its exit code, ``None`` while it runs."""
        if self.code is None:
            try:
                self.code = self.inbox.get_nowait()["code"]
            except queue.Empty:
                return None
        return self.code

    def metric(self, name: str) -> float | None:
        """Return the sum of a metric's values, or ``None`` if it is not exposed."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=2) as reply:
                text = reply.read().decode()
        except (urllib.error.URLError, http.client.HTTPException, OSError):
            return None
        values = re.findall(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        return sum(map(float, values)) if values else None

    def ready(self) -> bool:
        """Return whether it has reached ``job.steps``."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/ready", timeout=2) as reply:
                return reply.status == 200
        except (urllib.error.URLError, http.client.HTTPException, OSError):
            return False

    def log(self) -> str:
        """Return its output."""
        return (self.folder / "output").read_text()


@dataclass(slots=True)
class Operator:
    """Starts workers and writes plans for them."""

    zygote: Zygote
    folder: Path
    config: TrainingConfig
    batch_samples: int = 16
    address: str = "127.0.0.1"
    workers: dict[str, Worker] = field(default_factory=dict)
    generation: int = 0
    revision: int = 0
    plans: list[Plan] = field(default_factory=list)

    @property
    def newest(self) -> Plan:
        """The last plan that was written."""
        return self.plans[-1]

    def start(
        self, name: str, *, incarnation: int = 0, script: str = "distributed.scripts:train",
        local_rank: int = 0, ranks: int = 1, metrics_port: int | None = None, **arguments: Any,
    ) -> Worker:  # fmt: skip
        """Start one rank of a worker, the only one by default; it waits for a plan that names it.

        The metrics ports of a worker's ranks have to follow each other.
        """
        uid = f"{name}-uid-{incarnation}"
        home = self.folder / (f"{uid}-{local_rank}" if local_rank else uid)
        (home / "plan").mkdir(parents=True)
        if not (secret := self.folder / keys.SECRET_KEY).exists():  # running workers may be about to read it
            secret.write_bytes(b"secret of the tests".ljust(keys.SECRET_BYTES))
        peer_port, metrics_port = free_port(), metrics_port or free_port()
        environ = {
            env.JOB_UID: JOB_UID, env.JOB_NAME: "test", env.WORKER: name, env.WORKER_UID: uid,
            env.WORKER_ADDRESS: self.address, env.PEER_PORT: str(peer_port - local_rank),
            env.METRICS_PORT: str(metrics_port - local_rank), env.LOCAL_RANK: str(local_rank),
            env.NUM_PROC_PER_WORKER: str(ranks),
            env.SECRET_DIR: str(self.folder), env.PLAN_DIR: str(home / "plan"), env.CONFIG: encode_config(self.config),
            env.TERMINATION_PATH: str(home / "termination"), env.SAMPLE_LOG_DIR: str(self.folder / "samples"),
        }  # fmt: skip
        command = {
            "environ": environ, "output": str(home / "output"), "script": script,
            "arguments": {"out": str(self.folder)} | arguments,
        }  # fmt: skip
        inbox = self.zygote.start(str(home), command)  # the key must be unique among all tests
        worker = Worker(name=name, uid=uid, folder=home, peer_port=peer_port, metrics_port=metrics_port, inbox=inbox)
        worker.pid = inbox.get(timeout=START_S)["pid"]
        self.workers[home.name] = worker
        return worker

    def plan(
        self, workers: list[Worker], *, to: list[Worker] | None = None, new_generation: bool = True, **fields: Any
    ) -> Plan:
        """Write a plan for these workers into the folders of ``to`` (all of them by default)."""
        self.generation += new_generation
        self.revision += 1
        total = fields.pop("batch_samples", self.batch_samples)
        shares = fields.pop("shares", evenly(total, len(workers)))
        micro = fields.pop("micro", (0,) * len(workers))
        on_demand = fields.pop("on_demand", (True,) * len(workers))
        members = tuple(
            Member(index=index, pool="pool", share_samples=share, micro_batch_samples=micro[index])
            for index, share in enumerate(shares)
        )
        ranks = tuple(
            Rank(
                rank=rank, member=rank, worker=w.name, worker_uid=w.uid, address=self.address, peer_port=w.peer_port,
                on_demand=on_demand[rank],
            )
            for rank, w in enumerate(workers)
        )  # fmt: skip
        plan = Plan(
            job_uid=JOB_UID, generation=self.generation, revision=self.revision, members=members,
            ranks=ranks, global_batch_samples=total, **({"boundary": Boundary()} | fields),
        )  # fmt: skip
        self.plans.append(plan)
        for worker in workers if to is None else to:
            deliver(plan, worker)
        return plan

    def finish(self, workers: list[Worker]) -> None:
        """Wait until these workers have ended."""
        for worker in workers:
            self.until(lambda worker=worker: worker.poll() is not None, f"{worker.name} ends")  # type: ignore[misc]  # a default argument binds the loop's variable

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition; fail with the output of all workers if it does not hold in time."""
        wait_until(condition, what, timeout_s=LIMIT_S, evidence=self.evidence)

    def evidence(self) -> str:
        """Return the output of all workers, the middle of a long one left out, with the stacks of the running ones."""
        running = [worker for worker in self.workers.values() if worker.poll() is None]
        for worker in running:
            worker.signal(signal.SIGUSR1)
        time.sleep(1.0)
        found = []
        for worker in self.workers.values():
            log = worker.log()
            short = log if len(log) <= 12_000 else f"{log[:6000]}\n[…]\n{log[-6000:]}"
            found.append(f"--- {worker.uid} (code {worker.poll()})\n{short}")
        return "\n".join(found)

    def until_ready(self, *workers: Worker) -> None:
        """Wait until these workers have reached ``job.steps``."""
        for worker in workers:
            self.until(worker.ready, f"{worker.name} is ready")

    def until_step(self, worker: Worker, step: int) -> None:
        """Wait until a worker has committed this many steps."""
        self.until(lambda: (worker.metric("heterotrain_step") or 0) >= step, f"{worker.name} reaches step {step}")

    def weights(self, worker: Worker) -> dict[str, torch.Tensor]:
        """Return the final weights of a worker."""
        path = self.folder / f"{worker.name}.pt"
        assert path.exists(), worker.log()
        return dict(torch.load(path, weights_only=True, map_location="cpu"))

    def close(self) -> None:
        """Kill all running workers."""
        for worker in self.workers.values():
            if worker.poll() is None:
                worker.signal(signal.SIGKILL)
                worker.signal(signal.SIGCONT)


class Gate:
    """A step at whose beginning a worker waits until the test opens the gate, so that it cannot finish before."""

    def __init__(self, folder: Path, step: int, *, name: str = "") -> None:
        self._reached, self._release = folder / f"reached-{name}{step}", folder / f"release-{name}{step}"
        self.fault = {
            "place": "step", "step": step, "do": "wait", "reached": str(self._reached), "release": str(self._release),
        }  # fmt: skip

    def reached(self) -> bool:
        """Return whether the worker has reached the gate."""
        return self._reached.exists()

    def is_open(self) -> bool:
        """Return whether the worker may continue."""
        return self._release.exists()

    def open(self) -> None:
        """Let the worker continue."""
        self._release.touch()


def deliver(plan: Plan, worker: Worker) -> None:
    """Replace the plan in a worker's mount atomically."""
    scratch = worker.folder / "plan.new"
    scratch.write_text(encode_plan(plan))
    scratch.replace(worker.folder / "plan" / keys.PLAN_KEY)


def reference(
    *, epochs: int, samples: int = 96, batch_samples: int = 16, seed: int = 0, tokens: bool = False,
    batches: Callable[[int], int] | None = None, order: Callable[[int], list[int]] | None = None,
) -> tuple[dict[str, torch.Tensor], dict[int, list[int]]]:  # fmt: skip
    """Train in this process with plain torch; return final weights and the sample ids of each epoch.

    ``batches`` returns the global batch of a step if it changes; ``order`` returns the samples of an epoch if the data
    set has an order of its own.
    """
    dataset, model = problem(samples), net()
    optimizer = optimizer_of(model)
    x, y = dataset.tensors
    ids: dict[int, list[int]] = {}
    number = 0
    for epoch in range(epochs):
        drawn = permutation(seed=seed, epoch=epoch, epoch_samples=samples, shuffle=True).tolist()
        numbers = order(epoch) if order else drawn
        cursor = 0
        while cursor < samples:
            size = batches(number) if batches else batch_samples
            chosen = numbers[cursor : cursor + size]
            errors = (model(x[chosen]) - y[chosen]) ** 2
            weights = token_weights(x[chosen]) if tokens else torch.ones_like(errors)
            optimizer.zero_grad()
            ((errors * weights).sum() / weights.sum()).backward()
            optimizer.step()
            ids.setdefault(epoch, []).extend(chosen)
            cursor, number = cursor + size, number + 1
    return {name: value.detach() for name, value in model.state_dict().items()}, ids


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Fail unless all weights agree to a relative 1e-10."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        difference = float((found[name] - value).norm() / value.norm())
        assert difference < 1e-10, f"{name} differs by {difference:.2e}"
