"""Evictions, crashes and outages: no sample is lost, and only the job's own failures are counted.

One job goes through all tests; after the last one `conftest.py` checks every sample.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from heterotrain_core.contract import keys
from heterotrain_core.contract.outcome import Ending, Outcome, decode_outcome
from lab import network_policies, spot_node
from lab.cluster import Cluster, ClusterError, wait_for
from lab.install import OPERATOR_NAMESPACE, rollout
from local_cluster import control
from local_cluster.process import Problem
from support.on_cluster import OF_POOL, OTHER_IMAGE

if TYPE_CHECKING:
    from conftest import Running, Shared


def running_pod(running: Running, pool: str) -> str:
    """Return the name of the pool's running pod."""
    pod = wait_for(lambda: running.job.pod_on(pool), f"a running pod of pool {pool}", timeout_s=120)
    return str(pod["metadata"]["name"])


def wait_for_replacement(running: Running, generation: int) -> None:
    """Wait until a replacement for the lost worker is in the plan and training continues."""
    wait_for(
        lambda: (plan := running.job.plan()) and len(plan.members) == 3 and plan.generation > generation,
        "a replacement to join",
        timeout_s=240,
    )
    running.wait_steps(running.steps() + 3)


def charged(running: Running) -> tuple[int, int]:
    """Return the numbers of failures and disruptions that the job's status counts."""
    status = running.job.status()
    return status["restarts"], status["disruptions"]


def test_a_pool_has_an_image_of_its_own(running: Running) -> None:
    """Its workers run another image by another command with another variable, and train with those of the template.

    The other tests of this job go on with it: workers of both images leave, come back and are counted alike.
    """
    members = {each.worker for each in running.job.wait_members(3, timeout_s=30).ranks}
    images = {}
    for name, pool in running.job.pools().items():
        assert name in members
        # The status may hold either name of an image; that of the specification is what its node had to find.
        images[pool] = (running.job.pod(name) or {})["spec"]["containers"][0]["image"]
        # The first process has both: the variable from its pod, and what the command sets.
        environment = running.job.cluster.kubectl("exec", name, "--", "cat", "/proc/1/environ").split("\0")
        found = {key: value for key, _, value in (each.partition("=") for each in environment) if key in OF_POOL}
        assert found == (OF_POOL if pool == "t4" else {})
    assert images["t4"] == OTHER_IMAGE != images["a100"] == images["v100"]


def test_an_evicted_worker_shuts_down_gracefully_and_is_replaced(running: Running) -> None:
    """Eviction: the worker finishes its step and leaves, a checkpoint is written, and a replacement joins."""
    restarts, disruptions = charged(running)
    generation = running.job.wait_members(3, timeout_s=30).generation
    checkpoints = set(running.folder.rglob("checkpoint-*.json"))
    pod = running_pod(running, "t4")
    spot_node.evict(running.job, pod)
    endings = endings_of(running, pod)
    wait_for(lambda: set(running.folder.rglob("checkpoint-*.json")) - checkpoints, "a checkpoint", timeout_s=60)
    wait_for_replacement(running, generation)
    assert [each and each.ending for each in endings] == [Ending.LEFT] * len(endings), endings
    wait_for(lambda: charged(running)[1] > disruptions, "a disruption to be counted", timeout_s=60)
    assert charged(running)[0] == restarts, "an eviction is not the job's fault"


def endings_of(running: Running, pod: str) -> list[Outcome | None]:
    """Wait until a pod has ended, and return how; nothing if it was gone before anybody could look."""
    endings: list[Outcome | None] = []

    def ended() -> bool:
        found = running.job.pod(pod)
        for each in (found or {}).get("status", {}).get("containerStatuses", []):
            message = each.get("state", {}).get("terminated", {}).get("message")
            if message:
                endings.append(decode_outcome(message))
        return found is None or bool(endings)

    wait_for(ended, f"pod {pod} to end", timeout_s=60, every_s=0.1)
    return endings


