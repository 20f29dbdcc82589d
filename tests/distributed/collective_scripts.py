"""Scripts that use ``torch.distributed`` and ``job.sum`` themselves, with calls of fault injectors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from distributed.fault_injectors import FaultInjector
from distributed.scripts import FEATURES, begun, net, problem, save
from heterotrain.numerics.all_gather import Gathered
from heterotrain.steps.step import Step

CALLS = 6
"""Collectives of one step or hook; the fault comes in their middle."""


def chatter(injector: FaultInjector, place: str, visit: int) -> None:
    """Call several collectives of different kinds, and check their results."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for number in range(CALLS):
        if number == CALLS // 2:
            injector.at(place, visit)
        total = torch.ones(1000)
        dist.all_reduce(total)
        assert float(total[0]) == world_size
    rows = [torch.zeros(2) for _ in range(world_size)]
    dist.all_gather(rows, torch.full((2,), float(rank)))
    assert [float(row[0]) for row in rows] == list(range(world_size))
    objects: list[Any] = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank})
    assert [found["rank"] for found in objects] == list(range(world_size))
    dist.barrier()


def train(*, out: str, fault: dict[str, Any] | None = None, samples: int = 96) -> None:
    """Train with collectives in each step and in each hook, then write the final weights."""
    job, model, optimizer, injector = begun(net(), fault)

    @job.on_epoch_end
    def talk(epoch: int) -> None:
        chatter(injector, "in a hook", epoch)
        assert job.sum(n=1.0)["n"] == dist.get_world_size()

    for step in job.steps(problem(samples)):
        with step:
            injector.at("step", step.number)
            chatter(injector, "between collectives", step.number)
            assert job.sum(n=1.0)["n"] == dist.get_world_size()
            for x, y in step.micro_batches():
                step.backward(((model(x) - y) ** 2).mean())
            step.apply(optimizer)
            injector.at("applied", step.number)
    save(model, out)


def elsewhere(*, out: str, where: str, call: str) -> None:  # every script gets the folder
    """Exchange data at a place where nothing would repeat it."""
    job, model, optimizer, _ = begun(net())

    def exchange() -> None:
        if call == "job.sum":
            job.sum(n=1.0)
        else:
            dist.all_reduce(torch.ones(1))

    if where == "before the first step":
        exchange()
    for step in job.steps(problem(96)):
        if where == "between steps":
            exchange()
        with step:
            for x, y in step.micro_batches():
                step.backward(((model(x) - y) ** 2).mean())
            step.apply(optimizer)
            if where == "after step.apply":
                exchange()


def mistake(*, out: str, what: str) -> None:  # every script gets the folder
    """Make a call that other ranks do not make, or one that a job cannot have."""
    job, model, optimizer, _ = begun(net())
    for step in job.steps(problem(96)):
        with step:
            if what == "another collective":
                dist.all_reduce(torch.ones(1)) if dist.get_rank() else dist.barrier()
            if what == "another shape":
                dist.all_gather([torch.zeros(2)] * dist.get_world_size(), torch.ones(2 + dist.get_rank()))
            if what == "only one rank" and dist.get_rank() == 0:
                dist.all_reduce(torch.ones(1))
            if what == "new_group":
                dist.new_group([0])
            if what == "new_group of gloo":
                dist.new_group([0, 1], backend="gloo")
            if what == "send":
                dist.send(torch.ones(1), 1 - dist.get_rank())
            for x, y in step.micro_batches():
                step.backward(((model(x) - y) ** 2).mean())
            step.apply(optimizer)


def towers() -> torch.nn.ModuleDict:
    """Return two small encoders in fp64, the same everywhere."""
    torch.manual_seed(5)
    return torch.nn.ModuleDict({name: torch.nn.Linear(FEATURES, 4).double() for name in ("left", "right")})


def contrast(model: torch.nn.ModuleDict, x: torch.Tensor, gather: Any) -> torch.Tensor:
    """Return the mean loss of these samples, each compared with those of all ranks; the second view is a rotation."""
    left, right = model["left"](x).tanh(), model["right"](x.roll(1, dims=1)).tanh()
    every_left, start = gather(left)
    every_right, _ = gather(right)
    target = torch.arange(start, start + len(x))
    one = torch.nn.functional.cross_entropy(left @ every_right.T, target)
    return (one + torch.nn.functional.cross_entropy(right @ every_left.T, target)) / 2


def contrastive(*, out: str, fault: dict[str, Any] | None = None, lockstep: bool = True) -> None:
    """Train two encoders with a contrastive loss over the samples of all ranks."""
    job, model, optimizer, injector = begun(towers(), fault)
    for step in job.steps(problem(96), lockstep=lockstep):
        with step:
            injector.at("step", step.number)
            for x, _ in step.micro_batches():

                def gather(rows: torch.Tensor, step: Step = step) -> Gathered:
                    found = step.all_gather(rows)
                    injector.at("in forward", step.number)
                    return found

                step.backward(contrast(model, x, gather))
            step.apply(optimizer)
    save(model, out)
