"""The nodes that a pod's required node affinity allows, by Kubernetes' rules.

The scheduler decides; this only says which nodes are worth counting. So an affinity that is not understood allows every
node: the dry run of the pod reports a malformed one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
NODE_NAME = "metadata.name"
"""The only field by which a node affinity selects."""
MOST_REQUIREMENTS = 100
MOST_VALUES = 500
"""A larger affinity allows every node here, because each node of the cluster is compared with it."""


class Requirement(NamedTuple):
    """One expression about a label of a node, or about its name.

    Attributes:
        key: the label's key; empty for the node's name.
        operator: one of Kubernetes' operators of node selectors.
        values: what the label is compared with.
    """

    key: str
    operator: str
    values: tuple[str, ...]


Terms: TypeAlias = tuple[tuple[Requirement, ...], ...]
"""A node has to meet all requirements of at least one term."""


def _compared(more: Callable[[int, int], bool]) -> Callable[[str | None, tuple[str, ...]], bool]:
    def holds(value: str | None, values: tuple[str, ...]) -> bool:
        try:
            return value is not None and more(int(value), int(values[0]))
        except (ValueError, IndexError):
            return False

    return holds


_OPERATORS: Final[Mapping[str, Callable[[str | None, tuple[str, ...]], bool]]] = {
    "In": lambda value, values: value in values,
    "NotIn": lambda value, values: value not in values,
    "Exists": lambda value, _: value is not None,
    "DoesNotExist": lambda value, _: value is None,
    "Gt": _compared(lambda value, limit: value > limit),
    "Lt": _compared(lambda value, limit: value < limit),
}


def required_terms(spec: Mapping[str, Any]) -> Terms | None:
    """Return the terms of a pod's required node affinity; ``None`` where it has none, or one that is malformed."""
    try:
        required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(REQUIRED)
        if required is None:
            return None
        terms = tuple(_term(each) for each in required["nodeSelectorTerms"])
    except (AttributeError, KeyError, TypeError):
        return None
    requirements = [requirement for term in terms for requirement in term]
    values = sum(len(each.values) for each in requirements)
    if len(terms) + len(requirements) > MOST_REQUIREMENTS or values > MOST_VALUES:
        return None
    known = all(each.operator in _OPERATORS for each in requirements)
    return terms if known else None


def _term(term: Mapping[str, Any]) -> tuple[Requirement, ...]:
    labels = (_requirement(str(each["key"]), each) for each in term.get("matchExpressions") or ())
    fields = (_requirement("", each) for each in term.get("matchFields") or () if each["key"] == NODE_NAME)
    return (*labels, *fields)


def _requirement(key: str, each: Mapping[str, Any]) -> Requirement:
    return Requirement(key, str(each["operator"]), tuple(str(value) for value in each.get("values") or ()))


def allows(terms: Terms | None, name: str, labels: Mapping[str, str]) -> bool:
    """Return whether a node meets a required node affinity; a term without requirements is met by no node.

    Args:
        terms: of the affinity; ``None`` is met by every node.
        name: of the node.
        labels: of the node.
    """
    if terms is None:
        return True
    return any(term and all(_holds(each, name, labels) for each in term) for term in terms)


def _holds(requirement: Requirement, name: str, labels: Mapping[str, str]) -> bool:
    value = labels.get(requirement.key) if requirement.key else name
    return _OPERATORS[requirement.operator](value, requirement.values)


def label_keys(terms: Terms | None) -> frozenset[str]:
    """Return the labels that decide whether a node meets an affinity."""
    return frozenset(each.key for term in terms or () for each in term if each.key)
