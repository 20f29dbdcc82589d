"""Why a worker waits or does not start, in the words of scheduler and kubelet, and the next step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from heterotrain_core.contract.outcome import Cause, Ending, Outcome, encode_outcome
from heterotrain_operator.cluster_state.parse import parse_node
from heterotrain_operator.cluster_state.views import Ended, JobKey, PodView
from heterotrain_operator.decide.workers.state import WorkerState, assess_worker
from heterotrain_operator.decide.workers.waiting import why_starting, why_waiting
from support.fake_cluster import FakeCluster, node_body

POD = PodView(
    key=JobKey("ns", "job"), name="job-w0", uid="u", resource_version="1", pool="a", index=0, on_demand=True, ranks=1,
    phase="Pending",
)  # fmt: skip


def test_a_pod_without_a_node_has_the_scheduler_s_words_and_a_bounded_length() -> None:
    words = "0/3 nodes are available: 3 Insufficient cpu."
    found = why_waiting(replace(POD, unschedulable=words))
    assert found.startswith(f"{words}: its nodes have too little free cpu")
    assert why_waiting(replace(POD, unschedulable="words of a newer scheduler")) == "words of a newer scheduler"
    assert why_waiting(POD) == ""
    assert len(why_waiting(replace(POD, unschedulable=words + "x" * 5000))) < 700


@pytest.mark.parametrize(
    ("gates", "words"),
    [(("kueue.x-k8s.io/admission",), "wait until Kueue admits it"), (("example.com/a", "b"), "example.com/a, b wait")],
)
def test_a_gated_pod(gates: tuple[str, ...], words: str) -> None:
    assert words in why_waiting(replace(POD, gated=True, gates=gates))


@pytest.mark.parametrize(
    ("pod", "words"),
    [
        (replace(POD, waiting_reason="ErrImagePull", waiting_message="not\nfound"), "ErrImagePull: not found: correct"),
        (replace(POD, start_problem='FailedMount: configmap "x" not found'), 'configmap "x" not found: create the'),
        (replace(POD, start_problem="SomethingNew: words"), "SomethingNew: words"),
        (POD, ""),
    ],
)
def test_a_pod_on_a_node(pod: PodView, words: str) -> None:
    assert words in why_starting(pod)
    assert bool(why_starting(pod)) == bool(words)


def test_a_device_that_is_full_or_unhealthy() -> None:
    nodes = {"n": parse_node(node_body("n", "a"))}
    message = encode_outcome(
        Outcome(
            ending=Ending.FAILED, reason="OutOfMemoryError: CUDA", epoch=0, step=0, cause=Cause.OUT_OF_DEVICE_MEMORY
        )
    )
    full = replace(POD, node="n", phase="Failed", ended=Ended(exit_code=1, reason="", message=message, finished_s=0))
    found = assess_worker(full, nodes)
    assert (found.state, found.cause) == (WorkerState.FAILED, Cause.OUT_OF_DEVICE_MEMORY)
    assert "CUDA: the memory of its device does not suffice" in found.reason
    refused = replace(POD, node="n", phase="Failed", refused="UnexpectedAdmissionError: no healthy devices present")
    found = assess_worker(refused, nodes)
    assert found.state is WorkerState.DISRUPTED
    assert "no healthy devices present: look at the device plugin" in found.reason


def test_the_condition_shows_why_a_worker_does_not_start() -> None:
    """From the API's bodies to the message: gates by name, and a pod whose containers are not created."""
    cluster = FakeCluster().with_nodes("a", "b", "c")
    cluster.settle()
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    for body in cluster.pods.values():
        body["status"] = {"phase": "Pending", "conditions": [gated]}
        body["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    cluster.settle()
    assert "kueue.x-k8s.io/admission wait until Kueue admits it" in cluster.message("Scheduled")
    for body in cluster.pods.values():
        body["status"] = {"phase": "Pending"}
    cluster.schedule().settle()
    assert all(view.creating for view in cluster.pod_views)
    cluster.run(ready=False)
    assert not any(view.creating for view in cluster.pod_views)
