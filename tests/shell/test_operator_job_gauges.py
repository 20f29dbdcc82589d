"""The operator's gauges of jobs: exported while a job trains, removed with it, and absent while unknown."""

from __future__ import annotations

from heterotrain_core.contract.plan import CommunicationTime
from heterotrain_operator.cluster_state.parse import parse_job, parse_node
from heterotrain_operator.cluster_state.views import JobKey
from heterotrain_operator.decide.grant import JobGrant
from heterotrain_operator.engine.app import App
from heterotrain_operator.engine.job_gauges import JobGauges
from heterotrain_operator.settings import Settings
from support.executors import at_once
from support.exported_counters import three_pools
from support.fake_cluster import JOB_UID, FakeCluster, pool
from support.fakes import FakeKube
from support.operator_app import deliver_pods_and_plan
from support.simulated_training import Training

KEY = JobKey("ns", "job")
LABELS = {"job_uid": JOB_UID, "job_namespace": "ns", "job_name": "job"}
PREDICTED, MEASURED = (f"heterotrain_operator_{name}_step_seconds" for name in ("predicted", "measured"))


def an_operator(cluster: FakeCluster) -> App:
    """Return an operator that has just started and listed this cluster."""
    kube = FakeKube()
    app = App(kube, Settings(leader_election=False, status_interval_s=0.0), threads=at_once())
    for body in cluster.nodes.values():
        app.store.nodes.put(parse_node(body))
    kube.objects["heterotrainjobs", "ns", "job"] = cluster.job
    app.store.jobs.put(parse_job(cluster.job))
    deliver_pods_and_plan(app, kube, cluster)
    return app


def value(app: App, name: str) -> float | None:
    found: float | None = app.metrics.registry.get_sample_value(name, LABELS)
    return found


async def test_a_training_job_has_series_right_after_a_restart_of_the_operator() -> None:
    cluster = FakeCluster(spec={"training": {"globalBatchSize": 512, "epochs": 9}}).with_nodes("a", "b", "c").start()
    training = Training(
        cluster,
        three_pools(),
        epoch_samples=512 * 40,
        scrape_every=4,
        communication=CommunicationTime(),
        variation=0.03,
    )
    for _ in range(3):
        training.epoch()
    app = an_operator(cluster)
    assert value(app, MEASURED) is None
    await app.reconciler.run_once(KEY)
    status = cluster.status["prediction"]
    assert value(app, PREDICTED) == status["predictedStepSeconds"]
    assert value(app, MEASURED) == status["measuredStepSeconds"]
    app.events.job(cluster.job, deleted=True)
    await app.reconciler.run_once(KEY)
    assert value(app, PREDICTED) is None


async def test_unknown_values_and_jobs_that_do_not_train_have_no_series() -> None:
    cluster = FakeCluster().with_nodes("a", "b", "c").start()
    app = an_operator(cluster)
    await app.reconciler.run_once(KEY)
    assert value(app, PREDICTED) is None
    assert value(app, MEASURED) is None
    cluster.edit(lambda spec: spec.update(suspend=True))
    cluster.job["metadata"]["resourceVersion"] = "1000"
    app.events.job(cluster.job, deleted=False)
    await app.reconciler.run_once(KEY)
    assert {sample.name for family in app.metrics.job_gauges.collect() for sample in family.samples} == set()


def test_wanted_and_granted_workers_are_exported_while_a_job_waits_and_removed_with_it() -> None:
    cluster = FakeCluster(
        pool("a", maxReplicas=4, pricePerHour="2.0"), spec={"elasticPolicy": {"minReplicas": 2}}
    ).with_nodes("a", cpu="4")
    cluster.grant = JobGrant(limits={"a": 0}, reason="waits")
    cluster.settle()
    gauges = JobGauges()
    job = cluster.job_view
    gauges.show(KEY, JOB_UID, job.status, job.spec)

    def values() -> dict[str, float]:
        found = {sample.name: sample.value for family in gauges.collect() for sample in family.samples}
        return {name: value for name, value in found.items() if not name.endswith(("_running", "_available"))}

    name = "heterotrain_operator_{}_workers".format
    rows = {"heterotrain_operator_disruptions_in_a_row": 0}
    assert values() == {name("max"): 4, name("min"): 2, name("granted"): 0, name("placed"): 0, **rows}
    cluster.grant = JobGrant(limits={"a": 3}, reason="grows")
    cluster.settle()
    cluster.schedule().run().settle()
    status = cluster.job_view.status.model_copy(update={"samples_per_second": 100.0})
    gauges.show(KEY, JOB_UID, status, job.spec)
    assert values() | {name("granted"): 3, name("placed"): 3} == values()
    assert values()["heterotrain_operator_samples_per_price"] == 100 * 3600 / 6
    gauges.show(KEY, JOB_UID, None)
    assert values() == {}


def test_alerts_have_series_for_jobs_that_do_not_train_lack_telemetry_or_failed() -> None:
    cluster = FakeCluster().with_nodes("a", "b", "c").start()
    gauges, view = JobGauges(), cluster.job_view

    def values(**status_of: str) -> dict[str, float]:
        kept = [each for each in view.status.conditions if each.type not in status_of]
        changed = [
            each.model_copy(update={"status": status_of[each.type], "reason": "Other"})
            for each in view.status.conditions
            if each.type in status_of
        ]
        assert len(changed) == len(status_of)
        gauges.show(KEY, JOB_UID, view.status.model_copy(update={"conditions": (*kept, *changed)}), view.spec)
        return {
            sample.name.removeprefix("heterotrain_operator_"): sample.value
            for family in gauges.collect()
            for sample in family.samples
        }

    training = values(Running="True", TelemetryAvailable="True")
    assert (training["running"], training["telemetry_available"]) == (1.0, 1.0)
    assert "failed" not in training
    waiting = values(Running="False", TelemetryAvailable="False")
    assert (waiting["running"], waiting["telemetry_available"]) == (0.0, 0.0)
    assert "telemetry_available" not in values(TelemetryAvailable="Unknown")
    assert values(Failed="True") == {"failed": 1.0}
    gauges.show(KEY, JOB_UID, None)
    assert [sample for family in gauges.collect() for sample in family.samples] == []


def test_units_of_each_worker_are_exported_while_a_pipeline_trains() -> None:
    cluster = FakeCluster().with_nodes("a", "b", "c").start()
    gauges, view = JobGauges(), cluster.job_view
    first, second, *_ = view.status.workers
    workers = (first.model_copy(update={"units": "0-17"}), second.model_copy(update={"units": "18-20, 23-23"}))
    gauges.show(KEY, JOB_UID, view.status.model_copy(update={"workers": workers}), view.spec)

    def values() -> dict[tuple[str, str], float]:
        return {
            (sample.labels["worker"], sample.labels["units"]): sample.value
            for family in gauges.collect()
            for sample in family.samples
            if sample.name == "heterotrain_operator_worker_units"
        }

    assert values() == {(first.name, "0-17"): 18, (second.name, "18-20, 23-23"): 4}
    gauges.show(KEY, JOB_UID, view.status, view.spec)
    assert values() == {}
