"""Finds tensors that change in forward passes although no rule covers them.

Until a first pass with samples has ended, after each micro-batch: the tensor is then put back like all others. Later,
once a pass. A tensor that was written to counts as changed even if it has the same values: a momentum encoder that
starts as a copy has them in its first step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from heterotrain.errors import UsageError
from heterotrain.forward_state.entries import ForwardTensor, write
from heterotrain.state.buffer_copies import SMALL_BYTES, BufferCopies


class Watch:
    """The tensors without a rule.

    Attributes:
        entries: the tensors.
        looks: whether values are compared after each micro-batch.
        changed: those that have changed in this pass by name, each with its value after this rank's first micro-batch.
    """

    def __init__(
        self, entries: Sequence[ForwardTensor], copies: BufferCopies, *, most_bytes: int = 0, looks: bool = True
    ) -> None:
        """Watch tensors.

        Args:
            entries: the tensors.
            copies: their values before the step, as far as they are kept.
            most_bytes: frozen parameters of more bytes are not copied. The trained parameters' own size is there at the
                start, because their gradients take as much.
            looks: whether no pass with samples has ended yet.
        """
        self.entries = entries
        self.looks = looks
        self.changed: dict[str, torch.Tensor] = {}
        self._copies = copies
        self._kept: dict[str, torch.Tensor] = {}
        self._began: list[tuple[torch.Tensor, int]] = []
        self._may_copy = sum(entry.tensor.nbytes for entry in entries if entry.is_frozen) <= most_bytes

    @property
    def copied(self) -> Sequence[ForwardTensor]:
        """The tensors of which copies are needed; buffers always have them."""
        return self.entries if self.looks and self._may_copy else ()

    def begin(self) -> None:
        """Begin a pass."""
        self.changed.clear()
        self._began = [(tensor := entry.place[entry.key], tensor._version) for entry in self.entries]  # noqa: SLF001  # torch's own count of changes
        self._kept = self._copies.values if self.entries else {}
        for entry, (tensor, _) in zip(self.entries, self._began, strict=True):
            before = self._kept.get(entry.name)
            if before is None:
                continue
            # The script or an earlier pass of the step may have changed it since: a network that is trained, then
            # frozen, or a temperature.
            is_older = not self._copies.is_of(entry.name, tensor)
            if is_older or (self.looks and tensor.nbytes <= SMALL_BYTES and not _is_equal(tensor, before)):
                self._kept[entry.name] = tensor.detach().clone()

    def look(self, *, is_first: bool) -> None:
        """Look at the tensors after a micro-batch; ``is_first``: it is the batch's first one."""
        if not (self.looks and self.entries):
            return
        for entry, is_touched in self._touched():
            before = self._kept.get(entry.name)
            # Torch counts no writes to .data, so small buffers are compared as well.
            is_small = before is not None and entry.tensor.nbytes <= SMALL_BYTES
            if is_touched or (is_small and not _is_equal(entry.tensor, before)):
                self._note(entry, entry.tensor if is_first or before is None else before, replaces=is_first)

    def put_back(self) -> None:
        """Let the next micro-batch start from the values before the pass."""
        if not self.changed:
            return
        for entry in self.entries:
            if entry.name in self.changed and entry.name in self._kept:
                write([entry], [self._kept[entry.name]])

    def has_changed(self) -> bool:
        """Return whether a tensor has changed in this pass."""
        if self.entries and not self.looks:
            for entry, is_touched in self._touched():
                if is_touched:
                    self._note(entry, entry.tensor)
        return bool(self.changed)

    def adopt(self, names: Collection[str]) -> list[tuple[ForwardTensor, torch.Tensor, torch.Tensor]]:
        """Return the tensors with these names, their values before the pass and after this rank's first micro-batch."""
        found = []
        for entry in self.entries:
            if entry.name in names:
                before = self._kept.get(entry.name, entry.tensor).detach().clone()
                found.append((entry, before, self.changed.get(entry.name, before)))
        return found

    def _touched(self) -> Iterator[tuple[ForwardTensor, bool]]:
        for entry, (tensor, version) in zip(self.entries, self._began, strict=True):
            now = entry.tensor
            if now is tensor:
                yield entry, tensor._version != version  # noqa: SLF001  # as in begin
            else:  # some layers make the same table again
                yield entry, not _is_equal(now, tensor)

    def _note(self, entry: ForwardTensor, value: torch.Tensor, *, replaces: bool = False) -> None:
        """Note a change.

        Raises:
            UsageError: there is no copy of its earlier values, and it would take too much memory.
        """
        if entry.is_frozen and not self._may_copy:
            raise UsageError(
                f"the frozen parameter {entry.name!r} changes in forward passes, and the frozen parameters are too "
                f"large to be copied in search of such changes: call job.buffers({entry.name!r}, 'leader') after "
                "job.wrap, so that every micro-batch starts from the same values; 'own' leaves it alone"
            )
        if replaces or entry.name not in self.changed:  # a sample with weight zero may have come before
            self.changed[entry.name] = value.detach().clone()


def _is_equal(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Return whether two tensors have the same values; NaN is the same as NaN."""
    if other is None or one.shape != other.shape:
        return False
    if one.is_floating_point() or one.is_complex():
        return bool(torch.isclose(one, other, rtol=0.0, atol=0.0, equal_nan=True).all())
    return torch.equal(one, other)
