"""Announcements that a node is about to go.

Every cloud and autoscaler has its own taint or condition for this. Reading all of them turns a sudden loss into a
planned one. Cordoning alone is not such an announcement: a cordoned node may stay for days.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

TAINTS: Final = {
    "karpenter.sh/disrupted": "Karpenter is about to remove the node",
    "karpenter.sh/disruption": "Karpenter is about to remove the node",
    "ToBeDeletedByClusterAutoscaler": "the cluster autoscaler is about to remove the node",
    "aws-node-termination-handler/spot-itn": "AWS has announced the interruption of the spot node",
    "aws-node-termination-handler/scheduled-maintenance": "AWS has announced maintenance of the node",
    "aws-node-termination-handler/asg-lifecycle-termination": "AWS is about to terminate the node",
    "cloud.google.com/impending-node-termination": "Google Cloud has announced the node's end",
    "remediator.aks.microsoft.com/unschedulable": "AKS has announced the end of the spot node",
    "remediator.kubernetes.azure.com/unschedulable": "AKS has announced the end of the spot node",
    "node.cloudprovider.kubernetes.io/shutdown": "the cloud has shut the node down",
}
"""Taint keys, whatever their effect; ``karpenter.sh/disruption`` is that of Karpenter before version 1."""
CONDITIONS: Final = {"VMEventScheduled": "AKS has announced an event of the node's machine"}
"""Types of conditions that hold."""
_SHORT_EVENT = "Freeze"
"""A machine that is frozen goes on within seconds (Azure, "Scheduled Events")."""


def announcement_of(body: Mapping[str, Any], others: Collection[str] = ()) -> str:
    """Return what announces the end of a node, as part of a sentence; empty without an announcement.

    Args:
        body: the node.
        others: further taint keys and types of conditions that announce it.
    """
    if "deletionTimestamp" in body["metadata"]:
        return "its Node object is being deleted"
    keys = {taint["key"] for taint in (body.get("spec") or {}).get("taints") or ()}
    holding = _holding((body.get("status") or {}).get("conditions") or ())
    known = [*((key, what) for key, what in TAINTS.items() if key in keys)]
    known += ((kind, what) for kind, what in CONDITIONS.items() if kind in holding)
    known += ((each, f"it has {each}, which announces its end") for each in others if each in keys or each in holding)
    return known[0][1] if known else ""


def _holding(conditions: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    return frozenset(
        str(each["type"])
        for each in conditions
        if each.get("status") == "True"
        and _SHORT_EVENT not in f"{each.get('reason') or ''} {each.get('message') or ''}"
    )
