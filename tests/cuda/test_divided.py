"""Divided models on a GPU: two stages, and two shards, on one card; gradients and messages travel by gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cuda.shared_card import card
from distributed.harness import Operator, Worker, assert_same_weights
from distributed.test_pipeline_jobs import plan_members, start
from distributed.test_pipeline_jobs import reference as reference_of_stages
from distributed.test_pipeline_jobs import weights_of as weights_of_stages
from distributed.test_sharded_jobs import SCRIPT, finish_pods, plan_pods, start_pod, weights_of
from distributed.test_sharded_jobs import reference as reference_of_shards
from support.ports import free_ports

Operate = Callable[..., Operator]


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_two_stages_on_one_gpu_have_the_weights_of_one_process(operate: Operate, clip_norm: float | None) -> None:
    """Activations and gradients go from one process to the other through the host's memory."""
    operator = operate(batch_samples=17, parallelism="Pipeline")
    workers = [start(operator, f"w{number}", clip_norm=clip_norm) for number in range(2)]
    operator.until_ready(*workers)
    plan_members(operator, [(workers, (3,), 17, 5)])
    operator.finish(workers)
    assert all(worker.code == 0 for worker in workers), operator.evidence()
    expected, _ = reference_of_stages(clip_norm=clip_norm)
    found = {name: weight.cpu() for name, weight in weights_of_stages(operator, workers).items()}
    assert_same_weights(found, expected)


def test_a_whole_model_and_two_stages_train_together(operate: Operate) -> None:
    """Members of both kinds exchange their gradients."""
    operator = operate(batch_samples=17, parallelism="Pipeline")
    workers = [start(operator, f"w{number}") for number in range(3)]
    operator.until_ready(*workers)
    plan_members(operator, [(workers[:1], (), 11, 4), (workers[1:], (4,), 6, 2)])
    operator.finish(workers)
    assert all(worker.code == 0 for worker in workers), operator.evidence()
    expected, _ = reference_of_stages()
    for member in (workers[:1], workers[1:]):
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
    return start_pod(operator, f"w{number}", shards)


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
    finish_pods(operator, pods)
    expected = reference_of_shards(epochs=2, samples=96, batch_samples=17)
    for pod in pods:
        assert_same_weights(weights_of(operator, pod), expected)


def test_the_whole_member_goes_on_when_a_shard_is_lost(operate: Operate) -> None:
    """The other rank of the broken member leaves its pass on the device and waits."""
    operator = operate(batch_samples=17, parallelism="Sharded")
    metrics_port = free_ports(2)
    broken = [
        operator.start(
            "w1", script=SCRIPT, local_rank=local_rank, ranks=2, metrics_port=metrics_port + local_rank,
            fault={"place": "backward", "step": 3} if local_rank else None,
        )
        for local_rank in range(2)
    ]  # fmt: skip
    pods = [start_pod(operator, "w0", 2), broken, start_pod(operator, "w2", 1)]
    for pod in pods:
        operator.until_ready(*pod)
    plan_pods(operator, pods, (7, 6, 4), micro=(2, 2, 0))
    finish_pods(operator, [pods[0], pods[2]])
    assert broken[0].poll() is None, broken[0].log()
    expected = reference_of_shards(epochs=2, samples=96, batch_samples=17)
    for pod in (pods[0], pods[2]):
        assert_same_weights(weights_of(operator, pod), expected)


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
    expected = reference_of_shards(epochs=2, samples=96, batch_samples=17)
    assert_same_weights(weights_of(operator, pods[1]), expected)


def test_pipelines_add_up_by_nccl(operate: Operate) -> None:
    """Two equal pipelines and a whole member: each stage adds up with the other owners of its units."""
    operator = operate(batch_samples=17, parallelism="Pipeline")
    workers = [
        operator.start(f"w{number}", script="cuda.shared_card:train_stages", **card(number, ranks=5))
        for number in range(5)
    ]
    operator.until_ready(*workers)
    members = [workers[:2], workers[2:4], workers[4:]]
    plan_members(operator, [(members[0], (3,), 6, 2), (members[1], (3,), 7, 3), (members[2], (), 4, 4)])
    operator.finish(workers)
    assert all(worker.code == 0 for worker in workers), operator.evidence()
    assert "gradients travel by gloo" not in workers[0].log(), workers[0].log()
    expected, _ = reference_of_stages()
    for member in members:
        found = {name: weight.cpu() for name, weight in weights_of_stages(operator, member).items()}
        assert_same_weights(found, expected)
