"""The pod template of one pool: the job's template with the pool's patch, merged as ``kubectl patch`` merges pods.

Objects are merged field by field. Lists are merged item by item where Kubernetes tells items apart by a key; any other
list of the patch replaces the template's. An item with one source only, such as a volume, is replaced as a whole:
merged with a volume of another kind, it would have two sources, which the API server refuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MERGE_KEYS = {
    "containers": "name",
    "env": "name",
    "hostAliases": "ip",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "ports": "containerPort",
    "resourceClaims": "name",
    "topologySpreadConstraints": "topologyKey",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
"""By list, the field that tells its items apart (Kubernetes' ``patchMergeKey``)."""


_REPLACED = frozenset({"env", "hostAliases", "imagePullSecrets", "resourceClaims", "volumeMounts", "volumes"})
"""Lists of which an item of the patch replaces the one with the same key."""


def merged(template: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template with the patch; neither is changed. A null in the patch changes nothing."""
    result = dict(template)
    for name, value in patch.items():
        if value is None:
            continue
        before = result.get(name)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            result[name] = merged(before, value)
        elif name in MERGE_KEYS and _are_objects(before) and _are_objects(value):
            result[name] = _merged_lists(before or (), value, MERGE_KEYS[name], whole=name in _REPLACED)
        else:
            result[name] = value
    return result


def _are_objects(value: object) -> bool:
    return value is None or (isinstance(value, list | tuple) and all(isinstance(each, Mapping) for each in value))


def _merged_lists(
    before: Sequence[Mapping[str, Any]], patch: Sequence[Mapping[str, Any]], key: str, *, whole: bool
) -> list[dict[str, Any]]:
    """Return the items of ``before`` with their patches, followed by those that only the patch has."""
    result = [dict(each) for each in before]
    for each in patch:
        own = next((n for n, known in enumerate(result) if known.get(key) == each.get(key)), None)
        if own is None:
            result.append(dict(each))
        else:
            result[own] = dict(each) if whole else merged(result[own], each)
    return result
