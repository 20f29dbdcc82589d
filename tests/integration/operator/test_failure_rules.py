"""``spec.failurePolicy.rules`` on a real API server: each action, each kind of pattern, and refused rules."""

from __future__ import annotations

from typing import Any

import pytest
from heterotrain_operator.kube.verbs import Body
from support.api_cluster import Cluster, Operator
from support.waiting import until

EXIT_42 = {"onExitCodes": {"values": [42]}}


def a_job(cluster: Cluster, *rules: Body, **spec: Any) -> Body:
    """Return a job of two workers on two nodes of one pool, with rules."""
    two = {"elasticPolicy": {"minReplicas": 2}, "backoffLimit": 5}
    return cluster.job(cluster.pool("a", maxReplicas=2), failurePolicy={"rules": list(rules)}, **{**two, **spec})


async def started(cluster: Cluster, *rules: Body, **spec: Any) -> tuple[list[str], dict[str, str]]:
    """Start a job on two nodes with room for one worker each and one node more; return workers and their nodes."""
    for suffix in ("-1", "-2", "-3"):
        await cluster.add_node("a", cpu="1", suffix=suffix)
    await cluster.create(a_job(cluster, *rules, **spec))
    names = await cluster.started(2)
    pods = await cluster.pods()
    return names, {name: pods[name]["spec"]["nodeName"] for name in names}


async def replacement(cluster: Cluster, names: list[str]) -> tuple[str, str]:
    """Wait for a worker with a node that is not among ``names``; return its name and node."""

    async def probe() -> tuple[str, str] | None:
        pods = await cluster.pods()
        new = [(name, pod["spec"].get("nodeName", "")) for name, pod in pods.items() if name not in names]
        return next((each for each in new if each[1]), None)

    found: tuple[str, str] = await until(probe, "a replacement with a node")
    return found


async def counted(cluster: Cluster, *, restarts: int, disruptions: int) -> Body:
    """Wait until the status counts an end in one of the two ways; return the status."""

    async def probe() -> Body | None:
        status = await cluster.status()
        return status if status.get("restarts", 0) + status.get("disruptions", 0) else None

    status: Body = await until(probe, "the end is counted")
    assert (status.get("restarts", 0), status.get("disruptions", 0)) == (restarts, disruptions)
    return status


async def failed(cluster: Cluster) -> str:
    """Wait until the job has failed; return the message of its condition."""

    async def probe() -> bool:
        return (await cluster.condition("Failed"))[0] == "True"

    await until(probe, "the job has failed")
    _, reason, message = await cluster.condition("Failed")
    assert reason == "FailurePolicy"
    return message


async def test_avoid_node_places_the_replacement_elsewhere_and_names_the_node(
    cluster: Cluster, operator: Operator
) -> None:
    names, nodes = await started(cluster, {"action": "AvoidNode", **EXIT_42})
    bad = nodes[names[0]]
    await cluster.crash(names[0], exit_code=42)
    await counted(cluster, restarts=0, disruptions=1)
    new, node = await replacement(cluster, names)
    assert node not in nodes.values(), "the third node is the only one left"
    affinity = (await cluster.pods())[new]["spec"]["affinity"]["nodeAffinity"]
    assert bad in str(affinity["requiredDuringSchedulingIgnoredDuringExecution"])
    (named,) = (await cluster.status())["nodesWithFailures"]
    assert named["name"] == bad
    assert "failurePolicy.rules[0] avoids the node" in named["reason"]


@pytest.mark.parametrize(
    ("pattern", "end"),
    [
        ({"onReasons": ["OOMKilled"]}, {"exit_code": 137, "reason": "OOMKilled"}),
        ({"onPodConditions": [{"type": "DisruptionTarget"}]}, {"exit_code": 1, "condition": "DisruptionTarget"}),
        ({"onExitCodes": {"operator": "NotIn", "values": [1]}}, {"exit_code": 2}),
    ],
    ids=["reason", "condition of the pod", "other exit codes"],
)
async def test_each_pattern_matches_what_a_kubelet_reports(
    cluster: Cluster, operator: Operator, pattern: Body, end: dict[str, Any]
) -> None:
    names, _ = await started(cluster, {"action": "Fail", **pattern})
    await cluster.crash(names[0], **end)
    assert "failurePolicy.rules[0] fails the job" in await failed(cluster)
