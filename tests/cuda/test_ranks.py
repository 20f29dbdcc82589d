"""Ranks on a GPU: NCCL if each rank has its own, gloo if two ranks share one.

Not run yet: there was no GPU where these tests were written.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from distributed.harness import Operator, Worker, assert_same_weights, reference
from heterotrain.data.sample_log import lineage
from heterotrain_core.contract.outcome import Ending

Operate = Callable[..., Operator]


def assert_finished(operator: Operator, workers: list[Worker], *, epochs: int) -> None:
    """Fail unless all finished with weights and samples of one process on the CPU, to a relative 1e-10."""
    operator.finish(workers)
    expected, ids = reference(epochs=epochs)
    for worker in workers:
        assert worker.outcome is not None, worker.log()
        assert worker.outcome.ending is Ending.FINISHED, worker.log()
        assert_same_weights(operator.weights(worker), expected)
    assert lineage(operator.folder / "samples") == ids


@pytest.mark.parametrize("backend", ["NCCL", "Auto"])
def test_one_rank_by_nccl(operate: Operate, backend: str) -> None:
    """A rank alone on its GPU uses NCCL, whether configured or chosen automatically."""
    operator = operate(backend=backend)
    worker = operator.start("w0")
    operator.until_ready(worker)
    operator.plan([worker])
    assert_finished(operator, [worker], epochs=2)
    assert "gradients travel by gloo" not in worker.log()


def test_two_ranks_on_one_gpu_by_gloo_and_a_third_joins(operate: Operate) -> None:
    """Two ranks have uneven shares on one device; the joining rank's state comes from the donors' device memory."""
    operator = operate(epochs=3)
    workers = [operator.start(f"w{i}", slow_s=0.02) for i in range(2)]
    operator.until_ready(*workers)
    operator.plan(workers, shares=(11, 5))
    operator.until_step(workers[0], 3)
    workers.append(operator.start("w2", slow_s=0.02))
    operator.until_ready(workers[2])
    operator.plan(workers, shares=(4, 9, 3))
    assert_finished(operator, workers, epochs=3)
    assert "ranks 0 (w0/0) and 1 (w1/0) share one GPU, which NCCL refuses" in workers[0].log()


def test_nccl_for_two_ranks_on_one_gpu_is_refused_with_a_remedy(operate: Operate) -> None:
    """Both ranks report the problem and the remedy before NCCL fails."""
    operator = operate(backend="NCCL")
    workers = [operator.start(f"w{i}") for i in range(2)]
    operator.until_ready(*workers)
    operator.plan(workers)
    operator.finish(workers)
    for worker in workers:
        assert worker.outcome is not None, worker.log()
        assert worker.outcome.ending is Ending.FAILED
        assert "set it to auto or gloo, or give each rank a GPU of its own" in worker.outcome.reason
