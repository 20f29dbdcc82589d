"""Separates what pods of several pools share from what is different in each: the inverse of the operator's merge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from heterotrain_operator.decide.objects.pool_template import MERGE_KEYS

_ORDERED = ("initContainers",)
"""Lists whose order counts: they are common as a whole or not at all."""
_WHOLE = ("env", "hostAliases", "imagePullSecrets", "resourceClaims", "volumeMounts", "volumes")
"""Lists of which an item is common as a whole or not at all."""


def common(templates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is the same in all of these objects."""
    first, found = templates[0], {}
    for name, value in first.items():
        others = [each.get(name) for each in templates]
        if all(other == value for other in others):
            found[name] = value
        elif all(isinstance(other, Mapping) for other in others):
            found[name] = common([other for other in others if isinstance(other, Mapping)])
        elif name in MERGE_KEYS and name not in _ORDERED and all(isinstance(other, list) for other in others):
            found[name] = _common_items([other for other in others if isinstance(other, list)], name)
    return found


def differences(base: Mapping[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the patch that makes the template of what all have in common."""
    found: dict[str, Any] = {}
    for name, value in template.items():
        before = base.get(name)
        if before == value:
            continue
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            found[name] = differences(before, value)
        elif name in MERGE_KEYS and isinstance(value, list) and isinstance(before, list):
            key = MERGE_KEYS[name]
            known = {each[key]: each for each in before}
            found[name] = [
                each if each[key] not in known else {key: each[key], **differences(known[each[key]], each)}
                for each in value
                if known.get(each[key]) != each
            ]
        else:
            found[name] = value
    return found


def _common_items(lists: Sequence[list[Any]], name: str) -> list[Any]:
    key = MERGE_KEYS[name]
    by_key = [{each[key]: each for each in items} for items in lists]
    shared = [each[key] for each in lists[0] if all(each[key] in items for items in by_key)]
    found = []
    for value in shared:
        same = [items[value] for items in by_key]
        if name in _WHOLE and any(each != same[0] for each in same):
            continue
        found.append({key: value, **common(same)})
    return found
