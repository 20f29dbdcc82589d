"""Messages of the scheduler, each with the step that it has to give. It gives none of the other steps."""

from __future__ import annotations

import pytest
from heterotrain_operator.decide.workers.scheduler_words import next_step

CONTROL_PLANE = "1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }"
OTHER_LABELS = "node(s) didn't match Pod's node affinity/selector"
NO_HELP = " preemption: 0/5 nodes are available: 5 Preemption is not helpful for scheduling."
NO_VICTIMS = (
    " preemption: 0/5 nodes are available: 1 No preemption victims found for incoming pod, 4 Preemption is not helpful "
    "for scheduling."
)
# Words by which a step is recognized.
SELECTOR, TOLERATION, DEVICES, REQUESTS = "check the pool's nodeSelector", "add a toleration of", "devices", "requests"
EITHER = "otherwise check its nodeSelector"
CORDON, ORDER, PODS, PORTS = "uncordon", "not in order", "maxPods", "other ports"
CLAIM, GONE, PROVIDES, FREE_VOLUME, ZONE = (
    "create the claim that",
    "is gone",
    "nothing provides",
    "no free volume",
    "zone",
)
COUNT, SHARED, AWAY, LIKES, SPREAD = "fewer volumes", "ReadWriteMany", "podAntiAffinity", "podAffinity", "Spread"
CLASS, CLAIMS, NO_NODES, NOTHING = "DeviceClass", "kubectl get resourceclaims", "the cluster has none", ""
STEPS = (
    SELECTOR, TOLERATION, DEVICES, REQUESTS, CORDON, ORDER, PODS, PORTS, CLAIM, GONE, PROVIDES, FREE_VOLUME, ZONE,
    COUNT, SHARED, AWAY, LIKES, SPREAD, CLASS, CLAIMS, NO_NODES,
)  # fmt: skip


def nodes(*reasons: str, after: str = NO_HELP, number: int = 5) -> str:
    return f"0/{number} nodes are available: {', '.join(reasons)}.{after}"


