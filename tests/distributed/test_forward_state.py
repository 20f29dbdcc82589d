"""State that layers change in their forward passes, on uneven ranks, through losses and joins."""

from __future__ import annotations

import signal
from collections.abc import Callable

import torch
from distributed.changing_scripts import clamp
from distributed.harness import Gate, Operator
from distributed.scripts import batches, optimizer_of, problem
from support.changing_layers import Everything

Operate = Callable[..., Operator]
SCRIPT = "distributed.changing_scripts:everything"


def test_state_that_changes_in_forward_is_that_of_one_process(operate: Operate) -> None:
    """One rank has no samples at first, one is lost in a reduction, and one joins: weights and buffers stay exact.

    A hook on a parameter limits its gradient.
    """
    operator = operate()
    gate = Gate(operator.folder, 7)
    workers = operator.start_workers(3, faults={0: gate.fault, 2: {"place": "reducing", "step": 3}}, script=SCRIPT)
    operator.plan(workers, shares=(11, 0, 5), micro=(4, 0, 0))
    operator.until(gate.reached, "the survivors continue by themselves")
    operator.finish([workers[-1]])
    assert workers.pop().code == -signal.SIGKILL
    workers.append(operator.start_ready("w3", script=SCRIPT))
    operator.plan(workers, shares=(0, 9, 7), micro=(0, 4, 0))
    operator.until_read(workers[:2])
    gate.open()
    operator.finish(workers)
    model, (x, y) = Everything(), problem(96).tensors
    model.head.weight.register_hook(clamp)
    optimizer = optimizer_of(model)
    for _, chosen in batches(epochs=2):
        optimizer.zero_grad()
        ((model(x[chosen]) - y[chosen]) ** 2).mean().backward()
        optimizer.step()
    for worker in workers:
        assert worker.code == 0, worker.log()
        found = operator.weights(worker)
        assert all(torch.equal(value, operator.weights(workers[0])[name]) for name, value in found.items())
        for name, value in model.state_dict().items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}"
            )
