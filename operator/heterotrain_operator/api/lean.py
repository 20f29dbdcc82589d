"""Less memory for models that are kept: one set of field names for all models that were given the same fields.

Pydantic notes in each model which fields it was given, in a set of its own. The specs and statuses of a thousand jobs
with ten workers would have 55,000 such sets: a third of their memory.
"""

from __future__ import annotations

from typing import TypeVar

from heterotrain_operator.api.schema import Model

MOST_SETS = 10_000
"""Sets that are shared; jobs have a few dozen different ones."""
_FIELDS_SET = "__pydantic_fields_set__"

_M = TypeVar("_M", bound=Model)
_shared: dict[frozenset[str], set[str]] = {}


def share_field_names(model: _M) -> _M:
    """Let the model, and all within it, share their sets of field names; models are frozen, so no set changes."""
    names = model.__pydantic_fields_set__
    shared = _shared.get(key := frozenset(names))
    if shared is None and len(_shared) < MOST_SETS:
        _shared[key] = names
    elif shared is not None:
        object.__setattr__(model, _FIELDS_SET, shared)
    for value in model.__dict__.values():
        if isinstance(value, Model):
            share_field_names(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], Model):
            for each in value:
                share_field_names(each)
    return model
