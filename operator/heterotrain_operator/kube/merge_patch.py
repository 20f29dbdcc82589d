"""JSON merge patches (RFC 7386): what to send so that one JSON object becomes another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merge patch from one object to another; empty where they are equal.

    Lists are replaced as a whole. A value of ``None`` in ``after`` counts as absent, because a patch cannot set it.
    """
    patch: dict[str, Any] = {}
    for name in before.keys() | after.keys():
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            if inner := merge_patch(old, new):
                patch[name] = inner
        elif old != new or (name in before and new is None):
            patch[name] = new
    return patch
