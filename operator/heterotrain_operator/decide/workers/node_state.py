"""What a node's state says about the workers on it: it stays, it is announced to go, or it is lost.

Every cloud and autoscaler has its own word for "this node goes in a moment"; reading all of them is what turns a
sudden loss into a planned one. Cordoning alone is no such word: a cordoned node may stay for days.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from heterotrain_operator.cluster_state.views import NodeReadiness, NodeView

# Taint keys (or prefixes that end in "/") that announce a node's end, and who sets them.
ANNOUNCEMENTS: Final = {
    "karpenter.sh/disrupted": "Karpenter is about to remove the node",
    "ToBeDeletedByClusterAutoscaler": "the cluster autoscaler is about to remove the node",
    "aws-node-termination-handler/spot-itn": "AWS has announced the interruption of the spot node",
    "aws-node-termination-handler/scheduled-maintenance": "AWS has announced maintenance of the node",
    "aws-node-termination-handler/asg-lifecycle-termination": "AWS is about to terminate the node",
    "cloud.google.com/impending-node-termination": "Google Cloud has announced the node's end",
    "remediator.aks.microsoft.com/unschedulable": "AKS has announced the end of the spot node",
    "node.cloudprovider.kubernetes.io/shutdown": "the cloud has shut the node down",
}
_LOST_TAINTS: Final = {
    "node.kubernetes.io/unreachable": "the control plane does not hear from the node any more",
    "node.kubernetes.io/out-of-service": "the node is out of service",
}


class NodeState(StrEnum):
    """Whether workers on a node may be counted on."""

    STAYS = "stays"
    LEAVING = "leaving"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAssessment:
    """A node's state and the sentence that says why."""

    state: NodeState
    reason: str


_STAYS: Final = NodeAssessment(state=NodeState.STAYS, reason="")


def assess_node(node: NodeView | None, name: str) -> NodeAssessment:
    """Return what becomes of the workers on a node; ``None`` stands for a node that is not in the cluster any more."""
    if node is None:
        return NodeAssessment(state=NodeState.LOST, reason=f"node {name} is gone")
    keys = {taint.key for taint in node.taints}
    for key, what in _LOST_TAINTS.items():
        if key in keys:
            return NodeAssessment(state=NodeState.LOST, reason=f"{what} ({name})")
    if node.readiness is NodeReadiness.UNKNOWN:
        return NodeAssessment(
            state=NodeState.LOST, reason=f"the control plane does not hear from the node any more ({name})"
        )
    for key, what in ANNOUNCEMENTS.items():
        if key in keys:
            return NodeAssessment(state=NodeState.LEAVING, reason=f"{what} ({name})")
    if node.readiness is NodeReadiness.FALSE:
        return NodeAssessment(state=NodeState.LEAVING, reason=f"node {name} says that it is not ready")
    return _STAYS
