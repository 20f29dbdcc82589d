"""Who caused a worker's end: by condition, node and outcome, never by the exit code alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from heterotrain_core.contract.outcome import Cause, Ending, Outcome, encode_outcome
from heterotrain_operator.cluster_state.announcements import TAINTS
from heterotrain_operator.cluster_state.parse import parse_node
from heterotrain_operator.cluster_state.views import Ended, JobKey, NodeView, PodView
from heterotrain_operator.decide.workers.node_state import NodeState, assess_node
from heterotrain_operator.decide.workers.state import WorkerState, assess_worker, worker_states
from support.fake_cluster import node_body

POD = PodView(
    key=JobKey("ns", "job"),
    name="job-w0",
    uid="u",
    resource_version="1",
    pool="a",
    index=0,
    on_demand=True,
    ranks=1,
    phase="Running",
    node="n",
    address="10.0.0.1",
)


def a_node(**fields: object) -> NodeView:
    return parse_node(node_body("n", "a", **fields))  # type: ignore[arg-type]  # passed through


def assessed(pod: PodView, node: NodeView | None = None) -> tuple[WorkerState, str]:
    found = assess_worker(pod, {"n": node or a_node()})
    return found.state, found.reason


def ended(
    exit_code: int = 0,
    *,
    ending: Ending | None = None,
    reason: str = "",
    message: str = "",
    told: bool = False,
    cause: Cause | None = None,
) -> PodView:
    if ending:
        message = encode_outcome(Outcome(ending=ending, reason=message, epoch=0, step=0, told=told, cause=cause))
    phase = "Failed" if exit_code else "Succeeded"
    return replace(POD, phase=phase, ended=Ended(exit_code=exit_code, reason=reason, message=message, finished_s=0.0))


@pytest.mark.parametrize("key", TAINTS)
def test_the_announcements_of_all_clouds_are_understood(key: str) -> None:
    assert assess_node(a_node(taints=[f"{key}:NoSchedule"]), "n").state is NodeState.LEAVING


@pytest.mark.parametrize(
    ("condition", "state"),
    [
        ({"type": "VMEventScheduled", "status": "True", "reason": "PreemptScheduled"}, NodeState.LEAVING),
        ({"type": "VMEventScheduled", "status": "True", "reason": "FreezeScheduled"}, NodeState.STAYS),
        ({"type": "VMEventScheduled", "status": "False"}, NodeState.STAYS),
        ({"type": "Maintenance", "status": "True"}, NodeState.LEAVING),
        ({"type": "DiskPressure", "status": "True"}, NodeState.STAYS),
    ],
)
def test_conditions_that_announce_a_node_s_end(condition: dict[str, str], state: NodeState) -> None:
    body = node_body("n", "a")
    body["status"]["conditions"].append(condition)
    assert assess_node(parse_node(body, ["Maintenance"]), "n").state is state


def test_the_cluster_s_own_taint_and_the_deletion_of_the_node_are_announcements() -> None:
    retiring = node_body("n", "a", taints=["example.com/retiring:NoSchedule"])
    assert assess_node(parse_node(retiring), "n").state is NodeState.STAYS
    found = assess_node(parse_node(retiring, ["example.com/retiring"]), "n")
    assert (found.state, found.reason) == (
        NodeState.LEAVING,
        "it has example.com/retiring, which announces its end (n)",
    )
    deleted = node_body("n", "a")
    deleted["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert assess_node(parse_node(deleted), "n").state is NodeState.LEAVING


@pytest.mark.parametrize(
    ("taint", "state"),
    [
        ("node.kubernetes.io/unreachable:NoExecute", NodeState.LOST),
        ("node.kubernetes.io/out-of-service:NoExecute", NodeState.LOST),
        ("node.kubernetes.io/unschedulable:NoSchedule", NodeState.STAYS),
        ("aws-node-termination-handler/rebalance-recommendation:NoSchedule", NodeState.STAYS),
        ("DeletionCandidateOfClusterAutoscaler:PreferNoSchedule", NodeState.STAYS),
        ("node.cluster.x-k8s.io/outdated-revision:PreferNoSchedule", NodeState.STAYS),
        ("nvidia.com/gpu:NoSchedule", NodeState.STAYS),
    ],
)
def test_other_taints(taint: str, state: NodeState) -> None:
    assert assess_node(a_node(taints=[taint]), "n").state is state


def test_a_node_that_is_not_in_the_cluster_is_lost() -> None:
    assert assess_node(None, "n").state is NodeState.LOST
    assert assess_worker(POD, {}).state is WorkerState.LOST


RUNNING: dict[str, tuple[PodView, NodeView, WorkerState]] = {
    "ready": (replace(POD, ready=True), a_node(), WorkerState.READY),
    "starting": (POD, a_node(), WorkerState.STARTING),
    "without a node": (replace(POD, node="", phase="Pending"), a_node(), WorkerState.WAITING),
    "being deleted": (replace(POD, deleting=True, ready=True), a_node(), WorkerState.LEAVING),
    "being evicted": (replace(POD, disruption="EvictionByEvictionAPI", ready=True), a_node(), WorkerState.LEAVING),
    "on an unreachable node": (replace(POD, ready=True), a_node(ready="Unknown"), WorkerState.LOST),
    "deleted on an unreachable node": (replace(POD, deleting=True), a_node(ready="Unknown"), WorkerState.LOST),
    "on a node that is not ready": (replace(POD, ready=True), a_node(ready="False"), WorkerState.LEAVING),
}


@pytest.mark.parametrize("case", RUNNING)
def test_a_worker_that_runs(case: str) -> None:
    pod, node, state = RUNNING[case]
    assert assessed(pod, node)[0] is state


def probed(pod: PodView) -> PodView:
    return replace(pod, fatal_probes=("livenessProbe",))


ENDS: dict[str, tuple[PodView, NodeView, WorkerState, str]] = {
    "finished": (ended(ending=Ending.FINISHED, message="done"), a_node(), WorkerState.FINISHED, "done"),
    "finished while being evicted": (
        replace(ended(ending=Ending.FINISHED), disruption="EvictionByEvictionAPI"),
        a_node(),
        WorkerState.FINISHED,
        "",
    ),
    "left": (ended(ending=Ending.LEFT, message="asked to end"), a_node(), WorkerState.LEFT, "asked to end"),
    "asked to end by its kubelet": (
        probed(ended(ending=Ending.LEFT, told=True)),
        a_node(),
        WorkerState.FAILED,
        "because its livenessProbe failed",
    ),
    "killed by its kubelet": (
        probed(ended(137, reason="Error")),
        a_node(),
        WorkerState.FAILED,
        "because its livenessProbe failed",
    ),
    "asked to end, without probes": (ended(ending=Ending.LEFT, told=True), a_node(), WorkerState.LEFT, ""),
    "left by the plan": (probed(ended(ending=Ending.LEFT)), a_node(), WorkerState.LEFT, ""),
    "asked to end by its deletion": (
        replace(probed(ended(ending=Ending.LEFT, told=True)), deleting=True),
        a_node(),
        WorkerState.LEFT,
        "",
    ),
    "asked to end by an eviction": (
        replace(probed(ended(ending=Ending.LEFT, told=True)), disruption="EvictionByEvictionAPI"),
        a_node(),
        WorkerState.LEFT,
        "",
    ),
    "asked to end on an announced node": (
        probed(ended(ending=Ending.LEFT, told=True)),
        a_node(taints=["karpenter.sh/disrupted:NoSchedule"]),
        WorkerState.LEFT,
        "",
    ),
    "killed with its unreachable node": (
        probed(ended(137)),
        a_node(ready="Unknown"),
        WorkerState.DISRUPTED,
        "lost contact",
    ),
    "gone after a reboot": (probed(ended(255, reason="Unknown")), a_node(), WorkerState.DISRUPTED, "lost track"),
    "unknown after a reboot": (
        probed(ended(137, reason="ContainerStatusUnknown")),
        a_node(),
        WorkerState.DISRUPTED,
        "lost track",
    ),
    "failed": (ended(1, ending=Ending.FAILED, message="ValueError: x"), a_node(), WorkerState.FAILED, "ValueError: x"),
    "failed because it was evicted": (
        replace(ended(1, ending=Ending.FAILED), disruption="PreemptionByScheduler"),
        a_node(),
        WorkerState.DISRUPTED,
        "Preemption",
    ),
    "failed because its node went": (
        ended(1, ending=Ending.FAILED),
        a_node(ready="Unknown"),
        WorkerState.DISRUPTED,
        "lost contact",
    ),
    "failed on an announced node": (
        ended(1),
        a_node(taints=["karpenter.sh/disrupted:NoSchedule"]),
        WorkerState.DISRUPTED,
        "Karpenter",
    ),
    "shut down with its node": (
        replace(ended(137), disruption="NodeShutdown"),
        a_node(),
        WorkerState.DISRUPTED,
        "NodeShutdown",
    ),
    "deleted by a user": (replace(ended(143), deleting=True), a_node(), WorkerState.DISRUPTED, "deleted"),
    "out of memory": (ended(137, reason="OOMKilled"), a_node(), WorkerState.FAILED, "raise resources.limits.memory"),
    "killed from outside": (ended(137, reason="Error"), a_node(), WorkerState.DISRUPTED, "killed from outside"),
    "refused by the kubelet": (replace(POD, phase="Failed"), a_node(), WorkerState.DISRUPTED, "node n refused the pod"),
    "exit code zero without an outcome": (ended(0), a_node(), WorkerState.FINISHED, "did not call heterotrain.init()"),
    "an ordinary crash": (
        ended(1, message="Traceback\nKeyError: 'x'"),
        a_node(),
        WorkerState.FAILED,
        "exit code 1: KeyError: 'x'",
    ),
    "a segmentation fault": (ended(139, reason="Error"), a_node(), WorkerState.FAILED, "exit code 139"),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_worker_that_ended(case: str) -> None:
    pod, node, state, words = ENDS[case]
    found, reason = assessed(pod, node)
    assert found is state
    assert words in reason


@pytest.mark.parametrize("pod", [ended(0), ended(0, ending=Ending.FINISHED, cause=Cause.PLAIN_SCRIPT)])
def test_exit_code_zero_is_a_failure_where_others_train(pod: PodView) -> None:
    """A rank that leaves a training in progress by itself has not succeeded."""
    nodes = {"n": a_node()}
    alone, beside = worker_states([pod], nodes), worker_states([pod], nodes, trained=True)
    assert (alone[0].state, alone[0].cause) == (WorkerState.FINISHED, Cause.PLAIN_SCRIPT)
    assert beside[0].state is WorkerState.FAILED
    assert "job.finish" in beside[0].reason
    ready = replace(POD, ready=True)
    assert worker_states([pod, ready], nodes)[0].state is WorkerState.FAILED


@pytest.mark.parametrize(
    ("fields", "cannot"),
    [
        ({"waiting_reason": "ImagePullBackOff"}, True),
        ({"start_problem": 'FailedMount: secret "creds" not found'}, True),
        ({"start_problem": "FailedAttachVolume: Multi-Attach error for volume"}, False),
        ({"creating": True}, False),
        ({"ready": True, "waiting_reason": "ImagePullBackOff"}, False),
    ],
)
def test_a_worker_that_is_only_slow_can_start(fields: dict[str, object], cannot: bool) -> None:
    pod = replace(POD, phase="Pending", **fields)  # type: ignore[arg-type]  # as above
    assert assess_worker(pod, {"n": a_node()}).cannot_start is cannot
