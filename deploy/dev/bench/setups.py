"""Training workers of which some leave and return: with this trainer, torchrun and torchft."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import namespaces
from heterotrain_core.contract import env, keys
from heterotrain_core.contract.codec import encode_plan
from heterotrain_core.contract.config import TrainingConfig, encode_config
from heterotrain_core.contract.plan import Member, Plan, Rank
from machine import free_port

SCRIPT = Path(__file__).with_name("trainer_script.py")
SHARE_SAMPLES = 16
WORKERS = 3
PATIENCE_S = 180.0


class Setup(Protocol):
    """Training workers."""

    def lose(self, turn: int, number: signal.Signals) -> tuple[str, float]:
        """Send a signal to one worker; return a surviving worker's name and the time of the signal."""

    def replace(self) -> None:
        """Start a replacement; return when it waits for admission."""

    def admit(self) -> float:
        """Admit the replacement; return the time."""

    def close(self) -> None:
        """Stop all processes."""


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {PATIENCE_S:g} s: {what}")
        time.sleep(0.005)


def commits(folder: Path, name: str) -> list[float]:
    """Return the times of a worker's commits, in order."""
    path = folder / f"{name}.commits"
    lines = path.read_text(encoding="ascii").splitlines(keepends=True) if path.exists() else []
    return [float(line.split()[1]) for line in lines if line.endswith("\n")]


@dataclass(slots=True)
class Process:
    """A worker process, forked or started."""

    name: str
    pid: int
    peer_port: int = 0
    metrics_port: int = 0
    address: str = "127.0.0.1"
    namespace: str = ""

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it is still running."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def reap(self) -> None:
        """Wait until it has ended."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def forked(kind: str, folder: Path, environ: Mapping[str, str], name: str, *, namespace: str = "") -> int:
    """Run a worker in a fork of this process, which has loaded torch without using it; return its pid.

    It runs in a network namespace if one is given.
    """
    import trainer_script  # noqa: PLC0415  # loads torch, which not every world needs

    pid = os.fork()
    if pid:
        return pid
    try:
        output = os.open(folder / f"{name}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for standard in (1, 2):
            os.dup2(output, standard)
        os.environ.update(environ)
        if namespace:
            namespaces.enter(namespace)
        trainer_script.main(kind)
    except BaseException:  # noqa: BLE001  # as the interpreter does it
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


@dataclass(slots=True)
class Heterotrain:
    """This trainer; survivors continue on their own, and this class is the operator that admits new workers."""

    folder: Path
    workers: int = WORKERS
    bridge: namespaces.Bridge | None = None
    members: list[Process] = field(default_factory=list)
    lost: list[Process] = field(default_factory=list)
    waiting: Process | None = None
    generation: int = 0
    started: int = 0

    def __post_init__(self) -> None:
        for _ in range(self.workers):
            self.replace()
            if self.waiting is not None:
                self.members.append(self.waiting)
        self.waiting = None
        self._plan()

    def lose(self, turn: int, number: signal.Signals) -> tuple[str, float]:
        """Send a signal to each rank in turn, the lowest included."""
        victim = self.members.pop(turn % WORKERS)
        at_s = time.time()
        victim.send(number)
        victim.reap()
        return self.members[0].name, at_s

    def lose_several(self, turn: int, count: int, *, apart_s: float) -> tuple[str, list[float]]:
        """Kill workers, or with a bridge unplug them; return a surviving worker's name and the times."""
        times_s: list[float] = []
        for _ in range(count):
            if times_s:
                time.sleep(apart_s)
            victim = self.members.pop(turn % len(self.members))
            self.lost.append(victim)
            times_s.append(time.time())
            if victim.namespace:
                namespaces.unplug(victim.namespace)
            else:
                victim.send(signal.SIGKILL)
        return self.members[0].name, times_s

    def end_lost(self) -> None:
        """Kill the workers that were unplugged, and wait until all lost ones have ended."""
        while self.lost:
            worker = self.lost.pop()
            worker.send(signal.SIGKILL)
            worker.reap()

    def replace(self) -> None:
        """Start a worker and wait until it is ready."""
        name = f"w{self.started}"
        self.started += 1
        plans = self.folder / name
        plans.mkdir()
        namespace, address = self.bridge.add() if self.bridge else ("", "127.0.0.1")
        worker = Process(name, 0, free_port(), free_port(), address, namespace)
        config = TrainingConfig(epochs=10**6, base_batch_samples=self.workers * SHARE_SAMPLES)
        environ = environment_of(worker, self.folder, plans, config)
        worker.pid = forked("heterotrain", self.folder, environ, name, namespace=namespace)
        until(lambda: is_ready(worker), f"{name} is ready")
        self.waiting = worker

    def admit(self) -> float:
        """Write a plan with the new worker; return the time."""
        if self.waiting is not None:
            self.members.append(self.waiting)
            self.waiting = None
        at_s = time.time()
        self._plan()
        return at_s

    def close(self) -> None:
        """Kill all workers."""
        for worker in (*self.members, *self.lost):
            worker.send(signal.SIGKILL)
            worker.reap()

    def _plan(self) -> None:
        self.generation += 1
        members = tuple(
            Member(index=index, pool="pool", share_samples=SHARE_SAMPLES) for index in range(len(self.members))
        )
        ranks = tuple(
            Rank(
                rank=rank, member=rank, worker=w.name, worker_uid=w.name, address=w.address, peer_port=w.peer_port,
                on_demand=True,
            )
            for rank, w in enumerate(self.members)
        )  # fmt: skip
        batch = SHARE_SAMPLES * len(members)
        plan = Plan(
            job_uid="job", generation=self.generation, revision=self.generation, members=members,
            ranks=ranks, global_batch_samples=batch,
        )  # fmt: skip
        for worker in self.members:
            deliver(plan, self.folder / worker.name)


