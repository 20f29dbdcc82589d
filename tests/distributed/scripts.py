"""Training scripts for the workers of these tests: ordinary scripts with calls of fault injectors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import heterotrain
import heterotrain.telemetry.tensorboard
import torch
from distributed.fault_injectors import FaultInjector, install_faults, stop_gossip
from distributed.queued_updates import queue_updates
from heterotrain.data.order import permutation
from heterotrain.network import connection_setup

FEATURES = 6


def problem(samples: int) -> torch.utils.data.TensorDataset:
    """Return a small regression problem in fp64, the same everywhere."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    y = (x**2).sum(1, keepdim=True) + 0.1 * torch.randn(samples, 1, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, y)


def net() -> torch.nn.Module:
    """Return a small model in fp64 with parameters for several buckets, the same everywhere."""
    torch.manual_seed(3)
    layers = [torch.nn.Linear(FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(16, 1)).double()


def optimizer_of(model: torch.nn.Module, *, fused: bool | None = None) -> torch.optim.Optimizer:
    """Return an optimizer with state, so that tests detect a joining worker without it."""
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=fused)


def batches(
    *, epochs: int, samples: int = 96, size: int | Callable[[int], int] = 16,
    order: Callable[[int], list[int]] | None = None,
) -> Iterator[tuple[int, list[int]]]:  # fmt: skip
    """Yield the epoch and the samples of each step.

    ``size`` is the global batch, perhaps by the step's number; ``order`` returns the samples of an epoch if the data
    set has an order of its own.
    """
    number = 0
    for epoch in range(epochs):
        drawn = permutation(seed=0, epoch=epoch, epoch_samples=samples, shuffle=True).tolist()
        left = order(epoch) if order else drawn
        while left:
            most = size(number) if callable(size) else size
            yield epoch, left[:most]
            left, number = left[most:], number + 1


def begun(
    model: Any, fault: dict[str, Any] | None = None, *, fused: bool | None = None, **settings: Any
) -> tuple[heterotrain.Job, Any, torch.optim.Optimizer, FaultInjector]:
    """Begin a job with this model, its usual optimizer and this fault; ``settings`` are those of ``init``."""
    injector = FaultInjector(fault)
    job = heterotrain.init(**settings)
    wrapped = job.wrap(model)
    optimizer = job.optimizer(optimizer_of(wrapped, fused=fused))
    install_faults(injector)
    return job, wrapped, optimizer, injector


def save(model: torch.nn.Module, out: str) -> None:
    """Write the weights of a worker."""
    torch.save(model.state_dict(), f"{out}/{os.environ['HETEROTRAIN_WORKER']}.pt")


def train(
    *,
    out: str,
    samples: int = 96,
    fault: dict[str, Any] | None = None,
    slow_s: float = 0.0,
    tensorboard_dir: str | None = None,
    finish_at: int | None = None,
    collectives: bool = False,
    collective_s: float | None = None,
    gossip: bool = True,
    late: bool = False,
) -> None:
    """Train, then write the final weights.

    ``slow_s`` lengthens each micro-batch; ``tensorboard_dir`` is the folder for TensorBoard files; ``finish_at`` is the
    step in which the script ends the training; ``collectives`` lets the script exchange data itself, in steps, in the
    forward pass and in hooks; ``collective_s`` replaces the time-out of gloo's operations; without ``gossip``, replies
    of peers spread no plans; ``late`` lets steps be confirmed late, as on GPUs.
    """
    if not gossip:
        stop_gossip()
    if collective_s is not None:
        connection_setup.COLLECTIVE_S = collective_s
    heterotrain.telemetry.tensorboard.GAP_S = 0.0
    job, model, optimizer, injector = begun(net(), fault, fused=late or None, tensorboard_dir=tensorboard_dir)
    if late:
        queue_updates(injector)

    @job.on_epoch_end
    def hook(epoch: int) -> None:
        if collectives:
            count_ranks(lambda: injector.at("in a hook", epoch))
            job.sum(n=1.0)

    for step in job.steps(problem(samples), lockstep=collectives, confirm="late" if late else "now"):
        with step:
            injector.at("step", step.number)
            if collectives:
                count_ranks(lambda number=step.number: injector.at("between collectives", number))  # type: ignore[misc]  # a default argument binds the loop's variable
            for x, y in step.micro_batches():
                if slow_s:
                    time.sleep(slow_s)
                errors = (model(x) - y) ** 2
                if collectives:
                    every, start = step.all_gather(errors)
                    injector.at("in forward", step.number)
                    errors = (every + 0.0 * step.all_gather(errors).rows)[start : start + len(x)]
                step.backward(errors.mean())
            injector.at("backward", step.number)
            if step.number == finish_at:
                job.finish("that is enough")
            step.apply(optimizer)
            injector.at("applied", step.number)
    save(model, out)


def count_ranks(between: Callable[[], None]) -> None:
    """Count the ranks twice by collectives of the script, with a call in between."""
    for _ in range(2):
        ones = torch.ones(1)
        torch.distributed.all_reduce(ones)
        assert int(ones) == torch.distributed.get_world_size()
        between()


def token_weights(x: torch.Tensor) -> torch.Tensor:
    """Return a whole number of "tokens" for each sample, a function of the sample; some have none."""
    return (x[:, :1] * 3).abs().floor()
