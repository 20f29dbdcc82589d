"""The state of a node as far as its workers are concerned: it stays, its end is announced, or it is lost."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from heterotrain_operator.cluster_state.views import NodeReadiness, NodeView

_LOST_TAINTS: Final = {
    "node.kubernetes.io/unreachable": "the control plane has lost contact with the node",
    "node.kubernetes.io/out-of-service": "the node is out of service",
}


class NodeState(StrEnum):
    """Whether a node will keep its workers."""

    STAYS = "stays"
    LEAVING = "leaving"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAssessment:
    """A node's state with the reason in one sentence."""

    state: NodeState
    reason: str


_STAYS: Final = NodeAssessment(state=NodeState.STAYS, reason="")


def assess_node(node: NodeView | None, name: str) -> NodeAssessment:
    """Return whether a node will keep its workers; ``None`` stands for a node that is no longer in the cluster."""
    if node is None:
        return NodeAssessment(state=NodeState.LOST, reason=f"node {name} is gone")
    keys = {taint.key for taint in node.taints}
    for key, what in _LOST_TAINTS.items():
        if key in keys:
            return NodeAssessment(state=NodeState.LOST, reason=f"{what} ({name})")
    if node.readiness is NodeReadiness.UNKNOWN:
        return NodeAssessment(state=NodeState.LOST, reason=f"the control plane has lost contact with the node ({name})")
    if node.announced:
        return NodeAssessment(state=NodeState.LEAVING, reason=f"{node.announced} ({name})")
    if node.readiness is NodeReadiness.FALSE:
        return NodeAssessment(state=NodeState.LEAVING, reason=f"node {name} reports that it is not ready")
    return _STAYS
