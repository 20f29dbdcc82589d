"""Members of several ranks: a broken one's other ranks wait with their state, and the next plan uses them.

The script holds the whole model on each rank, so a member's ranks only divide its share. Which ranks go on, who waits
and what the waiting ranks keep is the same as with a divided model.
"""

from __future__ import annotations

import signal
import urllib.request
from collections.abc import Callable, Sequence

from distributed.harness import JOB_UID, Gate, Operator, Worker, assert_same_weights, deliver, reference
from heterotrain_core.contract.outcome import Ending
from heterotrain_core.contract.plan import Layout, LayoutKind, Member, Plan, Rank
from support.lineage import lineage

Operate = Callable[..., Operator]


def plan_members(operator: Operator, groups: Sequence[Sequence[Worker]], shares: Sequence[int]) -> Plan:
    """Write a generation with these members, each rank in a pod of its own, and the rest of the workers not named."""
    operator.generation += 1
    operator.revision += 1
    members = tuple(
        Member(index=index, pool="pool", share_samples=share, layout=_layout(len(group)))
        for index, (group, share) in enumerate(zip(groups, shares, strict=True))
    )
    places = [(index, shard, worker) for index, group in enumerate(groups) for shard, worker in enumerate(group)]
    ranks = tuple(
        Rank(
            rank=number, member=index, shard=shard, worker=worker.name, worker_uid=worker.uid, address="127.0.0.1",
            peer_port=worker.peer_port, on_demand=True,
        )
        for number, (index, shard, worker) in enumerate(places)
    )  # fmt: skip
    plan = Plan(
        job_uid=JOB_UID, generation=operator.generation, revision=operator.revision, members=members, ranks=ranks,
        global_batch_samples=sum(shares),
    )  # fmt: skip
    operator.plans.append(plan)
    for _, _, worker in places:
        deliver(plan, worker)
    return plan


def _layout(ranks: int) -> Layout:
    return Layout(kind=LayoutKind.SHARDED, shards=ranks) if ranks > 1 else Layout()


def readiness(worker: Worker) -> str:
    """Return what the worker's readiness endpoint says."""
    with urllib.request.urlopen(f"http://127.0.0.1:{worker.metrics_port}/ready", timeout=10) as reply:
        text: bytes = reply.read()
    return text.decode()


def test_a_whole_member_goes_on_and_the_rest_of_a_broken_one_returns_with_the_next_plan(operate: Operate) -> None:
    """Without a checkpoint: the spare keeps its process, and the next generation makes it a member by itself."""
    operator = operate(peer_timeout_s=0.3)
    gate = Gate(operator.folder, 6)
    faults = (None, {"place": "reducing", "step": 3}, gate.fault, None)
    workers = [operator.start(f"w{i}", fault=fault) for i, fault in enumerate(faults)]
    operator.until_ready(*workers)
    plan_members(operator, [workers[:2], workers[2:]], (9, 7))
    operator.finish([workers[1]])
    assert workers[1].code == -signal.SIGKILL
    spare, whole = workers[0], workers[2:]
    operator.until(gate.reached, "the whole member goes on for three more steps")
    operator.until(lambda: "as a spare: its member lost w1/0" in readiness(spare), "the spare says why it waits")
    assert spare.poll() is None
    assert "ranks [2, 3] of the plan take part; ranks [0] of broken members wait as spares" in whole[0].log()

    plan = plan_members(operator, [[spare], whole], (5, 11))
    text = f"plan {plan.generation}.{plan.revision}"
    operator.until(lambda: all(text in worker.log() for worker in (spare, *whole)), "the plan is read")
    gate.open()
    operator.finish(workers)
    assert "formation 2.0: rank 0 of 3" in spare.log()
    expected, ids = reference(epochs=2)
    for worker in (spare, *whole):
        assert worker.outcome is not None, worker.log()
        assert (worker.code, worker.outcome.ending) == (0, Ending.FINISHED), worker.log()
        assert_same_weights(operator.weights(worker), expected)
    assert lineage(operator.folder / "samples") == ids
