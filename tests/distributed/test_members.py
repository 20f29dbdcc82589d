"""Members of several ranks: a broken one's other ranks wait with their state, and the next plan uses them.

The script holds the whole model on each rank, so a member's ranks only divide its share. Which ranks go on, who waits
and what the waiting ranks keep is the same as with a divided model.
"""

from __future__ import annotations

import signal
import urllib.request
from collections.abc import Callable

from distributed.harness import Gate, Operator, Worker, assert_finished
from heterotrain_core.contract.plan import Layout, LayoutKind

Operate = Callable[..., Operator]


PAIR = Layout(kind=LayoutKind.SHARDED, shards=2)


def readiness(worker: Worker) -> str:
    """Return what the worker's readiness endpoint says."""
    with urllib.request.urlopen(f"http://127.0.0.1:{worker.metrics_port}/ready", timeout=10) as reply:
        text: bytes = reply.read()
    return text.decode()


def test_a_whole_member_goes_on_and_the_rest_of_a_broken_one_returns_with_the_next_plan(operate: Operate) -> None:
    """Without a checkpoint: the spare keeps its process, and the next generation makes it a member by itself."""
    operator = operate(peer_timeout_s=0.3)
    gate = Gate(operator.folder, 6)
    workers = operator.start_workers(4, faults={1: {"place": "reducing", "step": 3}, 2: gate.fault})
    operator.plan_members([(workers[:2], PAIR, 9, 0), (workers[2:], PAIR, 7, 0)])
    operator.finish([workers[1]])
    assert workers[1].code == -signal.SIGKILL
    spare, whole = workers[0], workers[2:]
    operator.until(gate.reached, "the whole member goes on for three more steps")
    operator.until(lambda: "as a spare: its member lost w1/0" in readiness(spare), "the spare says why it waits")
    assert spare.poll() is None
    assert "ranks [2, 3] of the plan take part; ranks [0] of broken members wait as spares" in whole[0].log()

    operator.plan_members([([spare], (), 5, 0), (whole, PAIR, 11, 0)])
    operator.until_read([spare, *whole])
    gate.open()
    assert_finished(operator, [spare, *whole])
    assert "formation 2.0: rank 0 of 3" in spare.log()
