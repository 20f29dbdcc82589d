"""Loops as people write them end on uneven ranks as with plain torch on whole batches, through losses and joins."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.finer_loops import TOLERANCES
from distributed.harness import LIMIT_S, REAL_START_S, START_S, Gate, Operator, Worker, Zygote
from distributed.ordinary_loops import Recipe, alone, recipes
from distributed.refused_loops import REFUSED
from distributed.setups import distance
from distributed.test_launching import environment
from support.ports import free_port
from support.repeat import is_thorough, part_of

Operate = Callable[..., Operator]
EPOCHS = 3
EVERY = """
import faulthandler, os, sys
import heterotrain.session
import torch
import torch._dynamo  # every optimizer needs it
from distributed.ordinary_loops import train

torch.set_num_threads(1)
port = int(os.environ.get("MASTER_PORT", "0"))
for number, recipe in enumerate(sys.argv[3].split(",")):
    child = os.fork()  # one job for each process, and torch is imported once
    if not child:
        faulthandler.dump_traceback_later(60, exit=True)  # a loop takes about one second
        if port:
            os.environ |= {"MASTER_PORT": sys.argv[2].split(",")[number], "TORCHELASTIC_USE_AGENT_STORE": "False"}
        train(out=sys.argv[1], recipe=recipe, epochs=3)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{recipe} failed")
"""
"""Runs loops, one after the other; one that hangs is named, with its stack."""


def started(operator: Operator, recipe: str, *, faults: dict[int, dict[str, object]]) -> list[Worker]:
    """Start three workers with uneven shares, one of them without samples."""
    workers = [
        operator.start(f"w{i}", script="distributed.ordinary_loops:train", recipe=recipe, fault=faults.get(i))
        for i in range(3)
    ]
    operator.until_ready(*workers)
    is_cut = recipes().get(recipe, Recipe).is_cut  # those that a job refuses are in no list
    operator.plan(workers, shares=(11, 0, 5), micro=(4, 0, 0) if is_cut else (0, 0, 0))
    return workers


def check(operator: Operator, recipe: str, workers: list[Worker]) -> None:
    """Compare the results of all workers with plain torch."""
    expected = alone(recipe, epochs=EPOCHS)
    for worker in workers:
        assert worker.code == 0, worker.log()
        assert distance(operator.weights(worker), expected) < TOLERANCES.get(recipe, 1e-10), worker.name


@pytest.mark.parametrize("recipe", part_of(recipes(), of=3))
def test_a_loop_equals_plain_torch(operate: Operate, recipe: str) -> None:
    """On three ranks, one with micro-batches and one without samples."""
    operator = operate(epochs=EPOCHS)
    workers = started(operator, recipe, faults={})
    operator.finish(workers)
    check(operator, recipe, workers)


@pytest.mark.parametrize("ranks", [3, pytest.param(1, marks=pytest.mark.thorough)])
def test_loops_run_alone_and_under_torchrun(tmp_path: Path, ranks: int) -> None:
    """The same script, without a worker pod around it, ends as with plain torch."""
    names = [*recipes()][2 :: 1 if is_thorough() else 3] + ([*recipes()][:2] if is_thorough() else [])
    (tmp_path / "train.py").write_text(EVERY)
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]
    ports = ",".join(str(free_port()) for _ in names)
    done = subprocess.run(
        [*command, str(tmp_path / "train.py"), str(tmp_path), ports, ",".join(names)],
        env=environment(tmp_path), capture_output=True, text=True, timeout=REAL_START_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    for recipe in names:
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


@pytest.mark.parametrize("recipe", part_of([*recipes()][1:] + [*recipes()][:1], of=3))
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


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_habit_that_cannot_work_ends_with_its_sentence(zygote: Zygote, tmp_path: Path, ranks: int) -> None:
    """Alone and under torchrun, where the rank that fails first may keep others from coming as far."""
    running: dict[str, list[tuple[Path, queue.Queue[dict[str, Any]]]]] = {habit: [] for habit in REFUSED}
    for habit, processes in running.items():
        port = free_port()
        for rank in range(ranks):
            environ = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
            output = tmp_path / f"{habit}-{rank}"
            command = {
                "environ": environ if ranks > 1 else {}, "output": str(output),
                "script": "distributed.refused_loops:train", "arguments": {"out": "", "habit": habit},
            }  # fmt: skip
            processes.append((output, zygote.start(str(output), command)))
    for habit, processes in running.items():
        for output, inbox in processes:
            assert "pid" in inbox.get(timeout=START_S)
            assert inbox.get(timeout=LIMIT_S)["code"] == 1, output.read_text()
        check_sentence(habit, [output.read_text() for output, _ in processes])


def test_a_habit_that_cannot_work_ends_workers_with_its_sentence(operate: Operate) -> None:
    """One rank after the other. The last one may wait for the operator, which finds the reason in the others' ends."""
    operator = operate(epochs=1)
    running = {
        habit: [operator.start(f"{habit}-{i}", script="distributed.refused_loops:train", habit=habit) for i in range(3)]
        for habit in REFUSED
    }
    for workers in running.values():
        operator.plan(workers)
    for habit, workers in running.items():
        for worker in workers:
            operator.until(
                lambda worker=worker: worker.poll() == 1 or "waiting for the operator" in worker.log(),  # type: ignore[misc]  # a default argument binds the loop's variable
                f"{worker.name} ends",
            )
        check_sentence(habit, [worker.log() for worker in workers if worker.poll() == 1])


def check_sentence(habit: str, outputs: list[str]) -> None:
    """Fail unless a rank has ended with the habit's sentence, as its last line."""
    last = [output.rstrip().splitlines()[-1] for output in outputs]
    assert any("UsageError: " in line and REFUSED[habit][1] in line for line in last), "\n".join(outputs)
