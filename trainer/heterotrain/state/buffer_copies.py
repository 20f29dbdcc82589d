"""Copies of a model's buffers, renewed only for buffers that may have changed.

Causal masks and tables of positions are buffers that never change. Copying them in each step can take longer than the
optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

SMALL_BYTES = 16 * 1024
"""Up to this size, a copy costs no more than looking for changes."""
LOOKED_AT = 64
"""Elements that are compared, spread over the buffer: code that writes to ``buffer.data`` is not counted by torch."""


@dataclass(slots=True)
class _Copied:
    buffer: torch.Tensor
    version: int
    copy: torch.Tensor


class BufferCopies:
    """The buffers' values at the last ``renew``."""

    def __init__(self) -> None:
        self._of: dict[str, _Copied] = {}

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """The copies by the buffers' names."""
        return {name: copied.copy for name, copied in self._of.items()}

    def is_of(self, name: str, buffer: torch.Tensor) -> bool:
        """Return whether torch has counted no change of a buffer since it was copied."""
        copied = self._of.get(name)
        return copied is not None and copied.buffer is buffer and 0 <= copied.version == _version(buffer)

    def renew(self, buffers: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the buffers as they are now.

        A large buffer on the CPU is not copied again while torch counts no change of it and a few of its elements are
        the same. On an accelerator every buffer is copied: that is fast there, but comparing would wait for the device.
        """
        before, self._of = self._of, {}
        for name, buffer in buffers:
            copied = before.get(name)
            if copied is None or copied.buffer is not buffer or copied.copy.shape != buffer.shape:
                copied = _Copied(buffer, _version(buffer), buffer.detach().clone())
            elif not _is_unchanged(copied):
                copied.version = _version(buffer)
                copied.copy.copy_(buffer.detach())
            self._of[name] = copied

    def swap(self, other: BufferCopies) -> None:
        """Exchange the values with those of other copies."""
        self._of, other._of = other._of, self._of

    def restore(self, buffers: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write the copies back, also into a tensor that has taken a buffer's place; a new buffer keeps its values."""
        for name, buffer in buffers:
            copied = self._of.get(name)
            if copied is None:
                continue
            if copied.buffer is buffer and copied.copy.shape != buffer.shape:  # a layer has given it its shape
                buffer.resize_(copied.copy.shape)
            if copied.copy.shape == buffer.shape:
                buffer.copy_(copied.copy)


def _version(buffer: torch.Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version  # noqa: SLF001  # torch's own count of changes


def _is_unchanged(copied: _Copied) -> bool:
    buffer = copied.buffer
    if buffer.numel() * buffer.element_size() <= SMALL_BYTES or not buffer.is_cpu or not buffer.is_contiguous():
        return False
    if copied.version < 0 or copied.version != _version(buffer):
        return False
    stride = max(1, buffer.numel() // LOOKED_AT)
    return torch.equal(buffer.view(-1)[::stride], copied.copy.view(-1)[::stride])
