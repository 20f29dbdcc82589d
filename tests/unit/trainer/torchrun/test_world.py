"""The world of a torchrun script: variables and processes of each pod, from the plan."""

from __future__ import annotations

from dataclasses import replace

from heterotrain.torchrun.world import commands, world_of
from heterotrain_core.contract.plan import Plan
from support.plans import plan_of


def a_plan(*ranks_of_workers: int, **fields: object) -> Plan:
    """Return a plan with so many ranks on each of the workers w0, w1 and so on, at 10.0.0.1 and so on."""
    plan = plan_of([1] * sum(ranks_of_workers), generation=7)
    places = [(worker, local) for worker, count in enumerate(ranks_of_workers) for local in range(count)]
    ranks = tuple(
        replace(
            rank,
            worker=f"w{worker}",
            worker_uid=f"u{worker}",
            address=f"10.0.0.{worker + 1}",
            local_rank=local,
            peer_port=29400 + local,
        )
        for rank, (worker, local) in zip(plan.ranks, places, strict=True)
    )
    return replace(plan, ranks=ranks, **fields)


def test_each_process_gets_what_torchrun_would_give_it() -> None:
    """Two pods with two ranks and one: the second pod's process is rank 2 of 3."""
    first = world_of(a_plan(2, 1), worker_uid="u0", run_id="job")
    second = world_of(a_plan(2, 1), worker_uid="u1", run_id="job")
    assert first is not None
    assert second is not None
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR")
    given = [
        [variables[name] for name in names]
        for world in (first, second)
        for _, variables in commands(["train.py"], world, python="python")
    ]
    assert given == [
        ["0", "0", "2", "3", "0", "2", "10.0.0.1"],
        ["1", "1", "2", "3", "0", "2", "10.0.0.1"],
        ["2", "0", "1", "3", "1", "2", "10.0.0.1"],
    ]
    ports = {variables["MASTER_PORT"] for _, variables in commands(["train.py"], first, python="python")}
    assert ports == {"29507"}, "the port is that of the generation"


def test_torchrun_itself_runs_once_in_each_pod_with_its_own_defaults() -> None:
    world = world_of(a_plan(2, 1), worker_uid="u1", run_id="job")
    assert world is not None
    ((command, variables),) = commands(["/usr/bin/torchrun", "train.py", "--lr", "1"], world, python="python")
    assert command == ["/usr/bin/torchrun", "train.py", "--lr", "1"]
    assert variables == {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "10.0.0.1",
        "PET_MASTER_PORT": "29507",
    }


def test_a_worker_that_is_not_in_the_plan_or_has_to_leave_has_no_world() -> None:
    assert world_of(a_plan(1, 1), worker_uid="elsewhere", run_id="job") is None
    assert world_of(a_plan(1, 1, drain=("w1",)), worker_uid="u1", run_id="job") is None
    assert world_of(a_plan(1, 1, drain=("w1",)), worker_uid="u0", run_id="job") is not None
