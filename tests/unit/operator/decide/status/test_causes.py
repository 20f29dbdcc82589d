"""Why a job does not train: each cause is in its status within half a minute, with the next step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from heterotrain_core.contract.outcome import Cause, Ending
from heterotrain_operator.decide.lifecycle import Acceptance
from heterotrain_operator.engine.start_problems import EVERY_S, PATIENCE_S
from support.fake_cluster import FakeCluster, a_running_job

WITHIN_S = 30.0
Happens = Callable[[FakeCluster], Any]


def waiting(**status: Any) -> Happens:
    """Return a change that leaves the pods without a node, with these words of the scheduler."""

    def change(cluster: FakeCluster) -> None:
        for body in cluster.pods.values():
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", **status}
            body["status"] = {"phase": "Pending", "conditions": [condition]}

    return change


def starting(reason: str, message: str = "words of the kubelet") -> Happens:
    """Return a change that leaves a container on its node without starting."""

    def change(cluster: FakeCluster) -> None:
        cluster.schedule()
        for body in cluster.pods.values():
            state = {"waiting": {"reason": reason, "message": message}}
            body["status"] = {"phase": "Pending", "containerStatuses": [{"name": "main", "state": state}]}

    return change


def gated(cluster: FakeCluster) -> None:
    waiting(reason="SchedulingGated")(cluster)
    for body in cluster.pods.values():
        body["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]


def forbidden(cluster: FakeCluster) -> None:
    cluster.acceptance = Acceptance(known=True, ok=False, reason="PodsForbidden", message="privileged: change it")


def over_quota(cluster: FakeCluster) -> None:
    cluster.pods.clear()
    cluster.refusal = "exceeded quota: training"


@pytest.mark.parametrize(
    ("happens", "words"),
    [
        (starting("ErrImagePull"), "words of the kubelet: correct spec.template's image, or give it imagePullSecrets"),
        (starting("ImagePullBackOff"), "correct spec.template's image, or give it imagePullSecrets"),
        (starting("CreateContainerConfigError"), "create the Secret or ConfigMap that it names"),
        (starting("CrashLoopBackOff"), "read `kubectl logs` of the container that fails"),
        (waiting(message='persistentvolumeclaim "data" not found'), "create the claim that spec.template names"),
        (waiting(message="3 node(s) had volume node affinity conflict"), "use a volume of the pool's zone"),
        (waiting(message="1 Insufficient nvidia.com/gpu"), "add nodes, or lower the pool's limits"),
        (gated, "see `kubectl describe workload`"),
        (forbidden, "privileged: change it"),
        (over_quota, "exceeded quota: training"),
    ],
)
def test_a_job_that_does_not_start_says_why(happens: Happens, words: str) -> None:
    cluster = FakeCluster().with_nodes("a", "b", "c")
    cluster.settle()
    happens(cluster)
    assert_told(cluster, words)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ({"reason": "KeyError: 'labels'"}, "KeyError: 'labels'"),
        ({"reason": "OutOfMemoryError", "cause": Cause.OUT_OF_DEVICE_MEMORY}, "use larger devices, a smaller model"),
        ({"reason": "the loss of step 4 is not finite; the last finite loss was 0.5 in step 3: lower the rate",
          "cause": Cause.NOT_FINITE}, "the last finite loss was 0.5 in step 3: lower the rate"),
    ],
)  # fmt: skip
def test_a_job_that_fails_says_why(end: dict[str, Any], words: str) -> None:
    cluster = a_running_job(backoffLimit=0)
    for name in cluster.members():
        cluster.end(name, Ending.FAILED, exit_code=1, **end)
    assert_told(cluster, words)
    assert words in cluster.status["lastFailure"]
    assert cluster.status["state"] == "Failed"


def test_events_of_the_kubelet_are_read_in_time() -> None:
    """They name what pod and container do not, such as a missing volume."""
    assert PATIENCE_S + EVERY_S <= WITHIN_S


def assert_told(cluster: FakeCluster, words: str) -> None:
    """Make passes until the job's summary has these words; fail after half a minute."""
    end_s = cluster.now_s + WITHIN_S
    while cluster.now_s <= end_s:
        cluster.step()
        told = [str(c["message"]) for c in cluster.status["conditions"] if c["status"] != "Unknown"]
        if any(words in message for message in told) and words in cluster.status["reason"]:
            return
        cluster.pass_time(1)
    raise AssertionError(f"{words!r} is not among {told}, and the reason is {cluster.status['reason']!r}")
