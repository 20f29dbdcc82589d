"""Jobs whose workers divide the model among their ranks, through the whole trainer, against one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.harness import Gate, Operator, Worker, assert_same_weights
from distributed.scripts import batches, problem
from distributed.sharded_job_scripts import net_of
from heterotrain.parts.sharded.sharded_model import SETTING
from heterotrain_core.contract.plan import Layout, LayoutKind, Plan
from torch.distributed.fsdp import FSDPModule

SCRIPT = "distributed.sharded_job_scripts:train"


def plan_pods(
    operator: Operator, pods: Sequence[list[Worker]], shares: Sequence[int], *, micro: Sequence[int] = (), **fields: Any
) -> Plan:
    """Write a plan in which each worker is one member."""
    micro = micro or (0,) * len(pods)
    layouts = [Layout(kind=LayoutKind.SHARDED, shards=len(pod)) if len(pod) > 1 else Layout() for pod in pods]
    return operator.plan_members(list(zip(pods, layouts, shares, micro, strict=True)), **fields)


def weights_of(operator: Operator, pod: list[Worker], *, rare: bool = False) -> dict[str, torch.Tensor]:
    """Put a worker's final weights together from the parts of its ranks."""
    whole = {name: torch.full_like(p, torch.nan).detach() for name, p in net_of(rare=rare).named_parameters()}
    for local_rank, worker in enumerate(pod):
        path = operator.folder / f"{worker.name}-{local_rank}.pt"
        assert path.exists(), worker.log()
        for name, (start, stop, part) in torch.load(path, weights_only=True)["parts"].items():
            whole[name].view(-1)[start:stop] = part
    return whole


