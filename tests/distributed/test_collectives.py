"""Scripts with collectives of their own survive losses wherever a call can be repeated; elsewhere it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from distributed.collective_scripts import contrast, towers
from distributed.harness import Operator, Worker, assert_same_weights, reference
from distributed.scripts import optimizer_of, problem
from heterotrain.data.order import permutation
from heterotrain_core.contract.outcome import Ending
from support.lineage import lineage

Operate = Callable[..., Operator]


@pytest.mark.parametrize("do", ["die", "leave", "cut"])
@pytest.mark.parametrize(("place", "visit"), [("between collectives", 4), ("in a hook", 0)])
def test_a_loss_between_two_collectives_of_the_script_is_survived(
    operate: Operate, tmp_path: Path, place: str, visit: int, do: str
) -> None:
    """The survivors repeat the step or the hook, and end with the weights and samples of an undisturbed run."""
    operator = operate(peer_timeout_s=0.3 if do == "cut" else 3.0)
    fault = {"place": place, "step": visit, "do": do, "release": str(tmp_path / "never")}
    workers = [
        operator.start(f"w{i}", script="distributed.collective_scripts:train", fault=fault if i == 1 else None)
        for i in range(3)
    ]
    operator.until_ready(*workers)
    operator.plan(workers)
    survivors = [workers[0], workers[2]]
    operator.finish(survivors)
    expected, ids = reference(epochs=2)
    for worker in survivors:
        assert worker.outcome is not None, worker.log()
        assert (worker.code, worker.outcome.ending) == (0, Ending.FINISHED), worker.log()
        assert_same_weights(operator.weights(worker), expected)
    assert lineage(operator.folder / "samples") == ids


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
    workers = [operator.start(f"w{i}", script="distributed.collective_scripts:mistake", what=what) for i in range(2)]
    operator.until_ready(*workers)
    operator.plan(workers)
    operator.until(lambda: any(message in worker.log() for worker in workers), "an error names the calls")


def alone(*, cuts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Train in this process; ``cuts`` has the numbers of samples that are compared with each other, by step."""
    (x, _), model = problem(96).tensors, towers()
    optimizer = optimizer_of(model)
    for epoch in range(2):
        order = permutation(seed=0, epoch=epoch, epoch_samples=96, shuffle=True).tolist()
        for number, sizes in enumerate(cuts):
            begin = 16 * number
            optimizer.zero_grad()
            for size in sizes:
                chosen = x[order[begin : begin + size]]
                (contrast(model, chosen, lambda rows: (rows, 0)) * (size / 16)).backward()
                begin += size
            optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def contrasting(operator: Operator, count: int, *, fault: dict[str, object] | None = None) -> list[Worker]:
    """Start workers with a contrastive loss, the second of them with a fault."""
    workers = [
        operator.start(f"w{i}", script="distributed.collective_scripts:contrastive", fault=fault if i == 1 else None)
        for i in range(count)
    ]
    operator.until_ready(*workers)
    return workers


@pytest.mark.parametrize("shares", [(9, 5, 2), (10, 0, 6), (0, 16, 0)])
def test_a_contrastive_loss_over_all_ranks_has_the_gradient_of_one_process(
    operate: Operate, shares: tuple[int, ...]
) -> None:
    """Shares differ, and some are zero: the weights are those of one process that compares the whole batch."""
    operator = operate()
    workers = contrasting(operator, 3)
    operator.plan(workers, shares=shares)
    operator.finish(workers)
    for worker in workers:
        assert worker.code == 0, worker.log()
        assert_same_weights(operator.weights(worker), alone(cuts=[[16]] * 6))


def test_ranks_with_different_numbers_of_micro_batches_compare_those_of_the_same_round(operate: Operate) -> None:
    """The rank with one micro-batch and the one without samples join each round; rounds end with the last ones."""
    operator = operate()
    workers = contrasting(operator, 3)
    operator.plan(workers, shares=(8, 8, 0), micro=(4, 0, 0))
    operator.finish(workers)
    finals = [operator.weights(worker) for worker in workers if worker.code == 0]
    assert len(finals) == 3, operator.evidence()
    (x, _), model = problem(96).tensors, towers()
    optimizer = optimizer_of(model)
    for epoch in range(2):
        order = permutation(seed=0, epoch=epoch, epoch_samples=96, shuffle=True).tolist()
        for begin in range(0, 96, 16):
            optimizer.zero_grad()
            first, rest = x[order[begin : begin + 4]], x[order[begin + 4 : begin + 16]]
            (contrast(model, first, lambda rows: (rows, 0)) * 4 / 16).backward()
            # In the second round the rank with the last 4 of its 8 samples meets the 8 of the other rank; each loss is
            # a mean over own samples, so the sum over 12 samples divided by 16.
            (contrast(model, rest, lambda rows: (rows, 0)) * 12 / 16).backward()
            optimizer.step()
    expected = {name: value.detach() for name, value in model.state_dict().items()}
    for found in finals:
        assert_same_weights(found, expected)


@pytest.mark.parametrize("do", ["die", "leave", "cut"])
def test_a_loss_in_a_gather_of_the_forward_pass_is_survived(operate: Operate, tmp_path: Path, do: str) -> None:
    """The survivors repeat the step among themselves, and the gradient stays that of the whole batch."""
    operator = operate(peer_timeout_s=0.3 if do == "cut" else 3.0)
    fault = {"place": "in forward", "step": 4, "do": do, "release": str(tmp_path / "never")}
    workers = contrasting(operator, 3, fault=fault)
    operator.plan(workers)
    survivors = [workers[0], workers[2]]
    operator.finish(survivors)
    for worker in survivors:
        assert worker.code == 0, worker.log()
        assert_same_weights(operator.weights(worker), alone(cuts=[[16]] * 6))


@pytest.mark.parametrize("place", ["between collectives", "in forward"])
def test_running_out_of_memory_between_exchanges_of_the_script_repeats_the_step(operate: Operate, place: str) -> None:
    """The others wait for that rank's next exchange; they repeat the step too, while that rank cuts its share."""
    operator = operate()
    fault = {"place": place, "step": 4, "do": "exhaust"}
    workers = [operator.start(f"w{i}", collectives=True, fault=fault if i == 1 else None) for i in range(3)]
    operator.until_ready(*workers)
    operator.plan(workers)
    operator.finish(workers)
    expected, ids = reference(epochs=2)
    for worker in workers:
        assert worker.code == 0, worker.log()
        assert_same_weights(operator.weights(worker), expected)
    assert lineage(operator.folder / "samples") == ids
    assert "out of memory with micro-batches of 5 samples: using 2 from now on" in workers[1].log()


def test_a_gather_without_lockstep_is_refused_at_once(operate: Operate) -> None:
    """Otherwise it would work until shares differ."""
    operator = operate()
    worker = operator.start("w0", script="distributed.collective_scripts:contrastive", lockstep=False)
    operator.until_ready(worker)
    operator.plan([worker])
    operator.finish([worker])
    assert "step.all_gather needs job.steps(..., lockstep=True)" in worker.log()
