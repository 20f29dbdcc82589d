"""Ranks on a GPU: NCCL if each rank has its own, gloo if two ranks share one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from distributed.harness import Operator, assert_finished
from heterotrain.network.connection_setup import c10d, gloo_group
from heterotrain.network.group import Group
from heterotrain.network.peer_sockets import SocketFilter
from heterotrain.network.sums import FlatSums
from heterotrain_core.contract.outcome import Ending

Operate = Callable[..., Operator]


@pytest.mark.parametrize("backend", ["NCCL", "Auto"])
def test_one_rank_by_nccl(operate: Operate, backend: str) -> None:
    """A rank alone on its GPU uses NCCL, whether configured or chosen automatically."""
    operator = operate(backend=backend)
    worker = operator.start_ready("w0")
    operator.plan([worker])
    assert_finished(operator, [worker], epochs=2)
    assert "gradients travel by gloo" not in worker.log()


def test_two_ranks_on_one_gpu_by_gloo_and_a_third_joins(operate: Operate) -> None:
    """Two ranks have uneven shares on one device; the joining rank's state comes from the donors' device memory."""
    operator = operate(epochs=3, peer_timeout_s=30.0)  # nobody writes a plan for a lone survivor
    workers = operator.start_workers(2, slow_s=0.02)
    operator.plan(workers, shares=(11, 5))
    operator.until_step(workers[0], 3)
    workers.append(operator.start_ready("w2", slow_s=0.02))
    operator.plan(workers, shares=(4, 9, 3))
    assert_finished(operator, workers, epochs=3)
    assert "ranks 0 (w0/0) and 1 (w1/0) share one GPU, which NCCL refuses" in workers[0].log()


def test_nccl_for_two_ranks_on_one_gpu_is_refused_with_a_remedy(operate: Operate) -> None:
    """Both ranks report the problem and the remedy before NCCL fails."""
    operator = operate(backend="NCCL")
    workers = operator.start_workers(2)
    operator.plan(workers)
    operator.finish(workers)
    for worker in workers:
        assert worker.outcome is not None, worker.log()
        assert worker.outcome.ending is Ending.FAILED
        assert "set it to Auto or Gloo, or give each rank a GPU of its own" in worker.outcome.reason


def test_a_sum_by_gloo_does_not_count_as_a_change_by_the_script() -> None:
    """Gloo's thread writes the sum with ``copy_``, at any time; the guards against scripts count such changes."""
    group = Group(rank=0, world_size=1, sockets=SocketFilter(members=frozenset(), excluded_ports=frozenset()))
    made = gloo_group(c10d.HashStore(), "alone", rank=0, world_size=1)
    group._sums = FlatSums(made, is_nccl=False, is_over=group.is_over)
    flat = torch.ones(8, device="cuda")
    raw, counts = flat.clone(), []
    for tensor, start in ((raw, lambda: made.allreduce([raw])), (flat, lambda: group.all_reduce(flat))):
        before = tensor._version
        start().wait()
        counts.append(tensor._version - before)
    assert counts[0] > 0, "gloo no longer counts, so the alias in Group.all_reduce can go"
    assert counts[1] == 0
    group.close()