def reference(
    *, epochs: int, samples: int, batch_samples: int, clip_norm: float | None = None, rare: bool = False
) -> dict[str, torch.Tensor]:
    """Train in this process with plain torch; return the final weights."""
    model, (x, y) = net_of(rare=rare), problem(samples).tensors
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=0.01)
    for _, chosen in batches(epochs=epochs, samples=samples, size=batch_samples):
        optimizer.zero_grad()
        ((model(x[chosen]) - y[chosen]) ** 2).mean().backward()
        norm = torch.stack([(p.grad**2).sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
        if clip_norm is not None and norm > clip_norm:
            for p in model.parameters():
                p.grad = None if p.grad is None else p.grad * clip_norm / norm
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("seed", range(4))
def test_any_members_and_shares_give_the_weights_of_one_process(operate: Callable[..., Operator], seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311  # seeded chance
    sizes = [[2, 1], [2, 2], [3, 1], [1, 2, 1]][seed]
    batch = 17
    edges = sorted(rng.sample(range(1, batch), len(sizes) - 1))
    shares = [b - a for a, b in zip([0, *edges], [*edges, batch], strict=True)]
    clip_norm = rng.choice([None, 0.5])
    micro = [rng.choice([0, 1, 3, 4]) for _ in sizes]
    operator = operate(batch_samples=batch, parallelism="Sharded")
    pods = start_pods(operator, *sizes, clip_norm=clip_norm)
    plan_pods(operator, pods, shares, micro=micro)
    check(operator, pods, batch_samples=batch, clip_norm=clip_norm)


@pytest.mark.skipif(not hasattr(FSDPModule, SETTING), reason="ranks may use different layers from PyTorch 2.15")
def test_ranks_of_a_member_use_different_layers(operate: Callable[..., Operator]) -> None:
    """And a parameter that no rank has used in a step keeps its value, in spite of weight decay."""
    operator = operate(batch_samples=17, parallelism="Sharded")
    pods = start_pods(operator, 3, 2, 1, rare=True)
    plan_pods(operator, pods, (8, 5, 4), micro=(1, 2, 0))
    check(operator, pods, batch_samples=17, rare=True)


def finish_pods(operator: Operator, pods: Sequence[list[Worker]]) -> None:
    """Wait until all ranks of these workers have ended well."""
    operator.finish([worker for pod in pods for worker in pod])
    assert all(worker.code == 0 for pod in pods for worker in pod), operator.evidence()


def check(
    operator: Operator, pods: Sequence[list[Worker]], *, epochs: int = 2, samples: int = 96, rare: bool = False,
    **training: Any,
) -> None:  # fmt: skip
    """Wait until all ranks of these workers have ended well; fail unless each worker has the weights of one process."""
    finish_pods(operator, pods)
    expected = reference(epochs=epochs, samples=samples, rare=rare, **training)
    for pod in pods:
        assert_same_weights(weights_of(operator, pod, rare=rare), expected)


def start_pods(
    operator: Operator, *sizes: int, faults: Mapping[int, Mapping[int, dict[str, Any]]] = {}, prefix: str = "w",
    script: str = SCRIPT, **arguments: Any,
) -> list[list[Worker]]:  # fmt: skip
    """Start workers of so many ranks, with these faults by worker and rank, and wait until they are ready."""
    pods = [
        operator.start_pod(f"{prefix}{number}", size, script=script, faults=faults.get(number, {}), **arguments)
        for number, size in enumerate(sizes)
    ]
    operator.until_ready(*(worker for pod in pods for worker in pod))
    return pods


@pytest.mark.parametrize("place", ["in forward", "backward", "in a hook"])
def test_other_members_go_on_when_one_loses_a_rank(operate: Callable[..., Operator], place: str) -> None:
    """The rest of the broken member leaves its pass and waits for a plan; nobody hangs."""
    operator = operate(batch_samples=17, parallelism="Sharded")
    fault = {"place": place, "step": 0 if place == "in a hook" else 3}
    pods = start_pods(operator, 2, 2, 1, faults={1: {1: fault}})
    plan_pods(operator, pods, (7, 6, 4), micro=(2, 2, 0))
    finish_pods(operator, [pods[0], pods[2]])
    rest = pods[1][0]
    assert rest.poll() is None, rest.log()  # a launcher would end it together with the lost rank
    check(operator, [pods[0], pods[2]], batch_samples=17)


def test_a_rank_out_of_memory_makes_its_member_use_smaller_micro_batches(operate: Callable[..., Operator]) -> None:
    operator = operate(batch_samples=17, parallelism="Sharded")
    fault = {"place": "in forward", "step": 2, "do": "exhaust"}
    pods = start_pods(operator, 2, 1, faults={0: {1: fault}})
    plan_pods(operator, pods, (12, 5))
    check(operator, pods, batch_samples=17)
    assert all(worker.metric("heterotrain_repeated_steps_total") in (None, 1.0) for worker in pods[0])


def test_a_whole_rank_joins_and_a_job_goes_on_under_other_divisions(
    operate: Callable[..., Operator], tmp_path: Path
) -> None:
    """Two members of two ranks; a rank with the whole model joins; then one of three; then one process."""
    operator = operate(
        batch_samples=17, epochs=4, parallelism="Sharded", checkpoint_uri=f"file://{tmp_path}/checkpoints"
    )
    gates = [Gate(tmp_path, step, name=name) for name, step in (("join-", 2), ("stop-", 4), ("again-", 12))]
    first = dict.fromkeys(range(2), gates[0].fault)
    *pods, joiner = start_pods(operator, 2, 2, 1, faults={0: first, 2: {0: gates[1].fault}})
    everyone = [worker for pod in [*pods, joiner] for worker in pod]
    plan_pods(operator, pods, (9, 8))
    operator.until(gates[0].reached, "two steps are committed")
    plan_pods(operator, [*pods, joiner], (6, 6, 5))
    operator.until_read(worker for pod in pods for worker in pod)
    gates[0].open()
    operator.suspend(everyone, gates[1])
    (pod,) = start_pods(operator, 3, prefix="r", faults={0: dict.fromkeys(range(3), gates[2].fault)})
    plan_pods(operator, [pod], (17,), micro=(4,))
    operator.suspend(pod, gates[2])
    last = start_pods(operator, 1, prefix="last")
    plan_pods(operator, last, (17,), micro=(4,))
    check(operator, last, epochs=4, batch_samples=17)
