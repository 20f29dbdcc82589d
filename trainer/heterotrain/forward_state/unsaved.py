"""Finds what forward passes change besides parameters and persistent buffers: it is in no state, and no rule covers it.

Counts of forward passes, moving means in plain attributes and non-persistent buffers follow micro-batches and samples
of their own rank, and a rank that joins begins without them. Caches change once and then stay, so only what changes in
two passes with samples is reported, once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

_log = logging.getLogger(__name__)

LOOKS = 4
"""Micro-batches that are looked at."""
CHANGES = 2
SMALL = 1 << 20
"""Elements of a tensor that is compared by value; a larger one counts as changed if it was written to or replaced."""
MOST_NAMED = 4


class Unsaved:
    """Numbers and tensors of a model's layers outside its state.

    Attributes:
        looks: micro-batches that have been looked at; none is after ``LOOKS``.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.looks = 0
        self._before: dict[str, tuple[Any, int, Any]] = {}
        self._changes: dict[str, int] = {}
        self._divides = False

    def begin(self) -> None:
        """Note the values before a pass."""
        self._before = dict(self._values())

    def look(self, *, divides: bool) -> None:
        """Look at the values after a micro-batch with samples; ``divides``: others, or other ranks, have their own."""
        self._divides = self._divides or divides
        self.looks += 1
        now = dict(self._values())
        for name in now.keys() & self._before.keys():
            if _differs(self._before[name], now[name]):
                self._changes[name] = self._changes.get(name, 0) + 1
        self._before = now
        found = sorted(name for name, count in self._changes.items() if count >= CHANGES)
        if found and self._divides:
            self.looks = LOOKS
            more = f" and {len(found) - MOST_NAMED} more" if found[MOST_NAMED:] else ""
            _log.warning(
                "%s%s changed in forward passes, but neither checkpoints nor joining ranks get it, and ranks and "
                "micro-batches have values of their own. If a later forward pass reads it, make it a buffer "
                "(register_buffer) and call job.buffers(name, rule) after job.wrap",
                ", ".join(found[:MOST_NAMED]), more,
            )  # fmt: skip

    def _values(self) -> Iterator[tuple[str, tuple[Any, int, Any]]]:
        """Yield each value by name, with its count of changes, and a copy if it is small."""
        for prefix, layer in self._model.named_modules():
            hidden = {key: layer._buffers[key] for key in layer._non_persistent_buffers_set}  # noqa: SLF001  # torch has no public name
            for key, value in (*vars(layer).items(), *hidden.items()):
                name = f"{prefix}.{key}" if prefix else key
                if isinstance(value, torch.Tensor):
                    if not (value.requires_grad or value.is_meta or value.is_inference()):
                        kept = value.detach().clone() if value.numel() <= SMALL else None
                        yield name, (value, value._version, kept)  # noqa: SLF001  # torch's own count of changes
                elif isinstance(value, int | float) and not isinstance(value, bool):
                    yield name, (value, 0, None)


def _differs(before: tuple[Any, int, Any], now: tuple[Any, int, Any]) -> bool:
    """Return whether a value is another one."""
    if not isinstance(now[0], torch.Tensor) or not isinstance(before[0], torch.Tensor):
        return bool(type(now[0]) is type(before[0]) and now[0] != before[0])
    if before[2] is None or now[2] is None:
        return before[0] is not now[0] or before[1] != now[1]
    return before[2].shape != now[2].shape or not torch.equal(before[2], now[2])