def environment_of(worker: Process, folder: Path, plans: Path, config: TrainingConfig) -> dict[str, str]:
    """Return what the operator sets in the environment of this trainer's worker, and where it logs its commits."""
    return {
        env.JOB_UID: "job", env.JOB_NAME: "bench", env.WORKER: worker.name, env.WORKER_UID: worker.name,
        env.WORKER_ADDRESS: worker.address, env.PEER_PORT: str(worker.peer_port),
        env.METRICS_PORT: str(worker.metrics_port), env.PLAN_DIR: str(plans), env.CONFIG: encode_config(config),
        env.TERMINATION_PATH: str(plans / "termination"), "NAME": worker.name, "FOLDER": str(folder),
    }  # fmt: skip


def deliver(plan: Plan, plans: Path) -> None:
    """Replace the plan in a worker's folder atomically."""
    scratch = plans / "new"
    scratch.write_text(encode_plan(plan))
    scratch.replace(plans / keys.PLAN_KEY)


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Return the environment of a started interpreter: one thread, and cached bytecode as in any image."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    own = {
        "FOLDER": str(folder), "PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    return environ | own | more


@dataclass(slots=True)
class Torchrun:
    """torchrun's elastic agent, which restarts all workers after a loss."""

    folder: Path
    agent: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORKERS), "--max-restarts", "1000",
            "--monitor-interval", "0.1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}",
            str(SCRIPT), "torchrun",
        ]  # fmt: skip
        # Without the variable, restarted workers read the addresses of their predecessors and mostly never return.
        environ = environment(self.folder, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        output = (self.folder / "agent.output").open("wb")
        self.agent = subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT)

    def lose(self, turn: int, number: signal.Signals) -> tuple[str, float]:
        """Send a signal to one rank; every rank shows when training continues."""
        pid = int((self.folder / f"rank-{1 + turn % (WORKERS - 1)}.pid").read_text())
        at_s = time.time()
        os.kill(pid, number)
        return "rank-0", at_s

    def replace(self) -> None:
        """Do nothing: the agent starts the replacement."""

    def admit(self) -> float:
        """Do nothing: the agent starts the replacement."""
        return time.time()

    def close(self) -> None:
        """Stop the agent and its workers."""
        self.agent.terminate()
        try:
            self.agent.wait(20)
        except subprocess.TimeoutExpired:
            self.agent.kill()


@dataclass(slots=True)
class Torchft:
    """torchft: a lighthouse, and one replica group for each worker."""

    folder: Path
    python: str
    members: list[Process] = field(default_factory=list)
    waiting: Process | None = None
    started: int = 0
    port: int = field(default_factory=free_port)
    lighthouse: subprocess.Popen[bytes] = field(init=False)
    popens: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        program = Path(self.python).with_name("torchft_lighthouse")
        command = [
            str(program), "--bind", f"[::]:{self.port}", "--min_replicas", "2", "--join_timeout_ms", "1000",
        ]  # fmt: skip
        output = (self.folder / "lighthouse.output").open("wb")
        self.lighthouse = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        for _ in range(WORKERS):
            self._start()
        for worker in self.members:
            until(lambda name=worker.name: len(commits(self.folder, name)) > 0, f"{worker.name} trains")  # type: ignore[misc]  # a default argument binds the loop's variable

    def lose(self, turn: int, number: signal.Signals) -> tuple[str, float]:
        """Send a signal to each worker in turn."""
        victim = self.members.pop(turn % WORKERS)
        at_s = time.time()
        victim.send(number)
        self.popens[victim.pid].wait()
        return self.members[0].name, at_s

    def replace(self) -> None:
        """Start another worker, which joins immediately, and wait until it trains."""
        self._start()
        name = self.members[-1].name
        until(lambda: len(commits(self.folder, name)) > 0, f"{name} trains")

    def admit(self) -> float:
        """Do nothing: the worker has joined already."""
        return time.time()

    def close(self) -> None:
        """Kill all workers."""
        for worker in self.members:
            worker.send(signal.SIGKILL)
            self.popens[worker.pid].wait()
        self.lighthouse.kill()
        self.lighthouse.wait()

    def _start(self) -> None:
        name = f"w{self.started}"
        self.started += 1
        environ = environment(
            self.folder, NAME=name, TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{self.port}", RANK="0", WORLD_SIZE="1"
        )
        output = (self.folder / f"{name}.output").open("wb")
        started = subprocess.Popen(
            [self.python, str(SCRIPT), "torchft"], env=environ, stdout=output, stderr=subprocess.STDOUT
        )
        self.popens[started.pid] = started
        self.members.append(Process(name, started.pid))


def is_ready(worker: Process) -> bool:
    """Return whether a worker of this trainer waits for a plan that names it."""
    try:
        place = f"http://{worker.address}:{worker.metrics_port}{keys.READY_PATH}"
        with urllib.request.urlopen(place, timeout=2) as reply:
            return int(reply.status) == 200  # noqa: PLR2004  # HTTP OK
    except (urllib.error.URLError, OSError):
        return False
