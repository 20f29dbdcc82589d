"""The next step that follows from a message of the scheduler, such as ``0/5 nodes are available: 1 Insufficient cpu``.

The scheduler names one reason for each node. Nodes of other pools have other labels and taints, and the control plane
has its own: these reasons are in nearly every message. So what a node lacks that is open to the pool decides; only
where none is, labels and taints do.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

from heterotrain_operator.api.text import listed

MOST_CHARACTERS: Final = 4000
"""Of a message; the scheduler's own are shorter."""
MOST_NAME: Final = 100
_MOST_NAMED = 3
_REASON = re.compile(r"(?:^|[,:.] )(\d{1,7}) ([^,.]+(?:[,.](?! )[^,.]*)*)")
_TAINT = re.compile(r"(?:untolerated taint|had taint) \{([^:}]{1,317}):? ?([^}]{0,63})\}")
_ELSEWHERE = frozenset({"node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master"})
"""Taints of nodes that no worker should get."""
_PASSING = (
    "node.kubernetes.io/",
    "node.cloudprovider.kubernetes.io/",
    "karpenter.sh/",
    "ToBeDeletedByClusterAutoscaler",
)
"""Beginnings of taints that follow a node's state: nobody tolerates them, and they go by themselves."""
_CORDONED = "node.kubernetes.io/unschedulable"

# About the pod itself, whatever the nodes: parts of the message in lower case, and the step.
_OF_POD: Final = (
    ("unbound immediate persistentvolumeclaims", "", "see `kubectl describe pvc`: nothing provides its volume"),
    ("persistentvolumeclaim", "non-existent", "its volume is gone: create the claim again, and restore its data"),
    ("persistentvolumeclaim", "not found", "create the claim that spec.template names"),
    ("device class", "not exist", "create the DeviceClass that its claim names, by installing the device's driver"),
    ("resourceclaim", "", "see `kubectl get resourceclaims`: a claim or its ResourceClaimTemplate is missing"),
    ("no nodes available to schedule pods", "", "add nodes: the cluster has none that is ready"),
)
# About nodes that are open to the pool: part of a reason in lower case, and the step.
_OF_NODE: Final = (
    ("too many pods", "its nodes run as many pods as they may: add nodes, or raise the kubelet's maxPods"),
    ("free ports", "another pod has its ports on the node: use other ports, or no hostNetwork and hostPort"),
    ("didn't find available persistent volumes", "see `kubectl describe pvc`: no free volume matches its claim there"),
    ("volume node affinity conflict", "its volume is where no such node is: use a volume of the pool's zone"),
    ("no available volume zone", "its volume is where no such node is: use a volume of the pool's zone"),
    ("max volume count", "the node has as many volumes as it may: add nodes, or use fewer volumes"),
    ("readwriteoncepod", "use a claim with ReadWriteMany or ReadOnlyMany: several workers mount it"),
    ("disk conflict", "use a claim with ReadWriteMany or ReadOnlyMany: several workers mount it"),
    ("cannot allocate all claims", "its nodes have too few free devices: add nodes, or lower maxReplicas"),
    ("anti-affinity", "another pod keeps it away: look at podAntiAffinity here and there, or add nodes"),
    ("pod affinity", "look at the template's podAffinity: no node has the pods that it asks for"),
    ("topology spread constraints", "relax the template's topologySpreadConstraints, or add nodes where they want one"),
    ("were unschedulable", "its nodes are cordoned: `kubectl uncordon` them, or add nodes"),
)
_SELECTOR = "node affinity/selector"


def next_step(words: str) -> str:
    """Return the next step that a message of the scheduler asks for; empty where its words are not known."""
    text = words[:MOST_CHARACTERS].partition(" preemption: ")[0]
    lower = text.lower()
    if (step := next((step for first, then, step in _OF_POD if first in lower and then in lower), "")) != "":
        return step
    reasons: Counter[str] = Counter()
    for count, reason in _REASON.findall(text):
        reasons[reason.strip()] += int(count)
    return _of_open_nodes(reasons) or _of_closed_nodes(reasons)


def _of_open_nodes(reasons: Counter[str]) -> str:
    """Return the step for the most frequent reason of nodes that are open to the pool; empty without one."""
    found: Counter[str] = Counter()
    lacking: Counter[str] = Counter()
    for reason, count in reasons.items():
        if reason.startswith("Insufficient "):
            lacking[reason.removeprefix("Insufficient ").strip()[:MOST_NAME]] += count
            continue
        lower = reason.lower()
        found[next((step for part, step in _OF_NODE if part in lower), "")] += count
    del found[""]
    step, most = found.most_common(1)[0] if found else ("", 0)
    return step if most > max(lacking.values(), default=0) else _lacking(lacking) or step


def _lacking(amounts: Counter[str]) -> str:
    """Return the step for the resources that most nodes lack; empty where they lack none."""
    most = max(amounts.values(), default=0)
    names = [name for name, count in amounts.items() if count == most]
    devices, others = [name for name in names if "/" in name], [name for name in names if "/" not in name]
    which = listed(others, most=_MOST_NAMED)
    parts = [f"its nodes have too little free {which}: add nodes, or lower the pool's requests"] if others else []
    which = listed(devices, most=_MOST_NAMED)
    parts += (
        [f"its nodes have too few free devices ({which}): add nodes, or lower the pool's limits"] if devices else []
    )
    return "; ".join(parts)


def _of_closed_nodes(reasons: Counter[str]) -> str:
    """Return the step where taints and labels keep the pool from every node."""
    text = ", ".join(reasons)
    taints = [(key, value) for key, value in _TAINT.findall(text) if key not in _ELSEWHERE]
    lasting = [f"{key}={value}" if value else key for key, value in taints if not key.startswith(_PASSING)]
    unlike = any(_SELECTOR in reason for reason in reasons)
    if lasting and unlike:
        which = listed(lasting, most=_MOST_NAMED)
        return f"add a toleration of {which} to the pool if it means those nodes; otherwise check its nodeSelector"
    if lasting:
        return f"add a toleration of {listed(lasting, most=_MOST_NAMED)} to the pool"
    if any(key == _CORDONED for key, _ in taints):
        return "its nodes are cordoned: `kubectl uncordon` them, or add nodes"
    if taints:
        keys = listed(sorted({key for key, _ in taints}), most=_MOST_NAMED)
        return f"its nodes are not in order ({keys}): see `kubectl describe node`, or add nodes"
    if unlike:
        return "check the pool's nodeSelector and affinity against `kubectl get nodes --show-labels`"
    return "add a toleration of its nodes' taints to the pool" if "untolerated taint(s)" in text else ""
