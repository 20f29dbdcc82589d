"""Real launchers of a Torchrun job on loopback, each with ports and folders of its own, and plans for them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heterotrain_core.contract import env, keys
from heterotrain_core.contract.codec import encode_plan
from heterotrain_core.contract.config import TrainingConfig, encode_config
from heterotrain_core.contract.outcome import Outcome, decode_outcome
from heterotrain_core.contract.plan import Member, Plan, Rank

from support import patience
from support.ports import free_ports
from support.waiting import wait_until

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0
ANSWER_S = 30.0
"""A launcher that is there answers another one within this on a busy machine, too; one that is gone refuses at once."""
SECRET = b"s" * keys.SECRET_BYTES


@dataclass(slots=True)
class Worker:
    """One pod: its launcher, and what it wrote."""

    name: str
    folder: Path
    ranks: int
    ports: int
    process: subprocess.Popen[bytes]

    @property
    def outcome(self) -> Outcome | None:
        """Its outcome, ``None`` before it ended."""
        path = self.folder / "outcome"
        return decode_outcome(path.read_text()) if path.exists() else None

    def log(self) -> str:
        """Return its output."""
        return (self.folder / "log").read_text()

    def get(self, path: str, *, local_rank: int = 0) -> str:
        """Return what one of its ports answers; empty without an answer."""
        url = f"http://127.0.0.1:{self.ports + 50 + local_rank}{path}"
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=5) as reply:
            return str(reply.read().decode())
        return ""


@dataclass(slots=True)
class TorchrunJob:
    """A job's pods on this machine."""

    folder: Path
    command: Sequence[str]
    grace_s: float = 30.0
    environ: dict[str, str] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)
    generation: int = 0

    def start(self, name: str, *, ranks: int = 1) -> Worker:
        """Start a pod. Its peers' port is followed by the rendezvous' ports and, 50 later, by those for metrics."""
        ports = free_ports(190)
        folder = self.folder / name
        (folder / "plan").mkdir(parents=True)
        (folder / "plan" / keys.SECRET_KEY).write_bytes(SECRET)
        paths = [str(ROOT / part) for part in ("core", "trainer")]
        environ = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(paths),
            "HOME": str(self.folder), "FOLDER": str(self.folder), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
            env.RUNTIME: "Torchrun", env.JOB_NAME: "job", env.JOB_UID: "j", env.WORKER: name,
            env.WORKER_UID: f"u-{name}", env.WORKER_ADDRESS: "127.0.0.1",
            env.NUM_PROC_PER_WORKER: str(ranks), env.PLAN_DIR: str(folder / "plan"),
            env.SECRET_DIR: str(folder / "plan"),
            env.PEER_PORT: str(ports), env.METRICS_PORT: str(ports + 50),
            env.TERMINATION_PATH: str(folder / "outcome"),
            env.CONFIG: encode_config(TrainingConfig(grace_s=self.grace_s, peer_timeout_s=ANSWER_S)), **self.environ,
        }  # fmt: skip
        if "PYTHONPYCACHEPREFIX" in os.environ:  # without bytecode, an interpreter with torch starts twice as slowly
            environ["PYTHONPYCACHEPREFIX"] = os.environ["PYTHONPYCACHEPREFIX"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "heterotrain.launch", *self.command], env=environ, stdout=log, stderr=log
            )
        self.workers[name] = Worker(name, folder, ranks, ports, process)
        return self.workers[name]

    def plan(self, *names: str, **fields: Any) -> Plan:
        """Write a plan of the next generation with these workers once they are ready, as the operator would."""
        for name in names:
            ready = self.workers[name]
            wait_until(
                lambda ready=ready: ready.get("/ready") == "ready\n",
                f"{name} to be ready",
                timeout_s=LIMIT_S,
                evidence=self.logs,
            )
        self.generation += 1
        ranks: list[Rank] = []
        for name in names:
            worker = self.workers[name]
            ranks += [
                Rank(
                    rank=len(ranks) + local_rank, member=len(ranks) + local_rank, worker=name, worker_uid=f"u-{name}",
                    address="127.0.0.1", peer_port=worker.ports + local_rank, on_demand=True, local_rank=local_rank,
                )
                for local_rank in range(worker.ranks)
            ]  # fmt: skip
        members = tuple(Member(index=rank.rank, pool="pool", share_samples=1) for rank in ranks)
        defaults: dict[str, Any] = {
            "generation": self.generation, "revision": self.generation, "global_batch_samples": len(ranks),
        }  # fmt: skip
        plan = Plan(job_uid="j", members=members, ranks=tuple(ranks), **(defaults | fields))
        for worker in self.workers.values():
            new = worker.folder / "plan" / "new"
            new.write_text(encode_plan(plan))
            new.rename(worker.folder / "plan" / keys.PLAN_KEY)
        return plan

    def wait_for(self, *files: str) -> None:
        """Wait until the scripts have written these files."""
        wait_until(
            lambda: all((self.folder / file).exists() for file in files),
            f"files {files}, among {sorted(path.name for path in self.folder.iterdir())}",
            timeout_s=LIMIT_S,
            evidence=self.logs,
        )

    def wait_ended(self, *names: str) -> dict[str, Outcome | None]:
        """Wait until these pods have ended, all without names, and return their outcomes."""
        chosen = [self.workers[name] for name in names or self.workers]
        wait_until(
            lambda: all(worker.process.poll() is not None for worker in chosen),
            f"pods {[worker.name for worker in chosen]} to end",
            timeout_s=LIMIT_S,
            evidence=self.logs,
        )
        return {worker.name: worker.outcome for worker in chosen}

    def logs(self) -> str:
        """Return the output of all pods."""
        return "\n".join(f"--- {worker.name}\n{worker.log()}" for worker in self.workers.values())

    def close(self) -> None:
        """End all pods with their processes."""
        for worker in self.workers.values():
            if worker.process.poll() is None:
                worker.process.send_signal(signal.SIGTERM)
        end_s = patience.now_s() + LIMIT_S
        for worker in self.workers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(timeout=max(1.0, end_s - patience.now_s()))
            worker.process.kill()
            worker.process.wait()
