"""A new operator learns the speed of pools without workers from a few numbers in the status."""

from __future__ import annotations

from dataclasses import replace

import pytest
from heterotrain_core.contract.plan import ComputeTime, Plan
from heterotrain_core.planning.evidence import MemberEvidence
from heterotrain_core.planning.fitting import fit_members
from heterotrain_operator.api.status import HeteroTrainJobStatus, InternalPool
from heterotrain_operator.cluster_state.telemetry import MemberGauges, MemberId
from heterotrain_operator.decide.grants.persisted import compute_time, persisted_grant, speed_of
from heterotrain_operator.prom.history import Speed, TelemetryHistory
from heterotrain_operator.prom.queries import Snapshot
from support.plans import plan_of

SLOW = ComputeTime(per_sample_s=0.004, fixed_s=0.02, backward_per_sample_s=0.008, backward_fixed_s=0.01, update_s=0.01)
POOL = InternalPool(name="b")


def a_plan(*computes: ComputeTime | None, pool: str = "b") -> Plan:
    plan = plan_of([50] * len(computes))
    members = tuple(
        replace(member, pool=pool, micro_batch_samples=50, compute=compute)
        for member, compute in zip(plan.members, computes, strict=True)
    )
    return replace(plan, members=members)


def test_a_pool_s_speed_is_that_of_its_median_rank_and_stays_when_the_pool_is_empty() -> None:
    faster = replace(SLOW, per_sample_s=0.001)
    speed = speed_of(POOL, a_plan(SLOW, faster, None))
    assert speed is not None
    assert (speed.samples, compute_time(speed)) == (50, SLOW)
    known = POOL.model_copy(update={"speed": speed})
    assert speed_of(known, a_plan(SLOW, pool="other")) == speed
    assert speed_of(POOL, None) is None


def test_a_new_allocation_begins_with_the_persisted_grant() -> None:
    exhausted = {
        "speed": speed_of(POOL, a_plan(SLOW)),
        "exhausted_since": "2027-01-15T08:00:00Z",
        "exhausted_tries": 3,
    }
    status = HeteroTrainJobStatus.model_validate(
        {"internal": {"pools": [POOL.model_copy(update=exhausted).model_dump()]}}
    )
    known = persisted_grant(status)
    assert known.undecided
    assert known.limits is None
    assert {name: member.compute for name, member in known.throughput.members.items()} == {"b": SLOW}
    assert {name: (each.since_s, each.placed) for name, each in known.exhausted.items()} == {"b": (1_800_000_000.0, 0)}
    assert known.tries == {"b": 3}


def test_a_new_worker_of_a_pool_with_a_persisted_speed_gets_that_speed() -> None:
    memory = TelemetryHistory({"b": Speed(50, SLOW)})
    other = MemberId("uid-a", 0)
    memory.take(Snapshot(counters={}, gauges={other: MemberGauges(worker="w")}), {other: 1.0}, pools={"uid-a": "a"})
    telemetry = memory.telemetry
    former = [
        MemberEvidence(member=member.worker_uid, pool=telemetry.pools[member], observations=observations)
        for member, observations in telemetry.observations.items()
    ]
    (newcomer,) = fit_members([MemberEvidence(member="new", pool="b")], former).models()
    assert newcomer.compute is not None
    for samples in (25, 50, 100):
        assert seconds(newcomer.compute, samples) == pytest.approx(seconds(SLOW, samples), rel=0.02)


def seconds(compute: ComputeTime, samples: int) -> float:
    """Return a rank's own seconds for a step."""
    return (
        (compute.per_sample_s + compute.backward_per_sample_s) * samples
        + compute.fixed_s
        + compute.backward_fixed_s
        + compute.update_s
    )
