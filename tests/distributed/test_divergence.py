"""One rank's copy of the training state comes apart from the others': all ranks notice, and act as configured."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import heterotrain
import pytest
import torch
from distributed.harness import Operator, Worker, reference
from distributed.scripts import net, optimizer_of, problem
from distributed.setups import distance
from heterotrain.steps import replicas
from heterotrain_core.contract.outcome import Ending

Operate = Callable[..., Operator]
AT = 20
"""Committed steps before the change."""
KINDS = {
    "weight": "2.weight",
    "moment": "momentum_buffer of 2.weight",
    "buffer": "1.running_mean",
    "rate": "settings of the optimizer (such as its learning rate)",
}


def train(
    *,
    out: str,
    change: str | None = None,
    by: float = 1e-9,
    kind: str | None = None,
    last: bool = False,
    always: bool = False,
) -> None:
    """Train a small model; after ``AT`` steps something changes on this rank only.

    Args:
        out: folder for weights.
        change: one of ``KINDS``; ``None`` for nothing.
        by: the change is so large, relatively.
        kind: pretend to be a device of this kind.
        last: the change comes after the last step.
        always: the change comes before each step.
    """
    if kind is not None:
        replicas.kind_of = lambda _device: kind  # type: ignore[assignment]  # a deliberate replacement
    job = heterotrain.init()
    model = net()
    if change == "buffer":
        model = torch.nn.Sequential(model[0], torch.nn.BatchNorm1d(16).double(), *model[1:])
    job.wrap(model)
    optimizer = job.optimizer(optimizer_of(model))

    def spoil() -> None:
        name = "3.weight" if isinstance(model[1], torch.nn.BatchNorm1d) else "2.weight"
        parameter = dict(model.named_parameters())[name]
        with torch.no_grad():
            if change == "weight":
                parameter.mul_(1 + by)
            elif change == "moment":
                optimizer.state[parameter]["momentum_buffer"].mul_(1 + by)
            elif change == "buffer":
                model[1].running_mean.mul_(1 + by)
            elif change == "rate":
                optimizer.param_groups[0]["lr"] *= 1 + by

    @job.on_epoch_end
    def hook(epoch: int) -> None:
        if last and epoch == job.config.epochs - 1:
            spoil()

    for step in job.steps(problem(96)):
        if always or (step.number == AT and not last):
            spoil()
        with step:
            for x, y in step.micro_batches():
                step.backward(((model(x) - y) ** 2).mean())
            step.apply(optimizer)
    torch.save(model.state_dict(), f"{out}/{os.environ['HETEROTRAIN_WORKER']}.pt")


def run(operator: Operator, *arguments: dict[str, Any], **shared: Any) -> list[Worker]:
    """Train with a rank for each of the arguments to the end."""
    script = "distributed.test_divergence:train"
    workers = [operator.start(f"w{i}", script=script, **shared, **own) for i, own in enumerate(arguments)]
    operator.until_ready(*workers)
    operator.plan(workers)
    operator.finish(workers)
    return workers


def reason(worker: Worker) -> str:
    """Return why a worker failed."""
    assert worker.outcome is not None
    assert (worker.code, worker.outcome.ending) == (1, Ending.FAILED), worker.log()
    return worker.outcome.reason


@pytest.mark.parametrize("change", ["weight", "moment", "rate"])
def test_a_change_on_one_rank_fails_all_ranks_in_the_same_step(operate: Operate, change: str) -> None:
    """The message names the rank, its worker and what differs; the ranks with the common copy are the measure."""
    workers = run(operate(epochs=8), {}, {"change": change}, {})
    reasons = {reason(worker) for worker in workers}
    assert len(reasons) == 1
    found = reasons.pop()
    assert "rank 1 (w1) against rank 0 (w0), whose copy 2 of 3 ranks have, in" in found
    assert KINDS[change] in found
    step = int(found.split("after step ")[1].split(":")[0])
    assert AT <= step <= AT + 6  # of the first 64 steps, every second one is measured
    assert all(worker.outcome is not None and worker.outcome.step == step + 1 for worker in workers)
    assert "Look for code that changes weights" in found


def test_warn_goes_on(operate: Operate) -> None:
    """With a warning for the first time, and not again for each comparison."""
    for worker in run(operate(on_divergence="Warn", epochs=8), {}, {"change": "weight"}):
        assert worker.code == 0, worker.log()
        found = worker.log().count("the training state differs between ranks")
        assert 2 <= found <= 5


@pytest.mark.parametrize("change", ["weight", "moment", "rate", "buffer"])
def test_resync_copies_the_most_common_state(operate: Operate, change: str) -> None:
    """Training goes on with equal copies, and ends where an undisturbed one does, but for the steps in between."""
    operator = operate(on_divergence="Resync", epochs=8)
    workers = run(operator, {"change": change, "by": 1e-6}, *[{"change": change, "by": 0.0}] * 2)
    weights = [operator.weights(worker) for worker in workers]
    for worker, found in zip(workers, weights, strict=True):
        assert worker.code == 0, worker.log()
        assert "rank 0 (w0) against rank 1 (w1), whose copy 2 of 3 ranks have, in" in worker.log()
        assert KINDS[change] in worker.log()
        assert "the state of rank 1 was sent to all others (1 of at most 10 times)" in worker.log()
        assert all(torch.equal(found[name], weights[1][name]) for name in found)
    if change != "buffer":
        expected, _ = reference(epochs=8)
        assert distance(weights[0], expected) < 1e-5


def test_a_copy_that_always_comes_apart_ends_the_job(operate: Operate) -> None:
    """Copying the state would hide its cause for ever."""
    for worker in run(operate(on_divergence="Resync", epochs=40), {}, {"change": "weight"}, always=True):
        assert "although it was made equal 10 times" in reason(worker)


@pytest.mark.parametrize("policy", ["Fail", "Warn", "Resync"])
def test_the_whole_state_is_compared_at_the_end(operate: Operate, policy: str) -> None:
    """A change after the last step would be in the result of one rank only."""
    operator = operate(on_divergence=policy)
    workers = run(operator, {"change": "weight"}, {}, {}, last=True)
    for worker in workers:
        if policy == "Fail":
            assert "after step 11: rank 0 (w0) against rank 1 (w1)" in reason(worker)
            continue
        assert worker.code == 0, worker.log()
        assert "after step 11: rank 0 (w0) against rank 1 (w1)" in worker.log()
    if policy == "Resync":
        weights = [operator.weights(worker) for worker in workers]
        assert all(torch.equal(weights[0][name], other[name]) for other in weights for name in other)


@pytest.mark.parametrize(("by", "fails"), [(1e-13, False), (0.5, True)], ids=["rounding", "more"])
def test_devices_of_different_kinds_may_round_differently(operate: Operate, by: float, fails: bool) -> None:
    """A difference of some roundings is no error, a large one is."""
    workers = run(operate(epochs=8), {"kind": "one"}, {"change": "weight", "by": by, "kind": "other"})
    for worker in workers:
        if fails:
            assert "rank 1 (w1) against rank 0 (w0)" in reason(worker)
        else:
            assert worker.code == 0, worker.log()


def test_copies_stay_equal(operate: Operate) -> None:
    """Uneven shares, micro-batches, BatchNorm: nothing is reported where nothing came apart."""
    operator = operate(epochs=8)
    script = "distributed.test_divergence:train"
    workers = operator.start_workers(3, script=script, change="buffer", by=0.0)
    operator.plan(workers, shares=(9, 2, 5))
    operator.finish(workers)
    for worker in workers:
        assert worker.code == 0, worker.log()
        assert "differs" not in worker.log()
