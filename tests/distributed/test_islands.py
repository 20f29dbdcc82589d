"""Some workers have GPUs and others have none: sums in two levels, and losses in each of them."""

from __future__ import annotations

import signal
from collections.abc import Callable

from distributed.harness import Operator, assert_finished


def test_a_head_a_rank_on_a_cpu_and_a_rank_of_an_island_are_lost(operate: Callable[..., Operator]) -> None:
    """Uneven shares; after each loss the survivors divide into islands again, until no island is left."""
    operator = operate()
    faults = {0: (3, "launched"), 4: (6, "reducing"), 2: (9, "launched")}
    workers = [
        operator.start(
            f"w{i}", script="distributed.island_scripts:train", gpu=f"GPU-{i}" if i < 3 else "",
            fault={"step": faults[i][0], "place": faults[i][1]} if i in faults else None,
        )
        for i in range(5)
    ]  # fmt: skip
    operator.until_ready(*workers)
    operator.plan(workers, shares=(6, 4, 3, 2, 1))
    operator.finish(workers)
    assert {worker.code for i, worker in enumerate(workers) if i in faults} == {-signal.SIGKILL}, operator.evidence()
    assert_finished(operator, [worker for i, worker in enumerate(workers) if i not in faults])
    log = workers[1].log()
    for sentence in (
        "by nccl among ranks 0, 1, 2, and by gloo to all others: rank 3 (w3/0) and 1 more have no GPU",
        "by nccl among ranks 0, 1, and by gloo to all others: rank 2 (w3/0) and 1 more have no GPU",
        "by nccl among ranks 0, 1, and by gloo to all others: rank 2 (w3/0) has no GPU",
        "gradients travel by gloo: rank 1 (w3/0) has no GPU",
    ):
        assert sentence in log, log
