"""The status shows which workers spare memory, by what they report."""

from __future__ import annotations

from dataclasses import replace

import pytest
from heterotrain_core.contract import metrics
from heterotrain_operator.cluster_state.telemetry import MemberGauges, MemberId, Telemetry
from heterotrain_operator.prom.snapshot import Special, gauges_of
from support.fake_cluster import FakeCluster, a_running_job


def rows(cluster: FakeCluster) -> dict[str, str | None]:
    return {w["name"]: w.get("memory") for w in cluster.status["workers"]}


def reported(cluster: FakeCluster, **by_worker: MemberGauges) -> FakeCluster:
    """Let the first ranks of workers report gauges, by pool."""
    pods = {view.pool: view for view in cluster.pod_views}
    cluster.telemetry = Telemetry(
        gauges={
            MemberId(pods[pool].uid, 0): replace(gauges, worker=pods[pool].name) for pool, gauges in by_worker.items()
        }
    )
    cluster.settle()
    return cluster


def test_what_workers_spare_is_in_their_rows_and_in_a_condition() -> None:
    cluster = reported(
        a_running_job(),
        a=MemberGauges(worker="", out_of_memory=2, micro_batch_cap_samples=1, recomputes_activations=True),
        b=MemberGauges(worker="", out_of_memory=1, micro_batch_cap_samples=4),
        c=MemberGauges(worker="", micro_batch_cap_samples=8),
    )
    assert list(rows(cluster).values()) == ["ActivationsRecomputed", "SmallerMicroBatches", None]
    assert cluster.condition("MemoryShort") == ("True", "ActivationsRecomputed")
    assert cluster.message("MemoryShort").startswith("job-w0 (at most 1 sample at once) computes activations twice")
    assert cluster.events.count("MemoryShort") == 1


def test_smaller_micro_batches_alone_have_their_own_reason() -> None:
    cluster = reported(a_running_job(), a=MemberGauges(worker="", out_of_memory=1, micro_batch_cap_samples=4))
    assert cluster.condition("MemoryShort") == ("True", "SmallerMicroBatches")
    assert "job-w0 (at most 4 samples at once) computes smaller micro-batches" in cluster.message("MemoryShort")


def test_a_limit_that_the_script_has_set_is_no_shortage() -> None:
    cluster = reported(a_running_job(), a=MemberGauges(worker="", micro_batch_cap_samples=4))
    assert cluster.condition("MemoryShort") == ("False", "MemorySuffices")
    assert rows(cluster)["job-w0"] is None
    assert a_running_job().condition("MemoryShort") == ("Unknown", "NotReported")


@pytest.mark.parametrize(("value", "recomputes"), [(1.0, True), (0.0, False), (None, False)])
def test_the_workers_series_are_read(value: float | None, recomputes: bool) -> None:
    values = {metrics.OUT_OF_MEMORY: 3.0} | ({} if value is None else {metrics.CHECKPOINTED_UNITS: value})
    found = gauges_of("job-w0", values, Special())
    assert (found.out_of_memory, found.recomputes_activations) == (3, recomputes)
