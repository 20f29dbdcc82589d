"""The container that trains admits a worker; any other container that waits or failed is named."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_cluster import FakeCluster, pool

NOT_READY = {"type": "Ready", "status": "False", "reason": "ContainersNotReady"}
MISSING = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "proxy:typo"'}}


def with_container_beside(state: dict[str, Any]) -> FakeCluster:
    """Return a job whose worker has a training container that is ready, and another one in this state."""
    cluster = FakeCluster(pool("a", maxReplicas=1)).with_nodes("a")
    cluster.settle()
    cluster.schedule().run()
    (body,) = cluster.pods.values()
    body["spec"]["containers"].append({"name": "proxy", "image": "proxy"})
    started = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    body["status"] |= {
        "conditions": [NOT_READY],
        "containerStatuses": [{"name": "main", "ready": True, "state": started}, {"name": "proxy", "state": state}],
    }
    cluster.settle()
    cluster.settle()
    return cluster


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (MISSING, 'container proxy: ImagePullBackOff: Back-off pulling image "proxy:typo"'),
        (
            {"terminated": {"exitCode": 2, "reason": "Error", "message": "starting\nbad flag --lrr"}},
            "container proxy ended with exit code 2 (Error): bad flag --lrr",
        ),
        ({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, "exit code 137 (OOMKilled)"),
        ({"terminated": {"exitCode": 0, "reason": "Completed"}}, ""),
        ({"waiting": {"reason": "ContainerCreating"}}, ""),
        ({"running": {}}, ""),
    ],
)
def test_a_container_beside_the_training_one_neither_admits_nor_delays(state: dict[str, Any], words: str) -> None:
    cluster = with_container_beside(state)
    assert cluster.condition("Running") == ("True", "Training")
    assert cluster.status["readyReplicas"] == 1
    assert words in cluster.message("Running")
    assert ("job-w0: container" in cluster.message("Running")) is bool(words)
    assert words in cluster.status["workers"][0].get("message", "")


def test_a_training_container_that_is_not_ready_admits_no_worker_and_names_the_other_one() -> None:
    cluster = with_container_beside(MISSING)
    (body,) = cluster.pods.values()
    body["status"]["containerStatuses"][0]["ready"] = False
    cluster.settle()
    assert cluster.status["readyReplicas"] == 0
    assert "container proxy: ImagePullBackOff" in cluster.status["workers"][0]["message"]


def test_the_last_words_of_an_init_container_are_the_failure_s_cause() -> None:
    cluster = FakeCluster(pool("a", maxReplicas=1), spec={"backoffLimit": 0}).with_nodes("a")
    cluster.settle()
    cluster.schedule()
    (body,) = cluster.pods.values()
    ended = {"exitCode": 3, "reason": "Error", "message": "fetching\nno such bucket: data"}
    body["status"] = {
        "phase": "Failed",
        "initContainerStatuses": [{"name": "fetch-data", "state": {"terminated": ended}}],
        "containerStatuses": [{"name": "main", "state": {"waiting": {"reason": "PodInitializing"}}}],
    }
    cluster.settle()
    assert cluster.condition("Failed")[0] == "True"
    assert "init container fetch-data: exit code 3: no such bucket: data" in cluster.status["lastFailure"]


def test_an_init_container_that_cannot_start_is_named() -> None:
    cluster = FakeCluster(pool("a", maxReplicas=1)).with_nodes("a")
    cluster.settle()
    cluster.schedule()
    (body,) = cluster.pods.values()
    body["status"] = {"phase": "Pending", "initContainerStatuses": [{"name": "fetch-data", "state": MISSING}]}
    cluster.settle()
    assert "ImagePullBackOff: init container fetch-data: Back-off pulling image" in cluster.message("Running")


def test_every_container_shows_the_end_of_its_log_where_it_writes_no_message() -> None:
    inits = [{"name": "fetch", "image": "i"}, {"name": "other", "image": "i", "terminationMessagePolicy": "File"}]
    template = {"spec": {"initContainers": inits, "containers": [{"name": "main", "image": "i", "command": ["train"]}]}}
    cluster = FakeCluster(pool("a", maxReplicas=1), template=template).with_nodes("a")
    cluster.settle()
    (body,) = cluster.pods.values()
    found = {
        each["name"]: each["terminationMessagePolicy"]
        for key in ("initContainers", "containers")
        for each in body["spec"][key]
    }
    assert found == {"fetch": "FallbackToLogsOnError", "other": "File", "main": "FallbackToLogsOnError"}


def test_what_workers_have_shown_outlives_the_job() -> None:
    cluster = FakeCluster(pool("a", maxReplicas=1)).with_nodes("a").start()
    before = cluster.condition("TelemetryAvailable"), cluster.condition("PlanApplied")
    cluster.end(cluster.members()[0], exit_code=1)
    cluster.edit(lambda spec: spec.update(backoffLimit=0))
    cluster.settle()
    assert cluster.condition("Failed")[0] == "True"
    assert (cluster.condition("TelemetryAvailable"), cluster.condition("PlanApplied")) == before
