"""Jobs with ``runtime: Torchrun``: equal shares, a generation for each change of membership, the same outcomes."""

from __future__ import annotations

import pytest
from heterotrain_core.contract import env
from heterotrain_core.contract.outcome import Cause, Ending
from heterotrain_operator.cluster_state.telemetry import MemberGauges, MemberId, Telemetry
from support.fake_cluster import FakeCluster, pool
from support.multi_job_cluster import MultiJobCluster


def a_torchrun_job(*pools: dict[str, object], **spec: object) -> FakeCluster:
    """Return a running job of unchanged scripts, by default with three workers."""
    return FakeCluster(*pools, spec={"runtime": "Torchrun", **spec}).with_nodes("a", "b", "c").start()


def reported(cluster: FakeCluster) -> Telemetry:
    """Return what the launchers report: the version of their plan, and nothing about steps."""
    generation, revision = cluster.version()
    return Telemetry(
        gauges={
            MemberId(rank["worker_uid"], rank["local_rank"]): MemberGauges(
                worker=rank["worker"], generation=generation, revision=revision
            )
            for rank in cluster.plan_json["ranks"]
        }
    )


def test_every_process_gets_an_equal_share() -> None:
    """A pod with two processes has two of the four ranks."""
    cluster = a_torchrun_job(pool("a", numProcPerWorker=2), pool("b"), pool("c"))
    assert [member["share_samples"] for member in cluster.plan_json["members"]] == [1, 1, 1, 1]
    assert [rank["worker"] for rank in cluster.plan_json["ranks"]] == ["job-w0", "job-w0", "job-w1", "job-w2"]


def test_a_launcher_is_told_its_runtime_and_a_script_with_this_library_is_not() -> None:
    for cluster, told in ((a_torchrun_job(), "Torchrun"), (FakeCluster().with_nodes("a").start(), None)):
        (container,) = cluster.pods["job-w0"]["spec"]["containers"]
        values = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert values.get(env.RUNTIME) == told


def test_its_status_has_the_plan_and_no_samples_or_speeds() -> None:
    """The plan's shares are not samples, and nothing is known about steps."""
    cluster = a_torchrun_job()
    cluster.telemetry = reported(cluster)
    cluster.settle()
    assert cluster.status["state"] == "Running"
    assert cluster.status["plan"]["applied"] == cluster.status["plan"]["desired"]
    assert "globalBatchSize" not in cluster.status["plan"]
    assert not [worker for worker in cluster.status["workers"] if "shareSamples" in worker]
    assert cluster.condition("PlanApplied") == ("True", "Applied")
    assert cluster.condition("TelemetryAvailable")[0] == "True"
    kinds = {condition["type"] for condition in cluster.status["conditions"]}
    assert not kinds & {"SpeedsLearned", "StragglerDetected", "NumericallySound"}


def test_a_lost_worker_costs_a_generation_and_no_failure() -> None:
    cluster = a_torchrun_job()
    cluster.pods["job-w1"]["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"
    cluster.end("job-w1", Ending.LEFT, told=True).vanish("job-w1")
    cluster.nodes.pop("b")
    cluster.settle()
    assert cluster.version()[0] == 2
    assert cluster.members() == ["job-w0", "job-w2"]
    assert cluster.status["restarts"] == 0


def test_a_worker_may_go_on_for_long_after_the_others_have_finished() -> None:
    """Rank 0 often evaluates and saves alone at the end."""
    cluster = a_torchrun_job()
    for name in ("job-w1", "job-w2"):
        cluster.end(name, Ending.FINISHED, reason="the script for torchrun ended", cause=Cause.TORCHRUN_SCRIPT)
    cluster.settle()
    cluster.pass_time(3600).settle()
    assert cluster.condition("Succeeded")[0] == "False"
    assert "deletionTimestamp" not in cluster.pods["job-w0"]["metadata"]
    cluster.end("job-w0", Ending.FINISHED, reason="the script for torchrun ended", cause=Cause.TORCHRUN_SCRIPT)
    cluster.settle()
    assert cluster.condition("Succeeded")[0] == "True"
    assert cluster.message("Succeeded") == "the script for torchrun ended"


@pytest.mark.parametrize(("ending", "condition"), [(Ending.FINISHED, "Succeeded"), (Ending.FAILED, "Failed")])
def test_the_launchers_outcomes_end_the_job(ending: Ending, condition: str) -> None:
    cluster = a_torchrun_job(backoffLimit=0)
    for name in list(cluster.pods):
        cluster.end(name, ending, exit_code=int(ending is Ending.FAILED), reason="process 0 ended with exit code 1")
    cluster.settle()
    assert cluster.condition(condition)[0] == "True"


def test_two_jobs_share_contested_nodes_although_one_reports_no_speeds() -> None:
    """A job of unchanged scripts gets its workers like any other job whose speeds are not known yet."""
    cluster = MultiJobCluster().with_nodes("a", "a2", "a3", "a4")
    cluster.add("one", pool("a", maxReplicas=4, resources={"limits": {"cpu": "4"}}), runtime="Torchrun")
    cluster.add("two", pool("a", maxReplicas=4, resources={"limits": {"cpu": "4"}}))
    cluster.settle()
    assert {name: sum(placed.values()) for name, placed in cluster.placed().items()} == {"one": 2, "two": 2}
