"""A new operator learns the speed of pools without workers from a few numbers in the status."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from heterotrain_core.contract.keys import MOST_SIZES
from heterotrain_core.contract.plan import CommunicationTime, ComputeTime, Plan
from heterotrain_operator.api.internal_status import InternalPool
from heterotrain_operator.api.status import HeteroTrainJobStatus
from heterotrain_operator.cluster_state.telemetry import MemberGauges, MemberId
from heterotrain_operator.decide.grant import persisted_grant
from heterotrain_operator.decide.learn.persisted import compute_time, exchange_of, persisted_throughput, speed_of
from heterotrain_operator.decide.learn.throughput import ThroughputModel
from heterotrain_operator.prom.history import TelemetryHistory
from heterotrain_operator.prom.snapshot import JobSeries
from heterotrain_planner.perf.exchange_sizes import ExchangeSeen
from heterotrain_planner.planning.evidence import MemberEvidence
from heterotrain_planner.planning.fitting import fit_members
from heterotrain_planner.planning.kept_speed import speed_near
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
    assert {name: member.compute for name, member in persisted_throughput(status).members.items()} == {"b": SLOW}
    assert {name: (each.since_s, each.placed) for name, each in known.exhausted.items()} == {"b": (1_800_000_000.0, 0)}
    assert known.tries == {"b": 3}


KNOWN = ThroughputModel(
    communication=CommunicationTime(overlapped_s=0.06, last_bucket_s=0.02, gamma=0.25),
    communication_members=4,
    exchange_seen=tuple(ExchangeSeen(members=n, across=n > 2, seconds=0.02 * n, steps=50 + n) for n in (2, 8, 4)),
)


def restarted(internal: object) -> ThroughputModel:
    """Return what a new operator reads from this part of the status."""
    return persisted_throughput(HeteroTrainJobStatus.model_validate({"internal": internal}))


def test_a_new_operator_knows_the_exchange_at_all_sizes_that_were_seen() -> None:
    written = exchange_of(None, KNOWN)
    assert written is not None
    assert restarted({"exchange": written.model_dump(by_alias=True)}) == KNOWN
    assert exchange_of(written, ThroughputModel()) == written, "a new operator that has measured nothing yet"
    assert exchange_of(None, ThroughputModel()) is None
    largest = replace(
        KNOWN,
        exchange_seen=tuple(
            ExchangeSeen(members=n, across=True, seconds=1e6, steps=10**6) for n in range(10**6, 10**6 + MOST_SIZES)
        ),
    )
    found = exchange_of(None, largest)
    assert found is not None
    assert len(found.model_dump_json(by_alias=True)) < 2000, "bounded, however long the job trains"


SIZE = {"members": 8, "across": True, "seconds": 0.16, "steps": 58}


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        ("eight", []),
        ([SIZE, {**SIZE, "members": 1}, {**SIZE, "members": 10**30}], [8]),
        ([{**SIZE, "seconds": 0}, {**SIZE, "seconds": "x"}, {**SIZE, "seconds": 1e300}, 5, None, SIZE], [8]),
        ([{**SIZE, "steps": -1}, {**SIZE, "across": "perhaps"}, {"members": 3}, SIZE], [8]),
        ([{**SIZE, "members": n} for n in range(2, 500)], list(range(2, 2 + MOST_SIZES))),
        ([SIZE, SIZE], [8]),
    ],
)
def test_sizes_that_no_operator_wrote_are_left_out_one_by_one(sizes: object, kept: list[int]) -> None:
    exchange = {"members": 4, "overlappedSeconds": 0.06, "lastBucketSeconds": 1e300, "gamma": 0.25, "sizes": sizes}
    found = restarted({"exchange": exchange, "pools": [{"name": "b"}]})
    assert [each.members for each in found.exchange_seen] == kept
    assert np.isfinite(found.exchange.scale(np.arange(1, 99), np.full(98, True))).all()
    assert restarted({"exchange": {**exchange, "gamma": 7}}).communication_members == 0


def test_a_new_worker_of_a_pool_with_a_persisted_speed_gets_that_speed() -> None:
    memory = TelemetryHistory({"b": speed_near(SLOW, 50)})
    other = MemberId("uid-a", 0)
    memory.take(JobSeries(counters={}, gauges={other: MemberGauges(worker="w")}), {other: 1.0}, pools={"uid-a": "a"})
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
