"""State that layers change in their forward passes, on uneven ranks, through losses and joins."""

from __future__ import annotations

import signal
from collections.abc import Callable

import torch
from distributed.changing_scripts import clamp
from distributed.harness import Gate, Operator
from distributed.scripts import optimizer_of, problem
from heterotrain.data.order import permutation
from support.changing_layers import Everything

Operate = Callable[..., Operator]
SCRIPT = "distributed.changing_scripts:everything"


def test_state_that_changes_in_forward_is_that_of_one_process(operate: Operate) -> None:
    """One rank has no samples at first, one is lost in a reduction, and one joins: weights and buffers stay exact.

    A hook on a parameter limits its gradient.
    """
    operator = operate()
    gate = Gate(operator.folder, 7)
    workers = [operator.start("w0", script=SCRIPT, fault=gate.fault), operator.start("w1", script=SCRIPT)]
    workers.append(operator.start("w2", script=SCRIPT, fault={"place": "reducing", "step": 3}))
    operator.until_ready(*workers)
    operator.plan(workers, shares=(11, 0, 5), micro=(4, 0, 0))
    operator.until(gate.reached, "the survivors continue by themselves")
    operator.finish([workers[-1]])
    assert workers.pop().code == -signal.SIGKILL
    workers.append(operator.start("w3", script=SCRIPT))
    operator.until_ready(workers[-1])
    operator.plan(workers, shares=(0, 9, 7), micro=(0, 4, 0))
    operator.until(lambda: all(f"plan {operator.generation}." in w.log() for w in workers[:2]), "the plan is read")
    gate.open()
    operator.finish(workers)
    model, (x, y) = Everything(), problem(96).tensors
    model.head.weight.register_hook(clamp)
    optimizer = optimizer_of(model)
    for epoch in range(2):
        order = permutation(seed=0, epoch=epoch, epoch_samples=96, shuffle=True)
        for chosen in order.reshape(6, 16):
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
