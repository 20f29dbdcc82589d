"""Jobs whose members are sharded over several workers: shares by speed, training state by memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from heterotrain_core.contract.codec import decode_plan
from heterotrain_core.contract.consistency import problems
from heterotrain_core.contract.plan import LayoutKind, Member, Plan, Rank
from heterotrain_core.units import UnitProfile, UnitSeconds
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.profiles import PoolProfile
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.decide.plan.layout_problem import problem_of
from heterotrain_operator.decide.plan.memory_limits import _shard_bytes
from heterotrain_planner.layout.best import shards_of
from heterotrain_planner.layout.problem import Problem
from support.fake_cluster import FakeCluster, pool

MIB = 2**20
UNITS, UNIT = 8, 100 * MIB
"""Units of the model, and the training state of one."""


LIST = tuple(f"blocks.{index}" for index in range(UNITS))
AROUND = ("before blocks", *LIST[1:-1], "after blocks")


def profile(
    name: str, *, memory_units: float, slowness: float, can_shard: bool = True, units_named: Sequence[str] = AROUND
) -> PoolProfile:
    """Return equal units of 100 ms a sample, large enough for links of 10 Gbit/s to be hidden behind."""
    points = tuple(
        UnitSeconds(micro_batch_samples=n, forward_s=0.03 * n * slowness, backward_s=0.07 * n * slowness)
        for n in (1, 2, 4)
    )
    units = tuple(
        UnitProfile(
            name=unit_name, parameter_bytes=UNIT // 4, activation_bytes=MIB, boundary_bytes=MIB,
            seconds={name: points},
        )
        for unit_name in units_named
    )  # fmt: skip
    return PoolProfile(memory_bytes=int(memory_units * UNIT), units=units, state_ratio=4.0, can_shard=can_shard)


MIXED = {
    "a": profile("a", memory_units=8, slowness=1),
    "b": profile("b", memory_units=5, slowness=2),
    "c": profile("c", memory_units=4, slowness=4),
}


def a_cluster(mode: dict[str, Any], profiles: dict[str, PoolProfile] = MIXED, **spec: Any) -> FakeCluster:
    pools = [pool(name, maxReplicas=1) for name in profiles]
    given = {"parallelism": mode, "elasticPolicy": {"minReplicas": 1}, **spec}
    cluster = FakeCluster(*pools, spec=given)
    for name in profiles:
        cluster.with_nodes(name, cpu="1")
    cluster.telemetry = Telemetry(profiles=profiles)
    return cluster


def plan_of(cluster: FakeCluster) -> Plan:
    plan = decode_plan(json.dumps(cluster.plan_json), job_uid=cluster.plan_json["job_uid"])
    assert isinstance(plan, Plan)
    assert problems(plan) == ()
    return plan


def test_one_member_of_all_workers_divides_samples_by_speed_and_state_by_memory() -> None:
    cluster = a_cluster({"mode": "ShardedAcrossWorkers"}).start()
    plan = plan_of(cluster)
    (member,) = plan.members
    layout = member.layout
    assert (layout.kind, layout.shards) == (LayoutKind.SHARDED, 3)
    assert [rank.shard for rank in plan.ranks] == [0, 1, 2]
    by_pool = {
        plan.pool_of(rank): (state, samples)
        for rank, state, samples in zip(plan.ranks, layout.state_weights, layout.sample_weights, strict=True)
    }
    assert by_pool["a"][1] > by_pool["b"][1] > by_pool["c"][1], "shares follow speed"
    shown = cluster.status["plan"]["layout"]
    assert shown.startswith("1 member: [")
    assert shown.endswith("% of all units]")
    assert cluster.condition("LayoutPlanned")[0] == "True"
    assert cluster.condition("Running")[0] == "True"
    assert plan.prediction is not None
    held = {each["pool"]: each["units"] for each in cluster.status["workers"]}
    assert all(text.endswith("% of all") for text in held.values())


def test_state_goes_where_there_is_room_for_it() -> None:
    """The fast device is so small that most of the state has to be on the slow one."""
    profiles = {
        "a": profile("a", memory_units=5, slowness=1),
        "b": profile("b", memory_units=9, slowness=4),
    }
    layout = plan_of(a_cluster({"mode": "ShardedAcrossWorkers"}, profiles).start()).members[0].layout
    assert layout.sample_weights[0] > 2 * layout.sample_weights[1]
    assert layout.state_weights[0] < layout.state_weights[1]


@pytest.mark.parametrize(("names", "ahead_alone"), [(AROUND, 2), (LIST, 1)])
def test_the_predicted_step_is_that_of_units_gathered_ahead_and_reduced_before_the_next_one_computes(
    names: tuple[str, ...], ahead_alone: int
) -> None:
    """On a link so slow that units move for longer than they compute, what does not overlap shows."""
    profiles = {name: profile(name, memory_units=6, slowness=1, units_named=names) for name in "ab"}
    mode = {"mode": "ShardedAcrossWorkers", "linkMbitPerSecond": 100}
    plan = plan_of(a_cluster(mode, profiles).start())
    (member,) = plan.members
    assert member.layout.state_weights[0] == member.layout.state_weights[1]
    passes = -(-member.share_samples // member.micro_batch_samples)
    each = -(-member.micro_batch_samples // 2)
    forward_s, backward_s = 0.03 * each, 0.07 * each
    moved_s = UNIT / 4 / 2 / (100e6 / 8)
    assert moved_s > backward_s
    # Of eight units, those around the list, or the first of the list, are gathered alone, and all are reduced alone.
    # The others are gathered beside a forward pass, and all of these but one beside a backward pass: the last one of
    # the list is still there.
    beside = UNITS - ahead_alone
    again = beside - 1 if names is AROUND else beside
    alone_s = (ahead_alone + UNITS) * moved_s
    pass_s = alone_s + (beside + again) * moved_s + (UNITS - beside) * forward_s + (UNITS - again) * backward_s
    assert plan.prediction is not None
    assert plan.prediction.step_s == pytest.approx(passes * pass_s, rel=1e-4)


def test_a_lost_worker_leaves_a_member_of_the_others() -> None:
    """Two of the three still hold the model; the plan changes the parts, and the lost one is in no member."""
    cluster = a_cluster({"mode": "ShardedAcrossWorkers"}).start()
    lost = next(rank.worker for rank in plan_of(cluster).ranks if plan_of(cluster).pool_of(rank) == "c")
    cluster.vanish(lost).settle()
    plan = plan_of(cluster)
    assert lost not in {rank.worker for rank in plan.ranks}
    assert plan.members[0].layout.shards == 2


def test_workers_that_cannot_divide_units_are_named() -> None:
    """An image without it, or an optimizer that needs whole parameters."""
    profiles = MIXED | {"b": replace(MIXED["b"], can_shard=False)}
    cluster = a_cluster({"mode": "ShardedAcrossWorkers"}, profiles).start()
    assert plan_of(cluster).generation == 0
    assert cluster.condition("LayoutPlanned")[0] == "False"
    assert "the workers of pool b cannot divide units" in cluster.message("LayoutPlanned")


def test_auto_divides_a_unit_that_no_device_holds() -> None:
    """A pipeline needs whole units on a device; a member whose ranks divide every unit does not."""
    small = {
        name: replace(
            each,
            units=tuple(replace(unit, parameter_bytes=UNIT) for unit in each.units[:1]),
            memory_bytes=38 * UNIT // 10,
        )
        for name, each in MIXED.items()
    }
    sharded = plan_of(a_cluster({"mode": "Auto"}, small).start())
    assert [member.layout.kind for member in sharded.members] == [LayoutKind.SHARDED]
    pipeline = a_cluster({"mode": "Pipeline"}, small).start()
    assert plan_of(pipeline).generation == 0
    assert pipeline.condition("LayoutPlanned")[0] == "False"
    old = {name: replace(each, can_shard=False) for name, each in small.items()}
    assert plan_of(a_cluster({"mode": "Auto"}, old).start()).generation == 0


def test_the_bytes_of_a_shard_are_counted_as_the_planner_does() -> None:
    """After a worker has run out of memory, its pool is planned with less than these bytes."""
    spec = HeteroTrainJobSpec.model_validate(a_cluster({"mode": "ShardedAcrossWorkers"}).job["spec"])
    problem = problem_of(spec, MIXED, dict.fromkeys(MIXED, 1))
    assert isinstance(problem, Problem)
    templates = [template for template in shards_of(problem) if len(template.layout.shards) == 3]
    assert templates
    for template in templates:
        layout, size = template.layout.planned, template.micro_batch_samples
        member = Member(index=0, pool="a+b+c", share_samples=size, micro_batch_samples=size, layout=layout)
        for index, shard in enumerate(template.layout.shards):
            rank = Rank(
                rank=index, member=0, worker="w", worker_uid="u", address="", peer_port=1, on_demand=True, shard=index
            )  # fmt: skip
            assert _shard_bytes(problem, member, rank) == pytest.approx(shard.memory_bytes, rel=1e-3)