MESSAGES = [
    (nodes(CONTROL_PLANE, f"4 {OTHER_LABELS}"), SELECTOR),
    (nodes(f"3 {OTHER_LABELS}", number=3), SELECTOR),
    (nodes("1 Insufficient cpu", CONTROL_PLANE, f"3 {OTHER_LABELS}", after=NO_VICTIMS), REQUESTS),
    (nodes("1 Insufficient memory", CONTROL_PLANE, f"3 {OTHER_LABELS}", after=NO_VICTIMS), REQUESTS),
    (nodes("2 Insufficient ephemeral-storage", CONTROL_PLANE, f"2 {OTHER_LABELS}"), REQUESTS),
    (nodes("4 Insufficient hugepages-2Mi", CONTROL_PLANE), REQUESTS),
    (nodes("2 Insufficient cpu", "2 Insufficient memory", CONTROL_PLANE, "2 " + OTHER_LABELS), REQUESTS),
    (nodes("1 Insufficient nvidia.com/gpu", CONTROL_PLANE, f"3 {OTHER_LABELS}", after=NO_VICTIMS), DEVICES),
    (nodes("4 Insufficient nvidia.com/mig-1g.5gb", CONTROL_PLANE), DEVICES),
    (nodes("1 Insufficient cpu", "3 Insufficient amd.com/gpu", CONTROL_PLANE), DEVICES),
    (nodes("3 Insufficient cpu", "1 Insufficient amd.com/gpu", CONTROL_PLANE), REQUESTS),
    (nodes(CONTROL_PLANE, "4 node(s) had untolerated taint {dedicated: research}"), TOLERATION),
    (nodes(CONTROL_PLANE, "2 node(s) had untolerated taint {nvidia.com/gpu: present}", f"2 {OTHER_LABELS}"), EITHER),
    (nodes(CONTROL_PLANE, "4 node(s) had untolerated taint {node.kubernetes.io/not-ready: }"), ORDER),
    (nodes("2 node(s) had untolerated taint {node.kubernetes.io/unreachable: }", f"3 {OTHER_LABELS}"), ORDER),
    (nodes("4 node(s) had untolerated taint {node.kubernetes.io/disk-pressure: }", CONTROL_PLANE), ORDER),
    (nodes("4 node(s) had untolerated taint {node.cloudprovider.kubernetes.io/uninitialized: true}"), ORDER),
    (nodes("1 node(s) had untolerated taint {karpenter.sh/disrupted: }", f"4 {OTHER_LABELS}"), ORDER),
    (nodes("1 node(s) had untolerated taint {ToBeDeletedByClusterAutoscaler: 1700000000}", f"4 {OTHER_LABELS}"), ORDER),
    (nodes("2 node(s) were unschedulable", f"3 {OTHER_LABELS}"), CORDON),
    (nodes("2 node(s) had untolerated taint {node.kubernetes.io/unschedulable: }", CONTROL_PLANE), CORDON),
    (nodes("4 Too many pods", CONTROL_PLANE), PODS),
    (nodes("1 node(s) had untolerated taint(s)", f"4 {OTHER_LABELS}"), SELECTOR),
    (nodes("5 node(s) had untolerated taint(s)"), TOLERATION),
    (nodes("1 Insufficient lab.heterotrain.dev/device", "1 node(s) had untolerated taint(s)", f"3 {OTHER_LABELS}",
           after=". no new claims to deallocate, preemption: 0/5 nodes are available: 4 Preemption is not helpful."),
     DEVICES),
    (nodes("1 node(s) didn't have free ports for the requested pod ports", f"4 {OTHER_LABELS}"), PORTS),
    (nodes("4 node(s) didn't match pod anti-affinity rules", CONTROL_PLANE), AWAY),
    (nodes("2 node(s) didn't satisfy existing pods anti-affinity rules", f"3 {OTHER_LABELS}"), AWAY),
    (nodes("4 node(s) didn't match pod affinity rules", CONTROL_PLANE), LIKES),
    (nodes("4 node(s) didn't match pod topology spread constraints", CONTROL_PLANE), SPREAD),
    (nodes("4 node(s) didn't match pod topology spread constraints (missing required label)", CONTROL_PLANE), SPREAD),
    ('0/5 nodes are available: persistentvolumeclaim "data" not found. preemption: not eligible.', CLAIM),
    ('0/5 nodes are available: persistentvolumeclaim "data" bound to non-existent persistentvolume "pv-1".', GONE),
    ("0/5 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found", PROVIDES),
    (nodes(CONTROL_PLANE, "4 node(s) didn't find available persistent volumes to bind"), FREE_VOLUME),
    (nodes("1 Insufficient cpu", "3 node(s) had volume node affinity conflict", CONTROL_PLANE), ZONE),
    (nodes("4 node(s) had no available volume zone", CONTROL_PLANE), ZONE),
    (nodes("4 node(s) exceed max volume count", CONTROL_PLANE), COUNT),
    (nodes("1 node has pod using PersistentVolumeClaim with the same name and ReadWriteOncePod access mode",
           f"4 {OTHER_LABELS}"), SHARED),
    (nodes("3 cannot allocate all claims", "1 node(s) had untolerated taint {a: b}", CONTROL_PLANE), DEVICES),
    ("request gpu: device class gpu.example.com does not exist", CLASS),
    ('resourceclaim.resource.k8s.io "gpu" not found', CLAIMS),
    ("no nodes available to schedule pods", NO_NODES),
    ("0/1 tasks in gang unschedulable: pod group is not ready, 1 Pending, 4 minAvailable", NOTHING),
    ("words of a newer scheduler", NOTHING),
    (nodes("5 node(s) have a reason that nobody knows"), NOTHING),
    ("", NOTHING),
]  # fmt: skip


@pytest.mark.parametrize(("message", "step"), MESSAGES)
def test_a_message_gives_its_own_step_and_no_other(message: str, step: str) -> None:
    found = next_step(message)
    expected = {TOLERATION} if step is EITHER else {step} if step else set()
    assert {each for each in STEPS if each in found} == expected
    assert step in found
    assert bool(found) == bool(step)


def test_resources_and_taints_are_named() -> None:
    assert "free cpu, memory:" in next_step(nodes("4 Insufficient cpu", "4 Insufficient memory", CONTROL_PLANE))
    both = next_step(nodes("4 Insufficient cpu", "4 Insufficient nvidia.com/gpu", CONTROL_PLANE))
    assert "too little free cpu" in both
    assert "free devices (nvidia.com/gpu)" in both
    assert "toleration of dedicated=research to" in next_step(MESSAGES[11][0])


def test_a_message_of_any_length_is_read_quickly() -> None:
    assert next_step("0/5 nodes are available: " + "1 Insufficient , . : {" * 100_000) is not None
