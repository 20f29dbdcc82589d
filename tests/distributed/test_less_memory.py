"""Ranks of whole and of sharded models that run out of memory with a single sample: they keep no activations then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from distributed.harness import Operator, Worker, assert_same_weights
from distributed.pipeline_job_scripts import Decoder
from distributed.test_pipeline_jobs import BATCH, BLOCKS, SAMPLES, SCRIPT, reference, result_of
from distributed.test_sharded_jobs import plan_pods
from support.ports import free_ports

FAULT = {"place": "in loss", "step": 2, "do": "exhaust", "every": 0}


def start_pod(operator: Operator, name: str, ranks: int, times: int = 0) -> list[Worker]:
    """Start a worker's ranks, the last of which runs out of memory so many times."""
    port = free_ports(ranks)
    return [
        operator.start(
            name, script=SCRIPT, local_rank=rank, ranks=ranks, metrics_port=port + rank,
            fault={**FAULT, "times": times} if times and rank == ranks - 1 else None,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def weights_of(operator: Operator, pod: list[Worker]) -> dict[str, torch.Tensor]:
    """Put a worker's final weights together from the parts of its ranks."""
    whole = {name: torch.full_like(p, torch.nan).double() for name, p in Decoder(BLOCKS).named_parameters()}
    for rank, worker in enumerate(pod):
        path = operator.folder / f"{worker.name}-{rank}.pt"
        found = torch.load(path, weights_only=True) if rank else result_of(operator, worker)
        for name, (start, stop) in found["places"].items():
            whole[name].detach().view(-1)[start:stop] = found["parts"][name].reshape(-1)
    return {name: value.detach() for name, value in whole.items()}


@pytest.mark.parametrize(("parallelism", "ranks"), [("Data", 1), ("Sharded", 2), ("Sharded", 1)])
def test_a_rank_out_of_memory_with_single_samples_keeps_no_activations(
    operate: Callable[..., Operator], parallelism: str, ranks: int
) -> None:
    """Micro-batches of 2 samples, then of 1, then units compute their activations again, on that rank only."""
    operator = operate(batch_samples=BATCH, epochs=2, parallelism=parallelism)
    pods = [start_pod(operator, "w0", ranks, times=2), start_pod(operator, "w1", 1)]
    for pod in pods:
        operator.until_ready(*pod)
    plan_pods(operator, pods, (12, 5), micro=(2 * ranks, 0))
    operator.finish([worker for pod in pods for worker in pod])
    assert all(worker.code == 0 for pod in pods for worker in pod), operator.evidence()
    expected, _ = reference(epochs=2, samples=SAMPLES)
    for pod in pods:
        assert_same_weights(weights_of(operator, pod), expected)
    *others, short = pods[0]
    assert "out of memory with micro-batches of 2 samples: using 1 from now on" in short.log()
    assert "activations of units are computed again from now on" in short.log()
    assert not any("computed again" in worker.log() for worker in [*others, *pods[1]])
