"""Whole interpreters, started as by users: the launcher with several ranks in a pod, and torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distributed.harness import REAL_START_S, ROOT, START_S, Inbox, Worker, assert_same_weights, deliver, reference
from heterotrain_core.contract import env
from heterotrain_core.contract.config import TrainingConfig, encode_config
from heterotrain_core.contract.outcome import Ending
from support.plans import plan_of
from support.ports import free_port
from support.waiting import wait_until

SCRIPT = """
import json, os, pathlib, torch, heterotrain
from distributed.scripts import net, optimizer_of, problem
torch.set_num_threads(1)
job = heterotrain.init(epochs=2, batch_samples=16)
name = os.environ.get("RANK") or os.environ.get("HETEROTRAIN_LOCAL_RANK")
pathlib.Path(f"{os.environ['FOLDER']}/leads-{name}").write_text(str(job.is_leader))
model = job.wrap(net())
optimizer = job.optimizer(optimizer_of(model))
for step in job.steps(problem(96)):
    with step:
        for x, y in step.micro_batches():
            step.backward(((model(x) - y) ** 2).mean())
        step.apply(optimizer)
torch.save(model.state_dict(), f"{os.environ['FOLDER']}/weights-{name}.pt")
"""


def environment(folder: Path) -> dict[str, str]:
    """Return variables with which a new interpreter finds the project's packages and keeps the bytecode of all modules.

    Without bytecode an interpreter with torch takes seven seconds of a core to start instead of three.
    """
    paths = [str(ROOT / part) for part in ("core", "trainer", "tests")]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    kept = {"PYTHONPYCACHEPREFIX": str(folder.parent / "bytecode")} | environ
    return kept | {"PYTHONPATH": os.pathsep.join(paths), "FOLDER": str(folder), "OMP_NUM_THREADS": "1"}


def test_a_torchrun_script_runs_at_fixed_shares(tmp_path: Path) -> None:
    """The same script under torchrun: even shares, the weights of one process."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
        str(tmp_path / "train.py"),
    ]  # fmt: skip
    done = subprocess.run(
        command, env=environment(tmp_path), capture_output=True, text=True, timeout=REAL_START_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert [(tmp_path / f"leads-{rank}").read_text() for rank in range(2)] == ["True", "False"]  # from the first line
    expected, _ = reference(epochs=2)
    for rank in range(2):
        assert_same_weights(dict(torch.load(tmp_path / f"weights-{rank}.pt")), expected)


@pytest.mark.thorough
def test_torchrun_does_not_succeed_after_sigterm(tmp_path: Path) -> None:
    """One of two ranks is told to go in the third step: both leave with 143, and torchrun reports a failure."""
    told = "    with step:\n        if job.identity.rank == 1 and step.number == 2: os.kill(os.getpid(), 15)\n"
    script = SCRIPT.replace("    with step:\n", told).replace("job.steps(", "watched(")
    (tmp_path / "train.py").write_text(script.replace("for step in", WATCHED + "for step in"))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
        str(tmp_path / "train.py"),
    ]  # fmt: skip
    done = subprocess.run(
        command, env=environment(tmp_path), capture_output=True, text=True, timeout=REAL_START_S, check=False
    )
    assert done.returncode != 0, done.stderr[-4000:]
    assert [(tmp_path / f"code-{rank}").read_text() for rank in range(2)] == ["143", "143"], done.stderr[-4000:]


WATCHED = """
def watched(data):
    try:
        yield from job.steps(data)
    except SystemExit as leaving:
        pathlib.Path(f"{os.environ['FOLDER']}/code-{job.identity.rank}").write_text(str(leaving.code))
        raise
"""
"""Part of the script: notes the exit code with which ``job.steps`` ends the process."""


def test_two_ranks_in_one_pod(tmp_path: Path) -> None:
    """The launcher starts both, the plan names both, and the pod leaves one termination message."""
    peer_port, metrics_port = pair_of_ports(), pair_of_ports()
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "plan").mkdir()
    variables = {
        env.JOB_UID: "job-uid", env.JOB_NAME: "test", env.WORKER: "w0", env.WORKER_UID: "u0",
        env.WORKER_ADDRESS: "127.0.0.1", env.PEER_PORT: str(peer_port), env.METRICS_PORT: str(metrics_port),
        env.PLAN_DIR: str(tmp_path / "plan"), env.TERMINATION_PATH: str(tmp_path / "termination"),
        env.NUM_PROC_PER_WORKER: "2", env.CONFIG: encode_config(TrainingConfig(epochs=2)),
    }  # fmt: skip
    plan = plan_of([10, 6], job_uid="job-uid", revision=1)
    ranks = tuple(
        replace(each, worker="w0", worker_uid="u0", peer_port=peer_port + each.rank, local_rank=each.rank)
        for each in plan.ranks
    )
    plan = replace(plan, ranks=ranks)
    command = [sys.executable, "-m", "heterotrain.launch", str(tmp_path / "train.py")]
    pod = subprocess.Popen(command, env=environment(tmp_path) | variables)
    worker = Worker(
        name="w0", uid="u0", folder=tmp_path, peer_port=peer_port, metrics_port=metrics_port, inbox=Inbox()
    )  # fmt: skip
    try:

        def ready() -> bool:
            assert pod.poll() is None
            return worker.ready()

        wait_until(ready, "the pod is ready", timeout_s=START_S, every_s=0.05)
        deliver(plan, worker)
        assert pod.wait(timeout=REAL_START_S) == 0
    finally:
        if pod.poll() is None:
            pod.terminate()
    assert json.loads((tmp_path / "termination").read_text())["ending"] == Ending.FINISHED
    expected, _ = reference(epochs=2)
    for rank in range(2):
        assert_same_weights(dict(torch.load(tmp_path / f"weights-{rank}.pt")), expected)


def pair_of_ports() -> int:
    """Return a port whose successor is also free."""
    while True:
        port = free_port()
        if free_port() == port + 1:
            return port
