"""Less memory for what is kept: equal parts of many objects are one.

Pydantic notes in each model which fields it was given, in a set of its own. The specs and statuses of a thousand jobs
with ten workers would have 55,000 such sets: a third of their memory. And each answer of the API server brings new
strings for the same few reasons, states, pools, nodes and times: half of the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TypeVar

from heterotrain_operator.api.schema import Model

MOST_SETS = 10_000
"""Sets that are shared; jobs have a few dozen different ones."""
MOST_AMOUNTS = 10_000
"""Resource lists that are shared; the workers of a pool have the same."""
MOST_CHARACTERS = 128
"""Characters of a string that is shared; longer ones are sentences, of which few are equal."""
_FIELDS_SET = "__pydantic_fields_set__"

_M = TypeVar("_M", bound=Model)
_shared: dict[frozenset[str], set[str]] = {}
_amounts: dict[tuple[tuple[str, float], ...], Mapping[str, float]] = {}


def share_parts(model: _M) -> _M:
    """Let the model, and all within it, share sets of field names and strings; models are frozen, so none changes."""
    names = model.__pydantic_fields_set__
    shared = _shared.get(key := frozenset(names))
    if shared is None and len(_shared) < MOST_SETS:
        _shared[key] = names
    elif shared is not None:
        object.__setattr__(model, _FIELDS_SET, shared)
    values = model.__dict__
    for name, value in values.items():
        if type(value) is str:
            values[name] = share_text(value)
        elif isinstance(value, Model):
            share_parts(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], Model):
            for each in value:
                share_parts(each)
    return model


def share_text(text: str) -> str:
    """Return the one string of this text that is kept; it is freed with its last user."""
    return sys.intern(text) if type(text) is str and len(text) <= MOST_CHARACTERS else text


def share_amounts(found: Mapping[str, float]) -> Mapping[str, float]:
    """Return the one resource list with these amounts, which nobody may change."""
    key = tuple(found.items())
    shared = _amounts.get(key)
    if shared is None:
        shared = {share_text(name): amount for name, amount in found.items()}
        if len(_amounts) < MOST_AMOUNTS:
            _amounts[key] = shared
    return shared
