"""Jobs whose workers divide the model among their ranks, through the whole trainer, against one process."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.harness import JOB_UID, Gate, Operator, Worker, assert_same_weights, deliver
from distributed.scripts import problem
from distributed.sharded_job_scripts import net_of
from heterotrain.data.order import permutation
from heterotrain.parts.sharded.sharded_model import SETTING
from heterotrain_core.contract.plan import Boundary, Layout, LayoutKind, Member, Plan, Rank
from support.ports import free_ports
from torch.distributed.fsdp import FSDPModule

SCRIPT = "distributed.sharded_job_scripts:train"


def start_pod(operator: Operator, name: str, ranks: int, **arguments: Any) -> list[Worker]:
    """Start the ranks of one worker."""
    metrics_port = free_ports(ranks)
    return [
        operator.start(
            name, script=SCRIPT, local_rank=local_rank, ranks=ranks, metrics_port=metrics_port + local_rank, **arguments
        )
        for local_rank in range(ranks)
    ]


def plan_pods(
    operator: Operator, pods: Sequence[list[Worker]], shares: Sequence[int], *, micro: Sequence[int] = (),
    to: Sequence[list[Worker]] | None = None, new_generation: bool = True, **fields: Any,
) -> Plan:  # fmt: skip
    """Write a plan in which each worker is one member."""
    operator.generation += new_generation
    operator.revision += 1
    members, ranks = [], []
    for index, (pod, share) in enumerate(zip(pods, shares, strict=True)):
        layout = Layout(kind=LayoutKind.SHARDED, shards=len(pod)) if len(pod) > 1 else Layout()
        members.append(
            Member(
                index=index, pool="pool", share_samples=share, layout=layout,
                micro_batch_samples=micro[index] if micro else 0,
            )
        )  # fmt: skip
        for local_rank, worker in enumerate(pod):
            ranks.append(Rank(
                rank=len(ranks), member=index, worker=worker.name, worker_uid=worker.uid, address="127.0.0.1",
                peer_port=worker.peer_port, on_demand=True, local_rank=local_rank, shard=local_rank,
            ))  # fmt: skip
    plan = Plan(
        job_uid=JOB_UID, generation=operator.generation, revision=operator.revision, members=tuple(members),
        ranks=tuple(ranks), global_batch_samples=sum(shares), **({"boundary": Boundary()} | fields),
    )  # fmt: skip
    operator.plans.append(plan)
    for pod in pods if to is None else to:
        for worker in pod:
            deliver(plan, worker)
    return plan


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
    for epoch in range(epochs):
        order = permutation(seed=0, epoch=epoch, epoch_samples=samples, shuffle=True).tolist()
        for cursor in range(0, samples, batch_samples):
            chosen = order[cursor : cursor + batch_samples]
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
    pods = [start_pod(operator, f"w{number}", size, clip_norm=clip_norm) for number, size in enumerate(sizes)]
    for pod in pods:
        operator.until_ready(*pod)
    plan_pods(operator, pods, shares, micro=micro)
    operator.finish([worker for pod in pods for worker in pod])
    expected = reference(epochs=2, samples=96, batch_samples=batch, clip_norm=clip_norm)
    for pod in pods:
        assert_same_weights(weights_of(operator, pod), expected)


@pytest.mark.skipif(not hasattr(FSDPModule, SETTING), reason="ranks may use different layers from PyTorch 2.15")
def test_ranks_of_a_member_use_different_layers(operate: Callable[..., Operator]) -> None:
    """And a parameter that no rank has used in a step keeps its value, in spite of weight decay."""
    operator = operate(batch_samples=17, parallelism="Sharded")
    pods = [start_pod(operator, f"w{number}", size, rare=True) for number, size in enumerate((3, 2, 1))]
    for pod in pods:
        operator.until_ready(*pod)
    plan_pods(operator, pods, (8, 5, 4), micro=(1, 2, 0))
    finish_pods(operator, pods)
    expected = reference(epochs=2, samples=96, batch_samples=17, rare=True)
    for pod in pods:
        assert_same_weights(weights_of(operator, pod, rare=True), expected)


def finish_pods(operator: Operator, pods: Sequence[list[Worker]]) -> None:
    """Wait until all ranks of these workers have ended well."""
    operator.finish([worker for pod in pods for worker in pod])
    assert all(worker.code == 0 for pod in pods for worker in pod), operator.evidence()


@pytest.mark.parametrize("place", ["in forward", "backward", "in a hook"])
def test_other_members_go_on_when_one_loses_a_rank(operate: Callable[..., Operator], place: str) -> None:
    """The rest of the broken member leaves its pass and waits for a plan; nobody hangs."""
    operator = operate(batch_samples=17, parallelism="Sharded")
    fault = {"place": place, "step": 0 if place == "in a hook" else 3}
    pods = [start_pod(operator, "w0", 2), [], start_pod(operator, "w2", 1)]
    metrics_port = free_ports(2)
    pods[1] = [
        operator.start(
            "w1", script=SCRIPT, local_rank=local_rank, ranks=2, metrics_port=metrics_port + local_rank,
            fault=fault if local_rank else None,
        )
        for local_rank in range(2)
    ]  # fmt: skip
    for pod in pods:
        operator.until_ready(*pod)
    plan_pods(operator, pods, (7, 6, 4), micro=(2, 2, 0))
    finish_pods(operator, [pods[0], pods[2]])
    rest = pods[1][0]
    assert rest.poll() is None, rest.log()  # a launcher would end it together with the lost rank
    expected = reference(epochs=2, samples=96, batch_samples=17)
    for pod in (pods[0], pods[2]):
        assert_same_weights(weights_of(operator, pod), expected)


def test_a_rank_out_of_memory_makes_its_member_use_smaller_micro_batches(operate: Callable[..., Operator]) -> None:
    operator = operate(batch_samples=17, parallelism="Sharded")
    metrics_port = free_ports(2)
    fault = {"place": "in forward", "step": 2, "do": "exhaust"}
    pod = [
        operator.start(
            "w0", script=SCRIPT, local_rank=local_rank, ranks=2, metrics_port=metrics_port + local_rank,
            fault=fault if local_rank else None,
        )
        for local_rank in range(2)
    ]  # fmt: skip
    pods = [pod, start_pod(operator, "w1", 1)]
    for each in pods:
        operator.until_ready(*each)
    plan_pods(operator, pods, (12, 5))
    finish_pods(operator, pods)
    expected = reference(epochs=2, samples=96, batch_samples=17)
    for each in pods:
        assert_same_weights(weights_of(operator, each), expected)
    assert all(worker.metric("heterotrain_repeated_steps_total") in (None, 1.0) for worker in pod)


def test_a_whole_rank_joins_and_a_job_goes_on_under_other_divisions(
    operate: Callable[..., Operator], tmp_path: Path
) -> None:
    """Two members of two ranks; a rank with the whole model joins; then one of three; then one process."""
    operator = operate(
        batch_samples=17, epochs=4, parallelism="Sharded", checkpoint_uri=f"file://{tmp_path}/checkpoints"
    )
    gates = [Gate(tmp_path, step, name=name) for name, step in (("join-", 2), ("stop-", 4), ("again-", 12))]
    pods = [start_pod(operator, "w0", 2, fault=gates[0].fault), start_pod(operator, "w1", 2)]
    joiner = start_pod(operator, "w2", 1, fault=gates[1].fault)
    everyone = [worker for pod in [*pods, joiner] for worker in pod]
    operator.until_ready(*everyone)
    plan_pods(operator, pods, (9, 8))
    operator.until(gates[0].reached, "two steps are committed")
    plan = plan_pods(operator, [*pods, joiner], (6, 6, 5))
    text = f"plan {plan.generation}.{plan.revision}"
    operator.until(lambda: all(text in worker.log() for pod in pods for worker in pod), "the plan is read")
    gates[0].open()
    operator.until(gates[1].reached, "the new rank trains")
    stop(operator, everyone, gates[1])
    for name, ranks, gate in (("r0", 3, gates[2]), ("r1", 1, None)):
        pod = start_pod(operator, name, ranks, fault=gate.fault if gate else None)
        operator.until_ready(*pod)
        plan_pods(operator, [pod], (17,), micro=(4,))
        if gate is not None:
            operator.until(gate.reached, "twelve steps are committed")
            stop(operator, pod, gate)
        else:
            finish_pods(operator, [pod])
            assert_same_weights(weights_of(operator, pod), reference(epochs=4, samples=96, batch_samples=17))


def stop(operator: Operator, workers: list[Worker], gate: Gate) -> None:
    """Ask workers to leave that a gate holds in a step, and wait until they have."""
    for worker in workers:
        worker.signal(signal.SIGTERM)
    gate.open()
    operator.finish(workers)
