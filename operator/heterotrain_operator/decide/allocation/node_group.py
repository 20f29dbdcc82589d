"""Which sets of nodes jobs compete for: nodes that are open to the same pools of the same jobs are one node group.

Jobs name their pools by node selectors and tolerations, so pools of two jobs may overlap in part. Grounds do not: each
node is on one of them, and a pool stands on one or several.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from heterotrain_operator.cluster_state.views import JobKey, NodeView
from heterotrain_operator.decide.workers.capacity import Shape, admits
from heterotrain_operator.decide.workers.node_state import NodeState, assess_node

_PRECISION = 1000.0
"""Quantities are counted in thousandths, Kubernetes' own precision."""
_ROUNDING = 1e-6


class PoolKey(NamedTuple):
    """One pool of one job."""

    job: JobKey
    pool: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes that are open to the same pools.

    Attributes:
        name: the first of its nodes.
        nodes: by name, the amounts of each resource that the pools may share; resources that never decide are left out.
        sizes: by pool, what one worker takes of each.
    """

    name: str
    nodes: Mapping[str, tuple[int, ...]]
    sizes: Mapping[PoolKey, tuple[int, ...]]


def node_groups(
    shapes: Mapping[PoolKey, Shape], nodes: Mapping[str, NodeView], taken: Mapping[str, Mapping[str, float]]
) -> tuple[NodeGroup, ...]:
    """Return the node groups of these pools, by name.

    Args:
        shapes: what a worker of each pool needs.
        nodes: all nodes of the cluster.
        taken: by node, what is requested by pods that do not belong to these pools.
    """
    gates: dict[str, Shape] = {}
    gate_of: dict[PoolKey, str] = {}
    for pool_key, shape in shapes.items():
        gate = json.dumps([sorted(shape.node_selector.items()), [sorted(t.items()) for t in shape.tolerations]])
        gates.setdefault(gate, shape)
        gate_of[pool_key] = gate
    # Few kinds of nodes and few gates: each pair is looked at once, however many nodes and jobs there are.
    asked = sorted({key for shape in gates.values() for key in shape.node_selector})
    open_to: dict[tuple[object, ...], frozenset[str]] = {}
    members: dict[frozenset[str], list[str]] = {}
    for name in sorted(nodes):
        node = nodes[name]
        if assess_node(node, name).state is not NodeState.STAYS:
            continue
        kind = (node.cordoned, node.taints, *(node.labels.get(key) for key in asked))
        if kind not in open_to:
            open_to[kind] = frozenset(gate for gate, shape in gates.items() if admits(shape, node))
        if open_to[kind]:
            members.setdefault(open_to[kind], []).append(name)
    return tuple(
        _node_group(
            {pool_key: shapes[pool_key].requests for pool_key, gate in gate_of.items() if gate in opened},
            {name: _free(nodes[name].allocatable, taken.get(name, {})) for name in names},
        )
        for opened, names in sorted(members.items(), key=lambda item: item[1])
    )


def _free(allocatable: Mapping[str, float], taken: Mapping[str, float]) -> dict[str, float]:
    return {name: max(0.0, amount - taken.get(name, 0.0)) for name, amount in allocatable.items()}


def _node_group(requests: Mapping[PoolKey, Mapping[str, float]], free: Mapping[str, Mapping[str, float]]) -> NodeGroup:
    """Return a node group in whole numbers."""
    needs = {
        pool_key: {name: math.ceil(amount * _PRECISION - _ROUNDING) for name, amount in each.items() if amount > 0}
        for pool_key, each in requests.items()
    }
    named = {name for need in needs.values() for name in need}
    units = {name: math.gcd(*(need.get(name, 0) for need in needs.values())) for name in sorted(named)}
    amounts = {
        node: {name: int(have.get(name, 0.0) * _PRECISION + _ROUNDING) // unit for name, unit in units.items()}
        for node, have in free.items()
    }
    distinct = {tuple(sorted((name, need[name] // units[name]) for name in need)) for need in needs.values()}
    kinds = {tuple(have.items()): have for have in amounts.values()}
    resources = _deciding([dict(need) for need in sorted(distinct)], list(kinds.values()), sorted(units))
    return NodeGroup(
        name=min(free),
        nodes={node: tuple(have[name] for name in resources) for node, have in amounts.items()},
        sizes={
            pool_key: tuple(need.get(name, 0) // units[name] for name in resources) for pool_key, need in needs.items()
        },
    )


def _deciding(
    needs: Sequence[Mapping[str, int]], nodes: Sequence[Mapping[str, int]], resources: Sequence[str]
) -> tuple[str, ...]:
    """Return the resources that may decide what fits.

    One that every worker needs makes another one pointless when no worker takes as much of the other for each unit of it
    as the poorest node has: the first always runs out before the second.
    """
    kept = list(resources)
    for scarce in resources:
        if scarce not in kept or any(need.get(scarce, 0) == 0 for need in needs):
            continue
        for other in [name for name in kept if name != scarce]:
            if all(need.get(other, 0) * have[scarce] <= have[other] * need[scarce] for need in needs for have in nodes):
                kept.remove(other)
    return tuple(kept)
