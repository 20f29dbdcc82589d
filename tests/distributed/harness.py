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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from distributed.scripts import batches, net, optimizer_of, problem
from heterotrain_core.contract import env, keys
from heterotrain_core.contract.codec import encode_plan
from heterotrain_core.contract.config import TrainingConfig, encode_config
from heterotrain_core.contract.outcome import Ending, Outcome, decode_outcome
from heterotrain_core.contract.plan import Boundary, Layout, LayoutKind, Member, Plan, Rank
from heterotrain_core.split.proportion import evenly
from support import patience
from support.lineage import lineage
from support.ports import free_port, free_ports
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
    local_rank: int = 0
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
        values = re.findall(rf"^{name}{{[^}}]*}} (\S+)$", self._page("metrics") or "", re.MULTILINE)
        return sum(map(float, values)) if values else None

    def ready(self) -> bool:
        """Return whether it has reached ``job.steps``."""
        return self._page("ready") is not None

    def is_stopped(self) -> bool:
        """Return whether its process is stopped or has ended."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return True

    def _page(self, path: str) -> str | None:
        """Return a page of its metrics port; ``None`` if it refuses, or cannot answer because it is stopped.

        A process that gets no processor answers late, and its silence says nothing.
        """
        end_s = patience.now_s() + LIMIT_S
        while patience.now_s() < end_s:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/{path}", timeout=2) as reply:
                    text: bytes = reply.read()
                    return text.decode()
            except TimeoutError:
                if self.is_stopped():
                    return None
            except (urllib.error.URLError, http.client.HTTPException, OSError):
                return None
        return None

    def log(self) -> str:
        """Return its output."""
        return (self.folder / "output").read_text()


PlannedMember = tuple[Sequence[Worker], tuple[int, ...] | Layout, int, int]
"""The workers of a member by stage or shard, the first unit of each stage but the first one or the layout, its share
and micro-batch."""


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
        worker = Worker(
            name=name, uid=uid, folder=home, peer_port=peer_port, metrics_port=metrics_port, inbox=inbox,
            local_rank=local_rank,
        )  # fmt: skip
        worker.pid = inbox.get(timeout=START_S)["pid"]
        self.workers[home.name] = worker
        return worker

    def start_ready(self, name: str, **arguments: Any) -> Worker:
        """Start a worker with one rank and wait until it is ready."""
        worker = self.start(name, **arguments)
        self.until_ready(worker)
        return worker

    def start_workers(
        self, count: int, *, faults: Mapping[int, dict[str, Any]] = {}, prefix: str = "w", **arguments: Any
    ) -> list[Worker]:
        """Start so many workers, with these faults by number, and wait until they are ready."""
        workers = [self.start(f"{prefix}{i}", **_fault(faults, i), **arguments) for i in range(count)]
        self.until_ready(*workers)
        return workers

    def start_pod(
        self, name: str, ranks: int, *, faults: Mapping[int, dict[str, Any]] = {}, **arguments: Any
    ) -> list[Worker]:
        """Start the ranks of one worker, with these faults by local rank."""
        port = free_ports(ranks)
        return [
            self.start(name, local_rank=at, ranks=ranks, metrics_port=port + at, **_fault(faults, at), **arguments)
            for at in range(ranks)
        ]

    def plan(
        self, workers: Sequence[Worker], *, shares: Sequence[int] = (), micro: Sequence[int] = (),
        batch_samples: int | None = None, **fields: Any,
    ) -> Plan:  # fmt: skip
        """Write a plan in which each of these workers is a member, with equal shares of the batch by default."""
        shares = shares or evenly(batch_samples or self.batch_samples, len(workers))
        micro = micro or (0,) * len(workers)
        members: list[PlannedMember] = [
            ([worker], (), share, most) for worker, share, most in zip(workers, shares, micro, strict=True)
        ]
        return self.plan_members(members, **fields)

    def plan_members(
        self, members: Sequence[PlannedMember], *, spares: Sequence[Worker] = (), to: Sequence[Worker] | None = None,
        new_generation: bool = True, on_demand: Sequence[bool] | None = None, **fields: Any,
    ) -> Plan:  # fmt: skip
        """Write a plan with these members, and deliver it to ``to``, by default their workers and the spare ones."""
        self.generation += new_generation
        self.revision += 1
        written: list[Member] = []
        ranks: list[Rank] = []
        for index, (workers, cuts, share, micro) in enumerate(members):
            layout = cuts if isinstance(cuts, Layout) else Layout()
            if cuts and not isinstance(cuts, Layout):
                layout = Layout(kind=LayoutKind.PIPELINE, cuts=cuts)
            written.append(
                Member(index=index, pool="pool", share_samples=share, layout=layout, micro_batch_samples=micro)
            )
            for position, worker in enumerate(workers):
                stage, shard = layout.place(position)
                ranks.append(Rank(
                    rank=len(ranks), member=index, worker=worker.name, worker_uid=worker.uid, address=self.address,
                    peer_port=worker.peer_port, on_demand=on_demand[len(ranks)] if on_demand else True,
                    local_rank=worker.local_rank, stage=stage, shard=shard,
                ))  # fmt: skip
        plan = Plan(
            job_uid=JOB_UID, generation=self.generation, revision=self.revision, members=tuple(written),
            ranks=tuple(ranks), global_batch_samples=sum(member.share_samples for member in written),
            spares=tuple(worker.name for worker in spares), **({"boundary": Boundary()} | fields),
        )  # fmt: skip
        self.plans.append(plan)
        for worker in [*(worker for member in members for worker in member[0]), *spares] if to is None else to:
            deliver(plan, worker)
        return plan

    def finish(self, workers: Iterable[Worker]) -> None:
        """Wait until these workers have ended."""
        for worker in workers:
            self.until(lambda worker=worker: worker.poll() is not None, f"{worker.name} ends")  # type: ignore[misc]  # a default argument binds the loop's variable

    def suspend(self, workers: Sequence[Worker], *gates: Gate) -> None:
        """Ask workers that wait at these gates to leave, as if the job was suspended; wait until they have ended."""
        for gate in gates:
            self.until(gate.reached, "all wait at a gate")
        for worker in workers:
            worker.signal(signal.SIGTERM)
        for gate in gates:
            gate.open()
        self.finish(workers)

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

    def until_read(self, workers: Iterable[Worker]) -> None:
        """Wait until these workers have read the newest plan."""
        text, readers = f"plan {self.newest.generation}.{self.newest.revision}", list(workers)
        self.until(lambda: all(text in worker.log() for worker in readers), f"{text} is read")

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


def _fault(faults: Mapping[int, dict[str, Any]], number: int) -> dict[str, Any]:
    """Return the argument of a script that has a fault."""
    return {"fault": faults[number]} if number in faults else {}


def deliver(plan: Plan, worker: Worker) -> None:
    """Replace the plan in a worker's mount atomically."""
    scratch = worker.folder / "plan.new"
    scratch.write_text(encode_plan(plan))
    scratch.replace(worker.folder / "plan" / keys.PLAN_KEY)


