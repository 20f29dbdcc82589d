"""Reading values that another version wrote: what this version cannot read is left out, everything else is kept.

After a rollback, a status may hold longer texts and lists, other numbers and unknown fields. If it counted as empty, an
ended job would train again.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from heterotrain_operator.api.schema import Model

_M = TypeVar("_M", bound=Model)
_MOST_REPAIRS = 20
"""Each repair removes all values that are wrong at present, so the depth of the model bounds their number."""


def read_tolerantly(model: type[_M], raw: Any) -> _M:
    """Return the model with every field that can be read. Long texts and lists are cut, other wrong values left out."""
    if not isinstance(raw, Mapping):
        return model()
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        found, left = error, copy.deepcopy(dict(raw))
    for _ in range(_MOST_REPAIRS):
        # From the end of each list, so that removals do not move the others.
        repaired: set[tuple[int | str, ...]] = set()
        for problem in sorted(found.errors(), key=_order, reverse=True):
            # What is missing takes its container with it. An entry of a list goes once, whatever it lacks.
            path = problem["loc"][:-1] if problem["type"] == "missing" else problem["loc"]
            if path not in repaired:
                repaired.add(path)
                _repair(left, path, problem)
        try:
            return model.model_validate(left)
        except ValidationError as error:
            found = error
    return model()


def _order(problem: Mapping[str, Any]) -> list[str]:
    return [str(part).zfill(9) for part in problem["loc"]]


def _repair(body: dict[str, Any], path: Sequence[int | str], problem: Mapping[str, Any]) -> None:
    """Cut the value at a path, or remove it."""
    while path:
        parent = _at(body, path[:-1])
        key = path[-1]
        if isinstance(parent, dict) and key in parent:
            most = (problem.get("ctx") or {}).get("max_length")
            value = parent[key]
            if problem["type"] in ("string_too_long", "too_long") and isinstance(most, int):
                parent[key] = dict(list(value.items())[:most]) if isinstance(value, dict) else value[:most]
            else:
                del parent[key]
            return
        if isinstance(parent, list) and isinstance(key, int) and key < len(parent):
            del parent[key]
            return
        path = path[:-1]  # a part of the path that names no value, such as a branch of a union


def _at(body: Any, path: Sequence[int | str]) -> Any:
    for part in path:
        if isinstance(body, dict):
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            body = body[part]
        else:
            return None
    return body
