"""Ranks of whole and of sharded models that run out of memory with a single sample: they keep no activations then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from distributed.harness import Operator, Worker, assert_same_weights
from distributed.pipeline_job_scripts import Decoder
from distributed.test_pipeline_jobs import BATCH, BLOCKS, SAMPLES, SCRIPT, reference, result_of
from distributed.test_sharded_jobs import finish_pods, plan_pods, start_pods

FAULT = {"place": "in loss", "step": 2, "do": "exhaust", "every": 0, "times": 2}


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
    pods = start_pods(operator, ranks, 1, script=SCRIPT, faults={0: {ranks - 1: FAULT}})
    plan_pods(operator, pods, (12, 5), micro=(2 * ranks, 0))
    finish_pods(operator, pods)
    expected, _ = reference(epochs=2, samples=SAMPLES)
    for pod in pods:
        assert_same_weights(weights_of(operator, pod), expected)
    *others, short = pods[0]
    assert "out of memory with micro-batches of 2 samples: using 1 from now on" in short.log()
    assert "activations of units are computed again from now on" in short.log()
    assert not any("computed again" in worker.log() for worker in [*others, *pods[1]])
