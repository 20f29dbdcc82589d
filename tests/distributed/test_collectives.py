"""Scripts with collectives of their own survive losses wherever a call can be repeated; elsewhere it is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from distributed.collective_scripts import contrast, towers
from distributed.harness import Operator, Worker, assert_finished, check_weights
from distributed.scripts import batches, optimizer_of, problem

Operate = Callable[..., Operator]


@pytest.mark.parametrize("do", ["die", "leave", "cut"])
@pytest.mark.parametrize(("place", "visit"), [("between collectives", 4), ("in a hook", 0)])
def test_a_loss_between_two_collectives_of_the_script_is_survived(
    operate: Operate, tmp_path: Path, place: str, visit: int, do: str
) -> None:
    """The survivors repeat the step or the hook, and end with the weights and samples of an undisturbed run."""
    operator = operate(peer_timeout_s=0.3 if do == "cut" else 3.0)
    fault = {"place": place, "step": visit, "do": do, "release": str(tmp_path / "never")}
    workers = operator.start_workers(3, faults={1: fault}, script="distributed.collective_scripts:train")
    operator.plan(workers)
    assert_finished(operator, [workers[0], workers[2]])


@pytest.mark.parametrize(
    ("where", "call"),
    [
        ("before the first step", "job.sum"),  # torch itself reports there that it has no group yet
        ("between steps", "job.sum"),
        ("between steps", "torch.distributed"),
        ("after step.apply", "job.sum"),
        ("after step.apply", "torch.distributed"),
    ],
)
def test_an_exchange_that_nothing_would_repeat_is_refused_at_once(operate: Operate, where: str, call: str) -> None:
    """The first such call fails on every rank, with one sentence that names the places where it works."""
    operator = operate()
    workers = [
        operator.start(f"w{i}", script="distributed.collective_scripts:elsewhere", where=where, call=call)
        for i in range(2)
    ]
    if where != "before the first step":
        operator.until_ready(*workers)
        operator.plan(workers)
    operator.finish(workers)
    name = "job.sum" if call == "job.sum" else "torch.distributed.all_reduce"
    for worker in workers:
        assert worker.code == 1, worker.log()
        assert f"{name} can be used inside `with step:` before step.apply, and in hooks" in worker.log()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("another collective", "calls torch.distributed.barrier while rank 1 calls torch.distributed.all_reduce"),
        ("another shape", "calls torch.distributed.all_gather (float32[2]) while rank 1 calls"),
        ("only one rank", "is in step.apply while this rank is in a collective of torch.distributed"),
        ("new_group", "new_group is not available in a job"),
        ("new_group of gloo", "new_group is not available in a job"),
        ("send", "torch.distributed.send is not available in a job"),
    ],
)
def test_a_collective_that_ranks_do_not_share_ends_in_an_error(operate: Operate, what: str, message: str) -> None:
    """No rank waits for ever; one of them says which calls differ."""
    operator = operate()
    workers = operator.start_workers(2, script="distributed.collective_scripts:mistake", what=what)
    operator.plan(workers)
    operator.until(lambda: any(message in worker.log() for worker in workers), "an error names the calls")


Parts = list[tuple[list[int], int]]


def alone(parts: Callable[[list[int]], Parts] = lambda chosen: [(chosen, 16)]) -> dict[str, torch.Tensor]:
    """Train in this process; ``parts`` returns a step's samples that are compared with each other, and their weight."""
    (x, _), model = problem(96).tensors, towers()
    optimizer = optimizer_of(model)
    for _, chosen in batches(epochs=2):
        optimizer.zero_grad()
        for rows, weight in parts(chosen):
            (contrast(model, x[rows], lambda rows: (rows, 0)) * (weight / 16)).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def contrasting(operator: Operator, *, faults: Mapping[int, dict[str, object]] = {}, **plan: object) -> list[Worker]:
    """Start three workers with a contrastive loss and these faults, and write a plan."""
    workers = operator.start_workers(3, faults=faults, script="distributed.collective_scripts:contrastive")
    operator.plan(workers, **plan)
    return workers


@pytest.mark.parametrize("shares", [(9, 5, 2), (10, 0, 6), (0, 16, 0)])
def test_a_contrastive_loss_over_all_ranks_has_the_gradient_of_one_process(
    operate: Operate, shares: tuple[int, ...]
) -> None:
    """Shares differ, and some are zero: the weights are those of one process that compares the whole batch."""
    operator = operate()
    check_weights(operator, contrasting(operator, shares=shares), alone())


def test_ranks_with_different_numbers_of_micro_batches_compare_those_of_the_same_round(operate: Operate) -> None:
    """The rank with one micro-batch and the one without samples join each round; rounds end with the last ones."""
    operator = operate()
    workers = contrasting(operator, shares=(8, 8, 0), micro=(4, 0, 0))
    # In the second round the rank with the last 4 of its 8 samples meets the 8 of the other rank; each loss is a mean
    # over own samples, so the sum over 12 samples divided by 16.
    check_weights(operator, workers, alone(lambda chosen: [(chosen[:4], 4), (chosen[4:], 12)]))


@pytest.mark.parametrize("do", ["die", "leave", "cut"])
def test_a_loss_in_a_gather_of_the_forward_pass_is_survived(operate: Operate, tmp_path: Path, do: str) -> None:
    """The survivors repeat the step among themselves, and the gradient stays that of the whole batch."""
    operator = operate(peer_timeout_s=0.3 if do == "cut" else 3.0)
    fault = {"place": "in forward", "step": 4, "do": do, "release": str(tmp_path / "never")}
    workers = contrasting(operator, faults={1: fault})
    check_weights(operator, [workers[0], workers[2]], alone())


@pytest.mark.parametrize("place", ["between collectives", "in forward"])
def test_running_out_of_memory_between_exchanges_of_the_script_repeats_the_step(operate: Operate, place: str) -> None:
    """The others wait for that rank's next exchange; they repeat the step too, while that rank cuts its share."""
    operator = operate()
    fault = {"place": place, "step": 4, "do": "exhaust"}
    workers = operator.start_workers(3, faults={1: fault}, collectives=True)
    operator.plan(workers)
    assert_finished(operator, workers)
    assert "out of memory with micro-batches of 5 samples: using 2 from now on" in workers[1].log()


def test_a_gather_without_lockstep_is_refused_at_once(operate: Operate) -> None:
    """Otherwise it would work until shares differ."""
    operator = operate()
    worker = operator.start_ready("w0", script="distributed.collective_scripts:contrastive", lockstep=False)
    operator.plan([worker])
    operator.finish([worker])
    assert "step.all_gather needs job.steps(..., lockstep=True)" in worker.log()