def test_a_node_that_ends_soon_after_its_warning(running: Running) -> None:
    """The worker has handed over and left before the power goes: no step is repeated, and nobody waits."""
    cluster, before, repeated = running.job.cluster, charged(running), repeated_steps(running)
    generation = running.job.wait_members(3, timeout_s=30).generation
    node, pod = spot_node.node_of_pool(cluster, "v100"), running_pod(running, "v100")
    cluster.kubectl("taint", "node", node, spot_node.SPOT_NOTICE, "--overwrite")
    try:
        endings = endings_of(running, pod)
        control.power_off(node)
        running.job.wait_members(2, timeout_s=30)
        running.wait_steps(running.steps() + 3)
    finally:
        spot_node.give_back(cluster, node)
    assert [each and each.ending for each in endings] == [Ending.LEFT] * len(endings), endings
    assert repeated_steps(running) == repeated
    wait_for_replacement(running, generation)
    wait_for(lambda: charged(running) == (before[0], before[1] + 1), "one disruption to be counted", timeout_s=60)


def repeated_steps(running: Running) -> float:
    """Return the number of steps that the worker of a pool that stays has repeated."""
    pod = running_pod(running, "a100")
    path = f"/api/v1/namespaces/{running.job.cluster.namespace}/pods/{pod}:{keys.METRICS_PORT}/proxy/metrics"
    metrics = running.job.cluster.kubectl("get", "--raw", path)
    (value,) = re.findall(r"^heterotrain_repeated_steps_total{[^}]*} (\S+)$", metrics, re.MULTILINE)
    return float(value)


def test_a_killed_worker_costs_one_step_and_counts_as_a_failure(running: Running, shared: Shared) -> None:
    """SIGKILL: the survivors repeat the current step, the worker comes back, and one failure is counted.

    All of this behind enforced NetworkPolicies, which keep a pod of the same namespace away from the workers.
    """
    restarts, disruptions = charged(running)
    shared.failures += 1
    cluster, generation = running.job.cluster, running.job.wait_members(3, timeout_s=30).generation
    with stranger(running) as reaches:
        # Without enforcement nothing is closed, or the test would prove nothing.
        wait_for(lambda: reaches("t4", keys.PEER_PORT), "a connection without enforcement", timeout_s=60)
        with network_policies.enforced(cluster):
            spot_node.kill(running.job, running_pod(running, "v100"))
            wait_for_replacement(running, generation)
            for pool in ("t4", "v100"):
                assert not reaches(pool, keys.PEER_PORT)
                wait_for(lambda pool=pool: reaches(pool, keys.METRICS_PORT), "the open port", timeout_s=60)  # type: ignore[misc]  # mypy cannot infer a lambda with a default
    wait_for(lambda: charged(running) == (restarts + 1, disruptions), "one failure to be charged", timeout_s=60)


@contextmanager
def stranger(running: Running) -> Iterator[Callable[[str, int], bool]]:
    """Yield a function that tells whether another pod of the namespace can connect to a pool's worker at a port."""
    name, cluster = "stranger", running.job.cluster
    trainer = running.job.pod_on("a100")["spec"]["containers"][0]
    keep = {"name": name, "image": trainer["image"], "imagePullPolicy": "Never", "command": ["sleep", "600"]}
    spec = {"containers": [keep], "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": False}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
    cluster.kubectl("wait", f"pod/{name}", "--for=condition=Ready", "--timeout=600s", timeout_s=620)

    def reaches(pool: str, port: int) -> bool:
        address = running.job.pod_on(pool)["status"]["podIP"]
        code = f"import socket; socket.create_connection(({address!r}, {port}), timeout=3).close()"
        try:
            cluster.kubectl("exec", name, "--", "python3", "-c", code)
        except ClusterError as error:
            assert "timed out" in str(error), "refused is not dropped: does the worker listen there?"  # noqa: PT017  # the error is inspected, not expected
            return False
        return True

    yield reaches
    cluster.delete("pod", name)


