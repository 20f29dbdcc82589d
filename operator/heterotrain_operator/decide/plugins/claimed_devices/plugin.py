"""The devices that a pod claims are noted on it, because nothing else tells how many they are."""

from __future__ import annotations

from heterotrain_operator.cluster_state.quantity import MORE_REQUESTS, text_of_more_requests
from heterotrain_operator.decide.plugins.interface import NewPod, PodPatch


def patch(pod: NewPod) -> PodPatch:
    """Return the note."""
    text = text_of_more_requests(pod.requests)
    return PodPatch(annotations={MORE_REQUESTS: text} if text else {})
