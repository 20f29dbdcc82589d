"""Loops as people write them end on uneven ranks as with plain torch on whole batches, through losses and joins."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from distributed.finer_loops import TOLERANCES
from distributed.harness import START_S, Gate, Operator, Worker
from distributed.ordinary_loops import alone, recipes
from distributed.setups import distance
from distributed.test_launching import environment
from support.ports import free_port

Operate = Callable[..., Operator]
EPOCHS = 3
EVERY = """
import os, sys
import heterotrain.session
import torch
import torch._dynamo  # every optimizer needs it
from distributed.ordinary_loops import recipes, train

torch.set_num_threads(1)
port = int(os.environ.get("MASTER_PORT", "0"))
for number, recipe in enumerate(recipes()):
    child = os.fork()  # one job for each process, and torch is imported once
    if not child:
        if port:
            os.environ |= {"MASTER_PORT": sys.argv[2].split(",")[number], "TORCHELASTIC_USE_AGENT_STORE": "False"}
        train(out=sys.argv[1], recipe=recipe, epochs=3)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{recipe} failed")
"""
"""Runs all loops, one after the other."""


def started(operator: Operator, recipe: str, *, faults: dict[int, dict[str, object]]) -> list[Worker]:
    """Start three workers with uneven shares, one of them without samples."""
    workers = [
        operator.start(f"w{i}", script="distributed.ordinary_loops:train", recipe=recipe, fault=faults.get(i))
        for i in range(3)
    ]
    operator.until_ready(*workers)
    operator.plan(workers, shares=(11, 0, 5), micro=(4, 0, 0))
    return workers


def check(operator: Operator, recipe: str, workers: list[Worker]) -> None:
    """Compare the results of all workers with plain torch."""
    expected = alone(recipe, epochs=EPOCHS)
    for worker in workers:
        assert worker.code == 0, worker.log()
        assert distance(operator.weights(worker), expected) < TOLERANCES.get(recipe, 1e-10), worker.name


@pytest.mark.parametrize("recipe", recipes())
def test_a_loop_equals_plain_torch(operate: Operate, recipe: str) -> None:
    """On three ranks, one with micro-batches and one without samples."""
    operator = operate(epochs=EPOCHS)
    workers = started(operator, recipe, faults={})
    operator.finish(workers)
    check(operator, recipe, workers)


@pytest.mark.timeout(600)  # 23 trainings, one after the other
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_loop_runs_alone_and_under_torchrun(tmp_path: Path, ranks: int) -> None:
    """The same script, without a worker pod around it, ends as with plain torch."""
    (tmp_path / "train.py").write_text(EVERY)
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]
    ports = ",".join(str(free_port()) for _ in recipes())
    done = subprocess.run(
        [*command, str(tmp_path / "train.py"), str(tmp_path), ports],
        env=environment(tmp_path), capture_output=True, text=True, timeout=2 * START_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    for recipe in recipes():
        expected = alone(recipe, epochs=EPOCHS)
        for rank in range(ranks):
            found = torch.load(tmp_path / f"{recipe}-{rank if ranks > 1 else 'alone'}.pt")
            assert distance(found, expected) < TOLERANCES.get(recipe, 1e-10), (recipe, rank)


@pytest.mark.parametrize(("recipe", "epoch"), [("Plateau", 1), ("HeadSwap", 0)])
@pytest.mark.parametrize("place", ["hook", "hook end"])
@pytest.mark.parametrize("do", ["lose", "die"])
def test_state_changed_in_hooks_changes_once(operate: Operate, recipe: str, epoch: int, place: str, do: str) -> None:
    """Whether a worker is lost in the hook, or one loses a message when the others have finished or not."""
    operator = operate(epochs=EPOCHS)
    workers = started(operator, recipe, faults={2: {"place": place, "step": epoch, "do": do}})
    operator.finish(workers)
    if do == "die":
        assert workers.pop().code == -signal.SIGKILL
    check(operator, recipe, workers)


@pytest.mark.parametrize("recipe", recipes())
def test_a_loop_survives_a_loss_and_a_join(operate: Operate, recipe: str) -> None:
    """A worker is lost in the first epoch, and another joins in the second one."""
    operator = operate(epochs=EPOCHS)
    gate = Gate(operator.folder, 9)
    workers = started(operator, recipe, faults={2: {"place": "launched", "step": 3}, 0: gate.fault})
    operator.until(gate.reached, "the first worker is in the second epoch")
    assert workers.pop().poll() == -signal.SIGKILL
    workers.append(operator.start("w3", script="distributed.ordinary_loops:train", recipe=recipe))
    operator.until_ready(workers[-1])
    operator.plan(workers, shares=(3, 8, 5))
    gate.open()
    operator.finish(workers)
    check(operator, recipe, workers)


@pytest.mark.parametrize("recipe", ["Apart", "ApartAlike"])
def test_a_rank_that_trains_other_parameters_is_refused(operate: Operate, recipe: str) -> None:
    """It ends with a message before its gradients reach the others, who go on without it."""
    operator = operate(epochs=1)
    workers = started(operator, recipe, faults={})
    operator.finish(workers)
    assert [worker.code for worker in workers] == [0, 1, 0]
    last = workers[1].log().splitlines()[-1]
    assert "UsageError" in last
    assert "on every rank" in last
