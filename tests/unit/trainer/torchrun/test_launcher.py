"""The launcher of a Torchrun job with real processes: generations, failures, departures, and what it reports."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from heterotrain_core.contract.outcome import Cause, Ending
from support.torchrun_job import LIMIT_S, TorchrunJob
from support.waiting import wait_until

PREAMBLE = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["FOLDER"])
def say(word=""):
    (folder / f"{word}{os.environ['RANK']}of{os.environ['WORLD_SIZE']}").write_text(" ".join(sorted(os.environ)))
def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.02)
"""

Make = Callable[[str], TorchrunJob]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes a job of a script, which begins with ``PREAMBLE``."""
    jobs: list[TorchrunJob] = []

    def made(script: str, **fields: float) -> TorchrunJob:
        path = tmp_path / "train.py"
        path.write_text(PREAMBLE + script)
        jobs.append(TorchrunJob(folder=tmp_path, command=[str(path)], **fields))
        return jobs[-1]

    yield made
    for job in jobs:
        job.close()


def test_all_processes_get_their_rank_and_the_job_finishes(make: Make) -> None:
    """Two pods with two ranks and one. The script sees torchrun's variables, and none of the operator's."""
    job = make("say(); print('done')")
    job.start("a", ranks=2)
    job.start("b")
    job.plan("a", "b")
    outcomes = job.wait_ended()
    assert {outcome and outcome.ending for outcome in outcomes.values()} == {Ending.FINISHED}
    seen = (job.folder / "2of3").read_text().split()
    assert {"MASTER_ADDR", "LOCAL_RANK", "PET_NNODES", "TORCHELASTIC_RUN_ID"} <= set(seen)
    assert not [name for name in seen if name.startswith("HETEROTRAIN_")]


def test_a_launcher_is_ready_before_a_plan_and_reports_the_plan_in_force(make: Make) -> None:
    """The operator names only ready workers, and its status shows the version that every rank reports."""
    job = make("say(); wait_for('end')")
    worker = job.start("a", ranks=2)
    wait_until(lambda: worker.get("/ready") == "ready\n", "a ready worker", timeout_s=LIMIT_S, evidence=job.logs)
    job.plan("a")
    job.wait_for("0of2", "1of2")

    def reports(local_rank: int) -> bool:
        line = rf'^heterotrain_plan_generation{{[^}}]*rank="{local_rank}"[^}}]*}} 1\.0$'
        return re.search(line, worker.get("/metrics", local_rank=local_rank), re.MULTILINE) is not None

    wait_until(lambda: reports(0) and reports(1), "the plan in force", timeout_s=LIMIT_S, evidence=job.logs)
    (job.folder / "end").touch()
    job.wait_ended()


def test_a_new_generation_starts_the_script_again_in_the_new_world(make: Make) -> None:
    """A worker joins: the processes of the first world end, and those of the second world finish the job."""
    job = make("say(); wait_for('end')")
    job.start("a")
    job.plan("a")
    job.wait_for("0of1")
    job.start("b")
    job.plan("a", "b")
    job.wait_for("0of2", "1of2")
    (job.folder / "end").touch()
    outcomes = job.wait_ended()
    assert {outcome and outcome.ending for outcome in outcomes.values()} == {Ending.FINISHED}


def test_the_failure_of_a_script_is_the_worker_s_failure(make: Make) -> None:
    """All launchers are there, so no other plan is to come."""
    job = make("say(); sys.exit('no data') if os.environ['RANK'] == '1' else wait_for('end')")
    job.start("a", ranks=2)
    job.start("b")
    job.plan("a", "b")
    outcome = job.wait_ended("a")["a"]
    assert outcome is not None
    assert (outcome.ending, outcome.reason) == (
        Ending.FAILED,
        "process 1 of the worker ended with exit code 1: no data",
    )
    assert job.workers["a"].process.returncode == 1
    assert job.workers["b"].process.poll() is None, "the other worker waits for the next plan"


def test_a_failure_after_the_loss_of_another_worker_is_no_failure(make: Make) -> None:
    """Survivors whose script ended through a broken connection train on in the next world.

    A stranger who tells the survivor that the script has ended elsewhere is not believed.
    """
    job = make("say()\nif os.environ['WORLD_SIZE'] == '2':\n    wait_for('broken')\n    sys.exit(1)\nwait_for('end')")
    job.start("a")
    lost = job.start("b")
    job.plan("a", "b")
    job.wait_for("0of2", "1of2")
    with socket.create_connection(("127.0.0.1", job.workers["a"].ports), LIMIT_S) as stranger:
        stranger.sendall(b"GET /launcher/finished HTTP/1.0\r\n\r\n".ljust(200, b"F"))
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1000):
                pass
    lost.process.kill()
    lost.process.wait()
    (job.folder / "broken").touch()
    survivor = job.workers["a"]
    wait_until(lambda: "waiting for the next plan" in survivor.log(), "its wait", timeout_s=LIMIT_S, evidence=job.logs)
    job.plan("a")
    job.wait_for("0of1")
    (job.folder / "end").touch()
    outcome = job.wait_ended("a")["a"]
    assert outcome is not None
    assert outcome.ending is Ending.FINISHED


def test_a_failure_after_the_script_has_ended_elsewhere_is_the_script_s(make: Make) -> None:
    """The launcher of a worker that has finished is gone, too, but no plan will follow."""
    job = make("say()\nif os.environ['RANK'] == '1':\n    wait_for('end')\n    sys.exit(1)\nwait_for('1of2')")
    job.start("a")
    job.start("b")
    job.plan("a", "b")
    finished = job.wait_ended("a")["a"]
    assert finished is not None
    assert (finished.ending, finished.cause) == (Ending.FINISHED, Cause.TORCHRUN_SCRIPT)
    (job.folder / "end").touch()
    outcome = job.wait_ended("b")["b"]
    assert outcome is not None
    assert outcome.ending is Ending.FAILED


@pytest.mark.parametrize("handled", [True, False])
def test_a_worker_that_is_told_to_end_has_left(make: Make, handled: bool) -> None:
    """SIGTERM reaches the script, which may write a checkpoint; whatever its exit code, the worker has left."""
    save = "signal.signal(signal.SIGTERM, lambda *_: (say('saved'), os._exit(0)))\n" if handled else ""
    job = make(f"{save}say(); wait_for('end')")
    worker = job.start("a")
    job.plan("a")
    job.wait_for("0of1")
    worker.process.send_signal(signal.SIGTERM)
    outcome = job.wait_ended("a")["a"]
    assert outcome is not None
    assert (outcome.ending, outcome.told) == (Ending.LEFT, True)
    assert (job.folder / "saved0of1").exists() == handled


def test_a_script_that_ignores_sigterm_is_killed_before_the_grace_period_ends(make: Make) -> None:
    """Otherwise the kubelet would kill the launcher, which could then not write its outcome."""
    job = make("signal.signal(signal.SIGTERM, signal.SIG_IGN); say(); wait_for('end')", grace_s=1.0)
    worker = job.start("a")
    job.plan("a")
    job.wait_for("0of1")
    worker.process.send_signal(signal.SIGTERM)
    outcome = job.wait_ended("a")["a"]
    assert outcome is not None
    assert outcome.ending is Ending.LEFT
    assert "killing them" in worker.log()


def test_nothing_that_the_script_started_outlives_its_generation(make: Make) -> None:
    """A grandchild would keep the device that the next world needs."""
    job = make(
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.pause()'])\n"
        "(folder / 'grandchild').write_text(str(child.pid)); say()\n"
        "wait_for('end')"
    )
    job.start("a")
    job.plan("a")
    job.wait_for("0of1")
    pid = int((job.folder / "grandchild").read_text())
    job.plan("a")
    wait_until(lambda: not _running(pid), "the grandchild's end", timeout_s=LIMIT_S, evidence=job.logs)


def _running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"