def test_a_node_that_loses_power_and_returns(running: Running) -> None:
    """Power cut, network link first: no last message gets out, the others continue, and the worker returns later.

    Its pod ends nowhere, as no kubelet is left to end it: it is removed once a person has declared the node off.
    """
    restarts, _ = charged(running)
    node, pod = spot_node.node_of_pool(running.job.cluster, "t4"), running_pod(running, "t4")
    try:
        control.power_off(node)
        before = running.steps()
        running.wait_steps(before + 3, timeout_s=60)
        generation = running.job.wait_members(2, timeout_s=180).generation  # the control plane needs 12 s
        running.job.cluster.kubectl("taint", "node", node, spot_node.OUT_OF_SERVICE)
        removed = "its pod to be removed although its node has no power"
        wait_for(lambda: running.job.pod(pod) is None, removed, timeout_s=180)
    finally:
        spot_node.give_back(running.job.cluster, node)
    wait_for_replacement(running, generation)
    assert charged(running)[0] == restarts


def test_a_network_cut_and_its_repair(running: Running) -> None:
    """Both sides of the cut keep running: the others train on; the isolated rank is fenced and its worker restarts."""
    restarts, _ = charged(running)
    generation = running.job.wait_members(3, timeout_s=30).generation
    node = spot_node.node_of_pool(running.job.cluster, "t4")
    control.unplug(node)
    try:
        before = running.steps()
        running.wait_steps(before + 3, timeout_s=60)
    finally:
        control.plug(node)
    # The control plane may not have noticed the cut: the rank itself finds out that it was excluded, and leaves.
    wait_for_replacement(running, generation)
    assert charged(running)[0] == restarts


def test_the_operator_and_a_kubelet_killed_in_the_middle(running: Running) -> None:
    """Training continues; the next operator and the next kubelet get all their state from cluster and node."""
    before = charged(running)
    cluster = running.job.cluster
    generation = running.job.wait_members(3, timeout_s=30).generation
    node = spot_node.node_of_pool(cluster, "v100")
    killed, renewed = kubelet_of(node), lease_of(cluster, node)
    control.inside(node, "kill", "-KILL", killed)
    selector = ("-l", "app.kubernetes.io/name=heterotrain-operator")
    cluster.run("kubectl", "-n", OPERATOR_NAMESPACE, "delete", "pod", *selector, "--grace-period=0", "--force")
    running.wait_steps(running.steps() + 3)
    rollout(cluster, OPERATOR_NAMESPACE, "heterotrain-operator")
    wait_for(lambda: kubelet_of(node) not in ("", killed), "another kubelet", timeout_s=120)
    wait_for(lambda: lease_of(cluster, node) != renewed, "the kubelet's next sign of life", timeout_s=120)
    running.wait_steps(running.steps() + 3)
    assert running.job.wait_members(3, timeout_s=30).generation == generation, "no new generation was started"
    assert charged(running) == before


def kubelet_of(node: str) -> str:
    """Return the number of a node's kubelet process; empty if it has none."""
    try:
        return control.inside(node, "pgrep", "-x", "kubelet").strip()
    except Problem:
        return ""


def lease_of(cluster: Cluster, node: str) -> str:
    """Return the time of a kubelet's last sign of life."""
    path = "jsonpath={.spec.renewTime}"
    return cluster.run("kubectl", "-n", "kube-node-lease", "get", "lease", node, "-o", path)


@pytest.mark.thorough
def test_prometheus_away_and_back(running: Running) -> None:
    """Without telemetry the last good plan stays, a condition reports it, and training continues."""
    cluster = running.job.cluster
    scale = ["kubectl", "-n", "monitoring", "scale", "deployment/prometheus"]
    try:
        cluster.run(*scale, "--replicas=0")
        wait_for(
            lambda: running.job.condition("TelemetryAvailable").get("status") == "False",
            "the condition to report missing telemetry",
            timeout_s=120,
        )
        running.wait_steps(running.steps() + 3)
    finally:
        cluster.run(*scale, "--replicas=1")
        rollout(cluster, "monitoring", "prometheus")
    wait_for(lambda: running.job.is_true("TelemetryAvailable"), "telemetry to be back", timeout_s=120)
