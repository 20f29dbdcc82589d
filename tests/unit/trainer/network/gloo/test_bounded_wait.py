"""No wait for gloo outlasts its group."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from heterotrain.network.connection_setup import c10d
from heterotrain.network.gloo import bounded_wait
from heterotrain.network.gloo.bounded_wait import BoundedWait, bounded, release_abandoned
from heterotrain.network.gloo.script_group import OTHERS, SHAPED, carried_by
from support.waiting import UNLIMITED_S, wait_until


def pair() -> list[c10d.ProcessGroupGloo]:
    """Return the two ranks of a group, both in this process."""
    store, made = c10d.HashStore(), {}

    def make(rank: int) -> None:
        made[rank] = c10d.ProcessGroupGloo(store, rank, 2, timedelta(seconds=UNLIMITED_S))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[rank] for rank in range(2)]


def test_a_successful_operation_is_done() -> None:
    """It has its result, whether or not the group has been cut."""
    ranks, ones = pair(), [torch.ones(3), torch.ones(3)]
    works = [rank.allreduce([one]) for rank, one in zip(ranks, ones, strict=True)]
    for work, rank in zip(works, ranks, strict=True):
        wait_until(work.is_completed, "the operation has ended", timeout_s=60.0)
        BoundedWait(work, is_over=lambda: True, belongs_to=rank).wait()
    assert [one.tolist() for one in ones] == [[2.0] * 3] * 2


def test_an_operation_that_never_ends_is_abandoned_once_the_group_is_cut() -> None:
    """As after a broken connection that gloo does not detect; dropping its group afterwards does not wait either."""
    ranks, looks = pair(), iter([False, False, True])
    watched = BoundedWait(ranks[0].allreduce([torch.ones(3)]), is_over=lambda: next(looks), belongs_to=ranks[0])
    with pytest.raises(RuntimeError):
        watched.wait()
    assert watched.is_done
    ranks.clear()


@pytest.mark.parametrize("name", [name for name in (*SHAPED, *OTHERS) if hasattr(dist.ProcessGroup, name)])
def test_no_collective_outlasts_a_group_that_was_cut(name: str) -> None:
    """Its other rank never takes part, and gloo's own limit is hours: some waits of PyTorch ignore a shorter one."""
    ranks = pair()
    group = carried_by(ranks[1], c10d.HashStore(), rank=1, world_size=2)
    root = c10d.BroadcastOptions() if name == "broadcast" else None  # of rank 0
    one, two = torch.ones(2), torch.ones(4)
    arguments: tuple[Any, ...] = {
        "allreduce": ([one],), "allreduce_coalesced": ([one],), "broadcast": ([one], root), "reduce": ([one],),
        "allgather": ([[one, one]], [one]), "allgather_coalesced": ([[one], [one]], [one]),
        "gather": ([], [one]), "reduce_scatter": ([one], [[one, one]]), "scatter": ([one], []),
        "alltoall": ([one, one], [one, one]), "alltoall_base": (one, one, [], []),
        "all_to_all_single": (one, one, [], []), "barrier": (),
    }.get(name, ((one, two) if "reduce_scatter" in name else (two, one)))  # fmt: skip
    if name.endswith("_coalesced") and len(arguments) == 2 and isinstance(arguments[0], torch.Tensor):
        arguments = ([arguments[0]], [arguments[1]])
    try:
        work = getattr(group, name)(*arguments)
    except RuntimeError as error:
        assert "does not support" in str(error)  # noqa: PT017  # this version of gloo lacks it
        return
    with pytest.raises(RuntimeError, match="did not report"):
        bounded(name, work, is_over=lambda: True, belongs_to=group).wait()


def test_an_abandoned_operation_that_gloo_ends_later_keeps_neither_threads_nor_descriptors() -> None:
    """Gloo ends it at its own time-out; in a training, the next wait then lets go of it."""

    def held() -> tuple[int, int]:
        return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))

    pair().clear()  # what the first group of a process leaves for all later ones
    before = held()
    ranks, options = pair(), c10d.AllreduceOptions()
    options.timeout = timedelta(seconds=1)
    watched = BoundedWait(ranks[0].allreduce([torch.ones(3)], options), is_over=lambda: True, belongs_to=ranks[0])
    with pytest.raises(RuntimeError):
        watched.wait()
    assert bounded_wait._ABANDONED[-1].kept[1] is ranks[0]
    del watched
    ranks.clear()

    def released() -> bool:
        release_abandoned()
        return all(now <= then for now, then in zip(held(), before, strict=True))

    wait_until(released, "the group is gone", timeout_s=60.0)
