"""Node groups: nodes that are open to the same pools of the same jobs. Jobs compete for the nodes of a group.

Pools select nodes by node selectors and tolerations, so the pools of two jobs may overlap partly. Node groups do not
overlap: each node is in one of them, and one or several of them are open to a pool.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from heterotrain_operator.cluster_state.views import JobKey, NodeView
from heterotrain_operator.decide.workers.capacity import Shape, admits
from heterotrain_operator.decide.workers.node_affinity import label_keys
from heterotrain_operator.decide.workers.node_state import NodeState, assess_node

_PRECISION = 1000.0
"""Quantities are counted in thousandths, Kubernetes' own precision."""
_ROUNDING = 1e-6


class PoolKey(NamedTuple):
    """Names one pool of one job."""

    job: JobKey
    pool: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes that are open to the same pools.

    Attributes:
        name: the first of its nodes.
        nodes: by name, the amount of each resource that the pools may share, without resources that are never scarce.
        sizes: by pool, the amount of each resource that one worker requests.
    """

    name: str
    nodes: Mapping[str, tuple[int, ...]]
    sizes: Mapping[PoolKey, tuple[int, ...]]


GroupsByPool: TypeAlias = Mapping[JobKey, Mapping[str, Sequence[NodeGroup]]]
"""By job and pool, the node groups that are open to the pool."""


def node_groups(
    shapes: Mapping[PoolKey, Shape], nodes: Mapping[str, NodeView], taken: Mapping[str, Mapping[str, float]]
) -> tuple[NodeGroup, ...]:
    """Return the node groups of these pools, by name.

    Args:
        shapes: by pool, the shape of a worker.
        nodes: all nodes of the cluster.
        taken: by node, the requests of pods that do not belong to these pools.
    """
    selectors: dict[str, Shape] = {}
    selector_of: dict[PoolKey, str] = {}
    for pool_key, shape in shapes.items():
        tolerations = [sorted(toleration.items()) for toleration in shape.tolerations]
        selector = json.dumps([sorted(shape.node_selector.items()), tolerations, shape.affinity])
        selectors.setdefault(selector, shape)
        selector_of[pool_key] = selector
    # There are few kinds of nodes and few selectors, and each pair is compared only once.
    asked = sorted({key for shape in selectors.values() for key in (*shape.node_selector, *label_keys(shape.affinity))})
    by_name = any(not each.key for shape in selectors.values() for term in shape.affinity or () for each in term)
    open_to: dict[tuple[object, ...], frozenset[str]] = {}
    members: dict[frozenset[str], list[str]] = {}
    for name in sorted(nodes):
        node = nodes[name]
        if assess_node(node, name).state is not NodeState.STAYS:
            continue
        kind = (name if by_name else "", node.cordoned, node.taints, *(node.labels.get(key) for key in asked))
        if kind not in open_to:
            open_to[kind] = frozenset(selector for selector, shape in selectors.items() if admits(shape, node))
        if open_to[kind]:
            members.setdefault(open_to[kind], []).append(name)
    return tuple(
        _in_whole_numbers(
            {pool_key: shapes[pool_key].requests for pool_key, selector in selector_of.items() if selector in opened},
            {name: _free(nodes[name].allocatable, taken.get(name, {})) for name in names},
        )
        for opened, names in sorted(members.items(), key=lambda item: item[1])
    )


def _free(allocatable: Mapping[str, float], taken: Mapping[str, float]) -> dict[str, float]:
    return {name: max(0.0, amount - taken.get(name, 0.0)) for name, amount in allocatable.items()}


def _in_whole_numbers(
    requests: Mapping[PoolKey, Mapping[str, float]], free: Mapping[str, Mapping[str, float]]
) -> NodeGroup:
    """Return a node group in whole numbers."""
    needs = {
        # A tiny request, such as 0.1n bytes, still counts as one unit.
        pool_key: {
            name: max(1, math.ceil(amount * _PRECISION - _ROUNDING)) for name, amount in each.items() if amount > 0
        }
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
    resources = _scarce([dict(need) for need in sorted(distinct)], list(kinds.values()), sorted(units))
    return NodeGroup(
        name=min(free),
        nodes={node: tuple(have[name] for name in resources) for node, have in amounts.items()},
        sizes={
            pool_key: tuple(need.get(name, 0) // units[name] for name in resources) for pool_key, need in needs.items()
        },
    )


def _scarce(
    needs: Sequence[Mapping[str, int]], nodes: Sequence[Mapping[str, int]], resources: Sequence[str]
) -> tuple[str, ...]:
    """Return the resources that may limit how many workers fit.

    Resource A, which every worker needs, makes resource B irrelevant if no worker needs more of B per unit of A than
    the poorest node has: then A always runs out first.
    """
    kept = list(resources)
    for scarce in resources:
        if scarce not in kept or any(need.get(scarce, 0) == 0 for need in needs):
            continue
        for other in [name for name in kept if name != scarce]:
            if all(need.get(other, 0) * have[scarce] <= have[other] * need[scarce] for need in needs for have in nodes):
                kept.remove(other)
    return tuple(kept)
