"""Explains why a worker does not run yet, and the next step: from the scheduler's and the kubelet's own words.

Their words name the cause, but not always what to do about it. Words that are not known here are passed on as they are.
"""

from __future__ import annotations

from typing import Final

from heterotrain_operator.cluster_state.views import PodView
from heterotrain_operator.decide.plugins import registry as plugins
from heterotrain_operator.decide.workers.scheduler_words import next_step

MAX_WORDS = 400
"""Characters of foreign words; the next step has to fit the same message."""

# Kubelet's reasons for a container that does not start, or of its events about the pod.
_REASONS: Final = {
    "ErrImagePull": "correct spec.template's image, or give it imagePullSecrets",
    "ImagePullBackOff": "correct spec.template's image, or give it imagePullSecrets",
    "InvalidImageName": "correct the image's name in spec.template",
    "ErrImageNeverPull": "load the image on the node, or set imagePullPolicy: IfNotPresent",
    "CreateContainerConfigError": "create the Secret or ConfigMap that it names, or correct securityContext",
    "CreateContainerError": "correct command and mounts in spec.template",
    "RunContainerError": "correct command and devices in spec.template",
    "CrashLoopBackOff": "read `kubectl logs` of the container that fails",
    "Init:CrashLoopBackOff": "read `kubectl logs` of the init container that fails",
    "FailedMount": "create the Secret, ConfigMap or claim that the volume names, or correct the volume",
    "FailedAttachVolume": "detach the volume from its other node, or use one that several nodes may mount",
    "FailedMapVolume": "correct the volume, or its storage class",
    "FailedCreatePodSandBox": "look at the network plugin of the node",
    "NetworkNotReady": "look at the network plugin of the node",
}


def why_waiting(pod: PodView) -> str:
    """Return why a pod has no node, and the next step; empty while the scheduler has not looked at it."""
    if pod.gated:
        return _gates(pod.gates)
    words = pod.unschedulable[:MAX_WORDS]
    step = next_step(pod.unschedulable)
    return f"{words}: {step}" if words and step else words


def why_starting(pod: PodView) -> str:
    """Return why a pod on a node does not run, and the next step; empty while there is nothing to say."""
    if pod.waiting_reason:
        reason, words = pod.waiting_reason, pod.waiting_message
    else:
        reason, _, words = pod.start_problem.partition(": ")
    found = ": ".join(filter(None, (reason, " ".join(words.split())[:MAX_WORDS])))
    step = _REASONS.get(reason, "")
    return f"{found}: {step}" if step else found


def _gates(gates: tuple[str, ...]) -> str:
    names = f" {', '.join(gates)}" if gates else ""
    why = plugins.why_gated(gates) or "for the controller that set them, such as a queue: look at its log"
    return f"its scheduling gates{names} wait {why}"