def reference(
    *, epochs: int, size: int | Callable[[int], int] = 16, order: Callable[[int], list[int]] | None = None
) -> tuple[dict[str, torch.Tensor], dict[int, list[int]]]:
    """Train in this process with plain torch; return final weights and the sample ids of each epoch.

    ``size`` and ``order`` are those of ``batches``.
    """
    (x, y), model = problem(96).tensors, net()
    optimizer = optimizer_of(model)
    ids: dict[int, list[int]] = {}
    for epoch, chosen in batches(epochs=epochs, size=size, order=order):
        errors = (model(x[chosen]) - y[chosen]) ** 2
        optimizer.zero_grad()
        errors.mean().backward()
        optimizer.step()
        ids.setdefault(epoch, []).extend(chosen)
    return {name: value.detach() for name, value in model.state_dict().items()}, ids


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Fail unless all weights agree to a relative 1e-10."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        difference = float((found[name] - value).norm() / value.norm())
        assert difference < 1e-10, f"{name} differs by {difference:.2e}"


def check_weights(operator: Operator, workers: Sequence[Worker], expected: dict[str, torch.Tensor]) -> None:
    """Wait until these workers have ended; fail unless all have ended well, with these weights."""
    operator.finish(workers)
    for worker in workers:
        assert worker.code == 0, worker.log()
        assert_same_weights(operator.weights(worker), expected)


def assert_finished(
    operator: Operator, workers: Sequence[Worker], *, ids: dict[int, list[int]] | None = None, **training: Any
) -> None:
    """Fail unless these workers finish with the weights and samples of an undisturbed training in one process.

    ``training`` is that of ``reference``, of two epochs by default; ``ids`` takes the place of its samples.
    """
    expected, own = reference(**{"epochs": 2, **training})
    check_weights(operator, workers, expected)
    for worker in workers:
        assert worker.outcome is not None, worker.log()
        assert worker.outcome.ending is Ending.FINISHED, worker.log()
    assert lineage(operator.folder / "samples") == (own if ids is None else ids)
