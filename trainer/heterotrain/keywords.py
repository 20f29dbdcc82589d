"""Names the keyword that a script has meant where it gives one that a function does not have."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

from heterotrain.errors import UsageError

_P = ParamSpec("_P")
_R = TypeVar("_R")
ELSEWHERE = {
    "batch_size": ("batch_samples",), "global_batch_size": ("batch_samples",), "num_epochs": ("epochs",),
    "max_epochs": ("epochs",), "max_steps": ("steps",), "num_workers": ("workers",), "collate_fn": ("collate",),
    "checkpoint_dir": ("checkpoint_uri",), "output_dir": ("checkpoint_uri",), "mixed_precision": ("precision",),
    "clip_grad_norm": ("clip_norm",), "max_norm": ("clip_norm",),
    "gradient_accumulation_steps": ("micro_batch_samples",),
}  # fmt: skip
"""What other libraries call it."""


def known_keywords(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the function, which refuses unknown keywords with the name that was meant."""
    names = [name for name in inspect.signature(function).parameters if name != "self"]

    @wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs:
            if name not in names:
                meant = [each for each in ELSEWHERE.get(name, ()) if each in names]
                meant = meant or get_close_matches(name, names, n=1)
                hint = f"did you mean {meant[0]}?" if meant else f"it has {', '.join(names)}"
                raise UsageError(f"{function.__qualname__} has no argument {name}: {hint}")
        return function(*args, **kwargs)

    return checked
