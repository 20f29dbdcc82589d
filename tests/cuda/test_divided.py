"""Divided models on a GPU: two stages, and two shards, on one card; gradients and messages travel by gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cuda.shared_card import card
from distributed.harness import Operator, Worker, assert_same_weights
from distributed.test_pipeline_jobs import reference as reference_of_stages
from distributed.test_pipeline_jobs import started
from distributed.test_pipeline_jobs import weights_of as weights_of_stages
from distributed.test_sharded_jobs import SCRIPT, check, finish_pods, plan_pods, start_pods
from support.ports import free_ports

Operate = Callable[..., Operator]


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_two_stages_on_one_gpu_have_the_weights_of_one_process(operate: Operate, clip_norm: float | None) -> None:
    """Activations and gradients go from one process to the other through the host's memory."""
    operator = operate(batch_samples=17, parallelism="Pipeline")
    workers = started(operator, 2, clip_norm=clip_norm)
    operator.plan_members([(workers, (3,), 17, 5)])
    check_stages(operator, [workers], clip_norm=clip_norm)


def test_a_whole_model_and_two_stages_train_together(operate: Operate) -> None:
    """Members of both kinds exchange their gradients."""
    operator = operate(batch_samples=17, parallelism="Pipeline")
    workers = started(operator, 3)
    operator.plan_members([(workers[:1], (), 11, 4), (workers[1:], (4,), 6, 2)])
    check_stages(operator, [workers[:1], workers[1:]])


def check_stages(operator: Operator, members: list[list[Worker]], **training: Any) -> None:
    """Wait until all stages have ended well; fail unless each member has the weights of one process on the CPU."""
    operator.finish(worker for member in members for worker in member)
    assert all(worker.code == 0 for member in members for worker in member), operator.evidence()
    expected, _ = reference_of_stages(**training)
    for member in members:
        found = {name: weight.cpu() for name, weight in weights_of_stages(operator, member).items()}
        assert_same_weights(found, expected)


def start_shards(operator: Operator, number: int, shards: int, *, fault: dict[str, Any] | None = None) -> list[Worker]:
    """Start the ranks of a worker, which connect by NCCL; the last one has the fault."""
    metrics_port = free_ports(shards)
    return [
        operator.start(
            f"w{number}", script="cuda.shared_card:train_shards", local_rank=shard, ranks=shards,
            metrics_port=metrics_port + shard, fault=fault if shard == shards - 1 else None,
            **card(2 * number + shard, ranks=4),
        )
        for shard in range(shards)
    ]  # fmt: skip


def start_over_gloo(operator: Operator, number: int, shards: int) -> list[Worker]:
    """Start the ranks of a worker, which see that they share the card."""
    return operator.start_pod(f"w{number}", shards, script=SCRIPT)


@pytest.mark.parametrize("start_worker", [start_over_gloo, start_shards])
def test_two_shards_on_one_gpu_have_the_weights_of_one_process(
    operate: Operate, start_worker: Callable[[Operator, int, int], list[Worker]]
) -> None:
    """``fully_shard`` on CUDA tensors, beside a member that holds the whole model."""
    operator = operate(batch_samples=17, parallelism="Sharded")
    pods = [start_worker(operator, 0, 2), start_worker(operator, 1, 1)]
    for pod in pods:
        operator.until_ready(*pod)
    plan_pods(operator, pods, (11, 6), micro=(3, 0))
    check(operator, pods, batch_samples=17)


def test_the_whole_member_goes_on_when_a_shard_is_lost(operate: Operate) -> None:
    """The other rank of the broken member leaves its pass on the device and waits."""
    operator = operate(batch_samples=17, parallelism="Sharded")
    pods = start_pods(operator, 2, 2, 1, faults={1: {1: {"place": "backward", "step": 3}}})
    plan_pods(operator, pods, (7, 6, 4), micro=(2, 2, 0))
    finish_pods(operator, [pods[0], pods[2]])
    assert pods[1][0].poll() is None, pods[1][0].log()
    check(operator, [pods[0], pods[2]], batch_samples=17)


@pytest.mark.parametrize("place", ["in forward", "backward"])
def test_a_shard_by_nccl_is_lost(operate: Operate, place: str) -> None:
    """The other shard waits in a collective of NCCL and leaves it; the whole member goes on."""
    operator = operate(batch_samples=17, parallelism="Sharded")
    pods = [start_shards(operator, 0, 2, fault={"place": place, "step": 3}), start_shards(operator, 1, 1)]
    for pod in pods:
        operator.until_ready(*pod)
    plan_pods(operator, pods, (11, 6), micro=(3, 0))
    finish_pods(operator, pods[1:])
    assert pods[0][0].poll() is None, operator.evidence()
    check(operator, pods[1:], batch_samples=17)


def test_pipelines_add_up_by_nccl(operate: Operate) -> None:
    """Two equal pipelines and a whole member: each stage adds up with the other owners of its units."""
    operator = operate(batch_samples=17, parallelism="Pipeline")
    workers = [
        operator.start(f"w{number}", script="cuda.shared_card:train_stages", **card(number, ranks=5))
        for number in range(5)
    ]
    operator.until_ready(*workers)
    members = [workers[:2], workers[2:4], workers[4:]]
    operator.plan_members([(members[0], (3,), 6, 2), (members[1], (3,), 7, 3), (members[2], (), 4, 4)])
    check_stages(operator, members)
    assert "gradients travel by gloo" not in workers[0].log(), workers[0].log()
