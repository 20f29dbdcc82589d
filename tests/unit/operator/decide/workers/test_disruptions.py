"""Disruptions that repeat without a committed step: fewer and fewer pods, a condition, and another node."""

from __future__ import annotations

from dataclasses import replace

import pytest
from heterotrain_core.contract.outcome import Ending
from heterotrain_operator.cluster_state.telemetry import MemberGauges, MemberId
from support.fake_cluster import FakeCluster, a_running_job, pool

REFUSED = ("TopologyAffinityError", "Pod was rejected: Resources cannot be allocated with Topology locality")
BY_KUBELET = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
OWN_LIMITS = [
    "Pod ephemeral local storage usage exceeds the total limit of containers 20Mi. ",
    'Usage of EmptyDir volume "scratch" exceeds the limit "10Mi". ',
    'Container main exceeded its local ephemeral storage limit "20Mi". ',
]


def refuse(cluster: FakeCluster, reason: str, message: str, *, on: str = "") -> int:
    """Let the kubelet refuse the pods that it has just got, on one node or all; return how many."""
    refused = 0
    for body in cluster.pods.values():
        if (
            body["spec"].get("nodeName")
            and body["status"]["phase"] == "Pending"
            and on in ("", body["spec"]["nodeName"])
        ):
            body["status"] |= {"phase": "Failed", "reason": reason, "message": message}
            refused += 1
    return refused


def a_minute_of_refusals(cluster: FakeCluster, *, on: str = "") -> int:
    refused = 0
    for _ in range(12):
        cluster.settle()
        refused += refuse(cluster.schedule(), *REFUSED, on=on)
        cluster.pass_time(5.0)
    return refused


def test_a_kubelet_that_refuses_every_pod_gets_a_handful_in_ten_minutes() -> None:
    cluster = FakeCluster(pool("a", maxReplicas=1), spec={"backoffLimit": 2}).with_nodes("a")
    refused = [a_minute_of_refusals(cluster) for _ in range(10)]
    cluster.settle()
    assert sum(refused) <= 8
    assert refused[0] > 1, "the first ones are replaced soon"
    assert cluster.status["restarts"] == 0, "it is nobody's fault"
    for kind in ("Running", "Stalled", "Scheduled"):
        assert REFUSED[1] in cluster.message(kind), kind
        assert "disruptions in a row" in cluster.message(kind), kind
    assert cluster.condition("Stalled") == ("True", "DisruptedRepeatedly")


def test_after_three_disruptions_on_one_node_another_one_is_used() -> None:
    cluster = FakeCluster(pool("a", maxReplicas=1)).with_nodes("a", "a2")
    for _ in range(3):
        a_minute_of_refusals(cluster, on="a")
    cluster.settle()
    cluster.schedule().run()
    cluster.settle()
    assert [body["spec"]["nodeName"] for body in cluster.pods.values() if body["status"]["phase"] == "Running"] == [
        "a2"
    ]
    assert [(each["name"], each["avoided"]) for each in cluster.status["nodesWithFailures"]] == [("a", True)]


def test_a_committed_step_ends_the_row() -> None:
    cluster = a_running_job()
    for step in range(5):
        name = cluster.members()[0]
        cluster.end(name, exit_code=137, pod_reason="NodeShutdown")
        cluster.settle()
        gauges = MemberGauges(worker="w", step=step)
        cluster.telemetry = replace(cluster.telemetry, gauges={MemberId("uid", 0): gauges})
        cluster.pass_time(30.0)
        cluster.start()
    assert cluster.status["disruptions"] == 5
    assert cluster.status["state"] == "Running"
    assert not cluster.status["internal"].get("disruptions")


@pytest.mark.parametrize("words", OWN_LIMITS)
@pytest.mark.parametrize("ending", [None, Ending.LEFT])
def test_an_eviction_for_the_worker_s_own_limits_is_its_own_failure(words: str, ending: Ending | None) -> None:
    """By SIGTERM: a worker that speaks the protocol says that it was asked to leave."""
    cluster = FakeCluster(pool("a", maxReplicas=1), spec={"backoffLimit": 2}).with_nodes("a").start()
    for count in range(1, 4):
        (name,) = (name for name, body in cluster.pods.items() if body["status"]["phase"] == "Running")
        cluster.end(name, ending, exit_code=0 if ending else 137, told=ending is not None, pod_reason="Evicted")
        cluster.pods[name]["status"] |= {"phase": "Failed", "message": words}
        cluster.settle()
        assert (cluster.status["restarts"], cluster.status["disruptions"]) == (count, 0)
        cluster.pass_time(600.0)
        cluster.start()
    assert cluster.condition("Failed") == ("True", "BackoffLimitExceeded")
    assert words.strip() in cluster.status["lastFailure"]
    assert "raise limits.ephemeral-storage or the emptyDir's sizeLimit" in cluster.status["lastFailure"]


@pytest.mark.parametrize(
    ("message", "conditions"),
    [
        ("The node was low on resource: ephemeral-storage. ", []),
        ("The node had condition: [DiskPressure]. ", []),
        ("Container main was using 30Mi. ", [BY_KUBELET]),
    ],
)
def test_an_eviction_for_the_node_s_sake_is_a_disruption(message: str, conditions: list[dict[str, str]]) -> None:
    cluster = a_running_job()
    name = cluster.members()[0]
    cluster.end(name, exit_code=137, pod_reason="Evicted")
    cluster.pods[name]["status"] |= {"message": message, "conditions": conditions}
    cluster.settle()
    assert (cluster.status["restarts"], cluster.status["disruptions"]) == (0, 1)
