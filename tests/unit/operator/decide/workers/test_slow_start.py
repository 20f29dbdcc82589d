"""How many workers wait for an autoscaler's nodes, by the workers that got one lately."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from heterotrain_operator.decide.workers.replicas import ARRIVED_S, _arrived
from heterotrain_operator.decide.workers.state import Worker, WorkerState
from unit.operator.decide.workers.test_waiting import POD

NOW_S = 1_000.0


def a_worker(created_s: float, scheduled_s: float | None = None) -> Worker:
    state = WorkerState.WAITING if scheduled_s is None else WorkerState.STARTING
    pod = replace(POD, created_s=created_s, scheduled_s=scheduled_s or 0.0)
    return Worker(pod=pod, state=state)


@pytest.mark.parametrize(
    ("workers", "arrived"),
    [
        ([a_worker(900, 911)], 1),
        ([a_worker(900, 905)], 0),  # there was a node for it
        ([a_worker(200, 300)], 0),  # long ago
        ([a_worker(900)], 0),
        ([a_worker(900, 920), a_worker(921, 922)], 1),  # the node has room for another one
        ([a_worker(900, 920), a_worker(900), a_worker(921, 922)], 2),  # a node came, and a younger worker took it
        ([a_worker(900, 920), a_worker(900, 930), a_worker(921, 922)], 3),
        ([a_worker(915), a_worker(916, 917)], 0),  # nobody had waited long
    ],
)
def test_a_node_counts_that_came_while_a_worker_had_waited(workers: list[Worker], arrived: int) -> None:
    assert _arrived(workers, now_s=NOW_S) == arrived
    random.Random(0).shuffle(workers)  # noqa: S311  # seeded chance
    assert _arrived(workers, now_s=NOW_S) == arrived
    assert _arrived(workers, now_s=NOW_S + ARRIVED_S) == 0
