"""Computes how many more workers of a pool fit: the nodes' allocatable resources less the requests of all running pods.

This is an estimate: affinity between pods and volumes are visible to the scheduler only, as are some devices. It
decides no more than how many pods are worth creating, and a pod that the scheduler cannot place delays nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from heterotrain_operator.cluster_state.quantity import PODS, pod_requests
from heterotrain_operator.cluster_state.views import NodeView, Taint
from heterotrain_operator.decide.workers.node_affinity import Terms, allows, required_terms
from heterotrain_operator.decide.workers.node_state import NodeState, assess_node

_BLOCKING_EFFECTS = ("NoSchedule", "NoExecute")
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The properties of a pool's workers that decide where they can be scheduled."""

    requests: Mapping[str, float]
    node_selector: Mapping[str, str]
    tolerations: Sequence[Mapping[str, Any]]
    affinity: Terms | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedPod:
    """What the API server makes of a worker's pod, by its answer to a dry run.

    Attributes:
        shape: with what admission adds: defaults of LimitRanges, the overhead of a runtime class, injected containers.
        priority: of its PriorityClass, or of the cluster's default; 0 without one.
    """

    shape: Shape
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeSlots:
    """How many more workers fit now.

    Attributes:
        slots: workers that fit now.
        matching_nodes: nodes that take such workers.
        possible: whether at least one matching node is large enough when it is empty.
    """

    slots: int
    matching_nodes: int
    possible: bool


def shape_of(pod: Mapping[str, Any], requests: Mapping[str, float]) -> Shape:
    """Return the shape of a pod's manifest."""
    spec = pod["spec"]
    return Shape(
        requests=requests,
        node_selector=spec.get("nodeSelector") or {},
        tolerations=tuple(spec.get("tolerations") or ()),
        affinity=required_terms(spec),
    )


def admitted_pod(body: Mapping[str, Any], devices: Mapping[str, float]) -> AdmittedPod | None:
    """Return what is needed of the answer to a dry run; ``None`` where requests can't be read.

    Args:
        body: the answer.
        devices: what it requests in other ways, by resource.
    """
    try:
        shape = shape_of(body, {**pod_requests(body["spec"]), **devices})
        return AdmittedPod(shape=shape, priority=int(body["spec"].get("priority") or 0))
    except (ValueError, TypeError):
        return None


def free_slots(shape: Shape, nodes: Iterable[NodeView], used: Mapping[str, Mapping[str, float]]) -> FreeSlots:
    """Return how many more workers of this shape fit on the nodes.

    Args:
        shape: shape of one worker.
        nodes: all nodes of the cluster.
        used: by node, the sum of the requests of running pods.
    """
    found = [each for node in nodes if (each := slots_on(shape, node, used.get(node.name, {}))) is not None]
    return FreeSlots(
        slots=sum(slots for slots, _ in found),
        matching_nodes=len(found),
        possible=any(possible for _, possible in found),
    )


def less_slots(
    found: FreeSlots, shape: Shape, without: Sequence[NodeView], used: Mapping[str, Mapping[str, float]]
) -> FreeSlots:
    """Return free slots without those on some of the nodes.

    Args:
        found: free slots on all nodes.
        shape: shape of one worker.
        without: nodes that are not used.
        used: by node, the sum of the requests of running pods.
    """
    theirs = [slots for node in without if (slots := slots_on(shape, node, used.get(node.name, {}))) is not None]
    taken = sum(slots for slots, _ in theirs)
    return replace(found, slots=max(0, found.slots - taken), matching_nodes=max(0, found.matching_nodes - len(theirs)))


def slots_on(shape: Shape, node: NodeView, taken: Mapping[str, float]) -> tuple[int, bool] | None:
    """Return how many more workers fit on a node, and whether one would fit if it were empty.

    Args:
        shape: shape of one worker.
        node: the node; the answer is ``None`` for one that does not take such workers.
        taken: the sum of the requests of running pods on it.
    """
    if not _matches(shape, node):
        return None
    free = {name: amount - taken.get(name, 0.0) for name, amount in node.allocatable.items()}
    return _fit(shape.requests, free), _fit(shape.requests, node.allocatable) > 0


def _matches(shape: Shape, node: NodeView) -> bool:
    return assess_node(node, node.name).state is NodeState.STAYS and admits(shape, node)


def admits(shape: Shape, node: NodeView) -> bool:
    """Return whether a node takes new workers of this shape, judging by its name, labels, taints and cordon."""
    return (
        not node.cordoned
        and all(node.labels.get(key) == value for key, value in shape.node_selector.items())
        and allows(shape.affinity, node.name, node.labels)
        and all(
            taint.effect not in _BLOCKING_EFFECTS or any(tolerates(each, taint) for each in shape.tolerations)
            for taint in node.taints
        )
    )


def tolerates(toleration: Mapping[str, Any], taint: Taint) -> bool:
    """Return whether a toleration covers a taint, by Kubernetes' rules."""
    if toleration.get("effect") not in (None, "", taint.effect):
        return False
    if toleration.get("key") not in (None, "", taint.key):
        return False
    if toleration.get("operator") == "Exists":
        return True
    return bool(toleration.get("key")) and (toleration.get("value") or "") == taint.value


def _fit(requests: Mapping[str, float], free: Mapping[str, float]) -> int:
    counts = [int(free.get(name, 0.0) / amount + _ROUNDING) for name, amount in requests.items() if amount > 0]
    return max(0, min(counts, default=0)) if PODS in requests else 0
