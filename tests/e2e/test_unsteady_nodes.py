"""A node whose readiness comes and goes. It is held down for minutes afterwards, so these tests come last by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from heterotrain_core.contract import keys
from lab import spot_node
from lab.cluster import wait_for
from local_cluster import control

if TYPE_CHECKING:
    from conftest import Running, Start
    from heterotrain_core.contract.plan import Plan

MOST_FLAPS = 3
"""Losses within ten minutes after which the operator does not use a node for a while."""


@pytest.mark.thorough
def test_a_flapping_node_is_left_alone(start: Start) -> None:
    """Its kubelet reports it as not ready again and again. The job goes on without it, and without further changes."""
    running = start(epochs=None)
    job, cluster = running.job, running.job.cluster
    job.wait_members(3, timeout_s=180)
    running.wait_steps(3)
    node = spot_node.node_of_pool(cluster, "t4")
    for flaps in range(1, MOST_FLAPS + 1):
        flap(running, node)
        if flaps < MOST_FLAPS:  # the node is used again after each flap, unless an earlier test has cost it a loss
            wait_for(lambda: named(running, node) or len(planned(running).members) == 3, "what follows", timeout_s=180)
        if named(running, node):
            break

    reason = wait_for(
        lambda: named(running, node), "the status to name the node and the end of the hold", timeout_s=120
    )
    generation = job.wait_members(2, timeout_s=180).generation
    spot_node.wait_ready(cluster, node)
    # A replacement from before the decision may still have got the node. It is removed before it takes part.
    wait_for(lambda: not on_node(running, node), "workers to have left the node", timeout_s=120)
    running.wait_steps(running.steps() + 10)
    plan = job.wait_members(2, timeout_s=30)
    assert plan.generation == generation, reason
    assert not on_node(running, node)
    (waiting,) = [pod for pod in job.pods() if pod["metadata"]["labels"][keys.LABEL_POOL] == "t4"]
    assert waiting["status"]["phase"] == "Pending"
    assert job.status()["restarts"] == 0
    running.stop()


def on_node(running: Running, node: str) -> list[str]:
    """Return the names of the job's pods on a node."""
    return [str(pod["metadata"]["name"]) for pod in running.job.pods() if pod["spec"].get("nodeName") == node]


def named(running: Running, node: str) -> str | None:
    """Return the status's reason if it says until when the node is not used."""
    reason = str(running.job.status().get("reason", ""))
    return reason if f"node {node} was lost" in reason and "is not used until" in reason else None


def planned(running: Running) -> Plan:
    """Return the job's plan."""
    return wait_for(running.job.plan, "a plan", timeout_s=30)


def flap(running: Running, node: str) -> None:
    """Make a node lose and regain its readiness."""
    control.forget_pod_network(node)
    try:
        wait_for(lambda: not spot_node.is_ready(running.job.cluster, node), f"{node} not to be ready", timeout_s=120)
    finally:
        control.recall_pod_network(node)
    spot_node.wait_ready(running.job.cluster, node)
