"""Unchanged scripts for torchrun in jobs: real launchers, real DistributedDataParallel, and a lost worker."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed.harness import Zygote
from distributed.test_examples import started
from heterotrain_core.contract.outcome import Ending
from support.torchrun_job import ROOT, TorchrunJob

EXAMPLE = ROOT / "deploy/examples/torchrun/train.py"
EPOCHS = 12


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[list[TorchrunJob]]:
    """Return a list of jobs that end with the test."""
    made: list[TorchrunJob] = []
    yield made
    for job in made:
        job.close()


def loss_of(text: str) -> float:
    """Return the loss that the script printed, once."""
    (found,) = re.findall(r"^loss (\S+)$", text, re.MULTILINE)
    return float(found)


def alone(zygote: Zygote, folder: Path, epochs: int) -> float:
    """Return the loss of the example in one process, as torchrun would start it."""
    options = ["--epochs", str(epochs), "--checkpoint", str(folder / "alone.pt")]
    command: dict[str, object] = {"path": str(EXAMPLE), "arguments": options}
    (output,) = started(zygote, folder, command, 1, launcher=True)
    return loss_of(output)


def test_a_script_for_torchrun_survives_a_lost_worker_with_the_loss_of_an_undisturbed_run(
    zygote: Zygote, tmp_path: Path, jobs: list[TorchrunJob]
) -> None:
    """A worker is killed after the second epoch: the other one continues from the script's own checkpoint."""
    expected = alone(zygote, tmp_path, EPOCHS)
    folder = tmp_path / "job"
    folder.mkdir()
    # Rank 0 waits after the second epoch, so that the loss comes before the end, however fast the machine is.
    gate = (
        "import os, pathlib, runpy, sys, time, torch\n"
        "save = torch.save\n"
        "def gated(saved, path):\n"
        "    save(saved, path)\n"
        "    if saved['epoch'] == 3 and os.environ['WORLD_SIZE'] == '2':\n"
        "        (pathlib.Path(os.environ['FOLDER']) / 'third').touch()\n"
        "        time.sleep(3600)\n"
        "torch.save = gated\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    (folder / "gate.py").write_text(gate)
    checkpoint = folder / "checkpoint.pt"
    command = [str(folder / "gate.py"), str(EXAMPLE), "--epochs", str(EPOCHS), "--checkpoint", str(checkpoint)]
    job = TorchrunJob(folder=folder, command=command)
    jobs.append(job)
    job.start("a")
    lost = job.start("b")
    job.plan("a", "b")
    job.wait_for("third")
    lost.process.kill()
    lost.process.wait()
    job.plan("a")
    outcome = job.wait_ended("a")["a"]
    assert outcome is not None
    assert outcome.ending is Ending.FINISHED, job.logs()
    log = job.workers["a"].log()
    assert re.findall(r"^epoch (\d+) with (\d) processes$", log, re.MULTILINE) == [("0", "2"), ("2", "1")]
    assert loss_of(log) == pytest.approx(expected, abs=1e-5)


@pytest.mark.thorough
def test_torchrun_itself_runs_in_each_pod(zygote: Zygote, tmp_path: Path, jobs: list[TorchrunJob]) -> None:
    """``heterotrain-run torchrun train.py``: two agents of torchrun, three processes, the loss of one process."""
    expected = alone(zygote, tmp_path, 2)
    folder = tmp_path / "job"
    folder.mkdir()
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    assert torchrun is not None
    command = [torchrun, str(EXAMPLE), "--epochs", "2", "--checkpoint", str(folder / "checkpoint.pt")]
    job = TorchrunJob(folder=folder, command=command)
    jobs.append(job)
    job.start("a", ranks=2)
    job.start("b")
    job.plan("a", "b")
    outcomes = job.wait_ended()
    assert {outcome and outcome.ending for outcome in outcomes.values()} == {Ending.FINISHED}, job.logs()
    assert "epoch 0 with 3 processes" in job.logs()
    assert loss_of(job.logs()) == pytest.approx(expected, abs=1e-5)


@pytest.mark.thorough
def test_a_script_with_this_library_takes_its_ranks_from_torchrun_s_variables(
    zygote: Zygote, tmp_path: Path, jobs: list[TorchrunJob]
) -> None:
    """``runtime: Torchrun`` also runs the port of the DDP example, with the result of the original."""
    folder = ROOT / "deploy/examples/from-ddp"
    expected = loss_of(started(zygote, tmp_path, {"path": str(folder / "before.py"), "arguments": []}, 2)[0])
    job = TorchrunJob(folder=tmp_path, command=[str(folder / "after.py")])
    jobs.append(job)
    for name in ("a", "b"):
        job.start(name)
    job.plan("a", "b")
    outcomes = job.wait_ended()
    assert {outcome and outcome.ending for outcome in outcomes.values()} == {Ending.FINISHED}, job.logs()
    losses = [float(found) for found in re.findall(r"^loss (\S+)$", job.logs(), re.MULTILINE)]
    assert losses == pytest.approx([expected, expected], abs=2e-6)
