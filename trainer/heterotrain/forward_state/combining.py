"""Sums, extremes and first values of the tensors that the micro-batches of one pass leave behind.

Everything is one vector of numbers that ranks add up. The least and greatest values have a row for each rank in it,
with zeros in the rows of others. A sum with zeros is exact, so all ranks find the same extremes in the same message.
Counts stay in tensors, so nothing waits for an accelerator.

Legend: a flat vector holds the tensors of one rule, one after the other; W ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from heterotrain.forward_state.entries import ForwardTensor, rule_of, write
from heterotrain.forward_state.rules import Rule

COMBINED = (Rule.MEAN, Rule.SUM, Rule.LEADER, Rule.MIN, Rule.MAX)
"""The rules whose values travel, in their order."""
_NEUTRAL = {Rule.MIN: math.inf, Rule.MAX: -math.inf}
_HEAD = 2
"""Numbers before the vectors: the samples of all micro-batches, and whether the first micro-batch is among them."""


class RuleGroup:
    """The tensors under one rule, through one pass after the other."""

    def __init__(self, rule: Rule, entries: Sequence[ForwardTensor]) -> None:
        """Describe at least one tensor."""
        self.rule, self.entries = rule, entries
        tensors = [entry.tensor for entry in entries]
        self.dtype, self.device = _format(tensors), tensors[0].device
        self._is_complex = [tensor.is_complex() for tensor in tensors]
        self._is_simple = not any(self._is_complex) and len({tensor.device for tensor in tensors}) == 1
        self._integers = [not (tensor.is_floating_point() or tensor.is_complex()) for tensor in tensors]
        self.shapes = self._shapes_before = [tensor.shape for tensor in tensors]
        self._decays = torch.empty(0)
        self._before = self._base = torch.empty(0)
        self._found: torch.Tensor | None = None

    def begin(self, before: Sequence[torch.Tensor]) -> None:
        """Begin a pass that starts from these values."""
        self.shapes = self._shapes_before = [value.shape for value in before]
        self._found = None
        self._start_from(self._flat(before))

    def take(self, values: Sequence[torch.Tensor], samples: int, *, is_first: bool) -> None:
        """Take up the values after a micro-batch with this many samples; ``is_first``: it is the batch's first one."""
        if self.rule is Rule.LEADER and not is_first:
            return
        self.reshape([value.shape for value in values])
        now, found = self._flat(values), self._require()
        if self.rule is Rule.MEAN:
            found.add_(now.sub_(self._base), alpha=samples)
        elif self.rule is Rule.SUM:
            found.add_(now.sub_(self._base))
        elif self.rule is Rule.LEADER:
            found.copy_(now)
        else:
            extreme = torch.minimum if self.rule is Rule.MIN else torch.maximum
            extreme(found, now, out=found)

    def reshape(self, shapes: Sequence[torch.Size]) -> None:
        """Go on with other shapes: some layers give a tensor its shape in their first forward pass."""
        if shapes == self.shapes:
            return
        before, found = list(self._views(self._before)), list(self._views(self._require()))
        for place, shape in enumerate(shapes):
            if shape != self.shapes[place]:
                size = self._size(place, shape)
                before[place] = self._before.new_zeros(size)
                found[place] = self._before.new_full(size, _NEUTRAL.get(self.rule, 0.0))
        self.shapes = list(shapes)
        self._found = torch.cat([value.reshape(-1) for value in found])
        self._start_from(torch.cat([value.reshape(-1) for value in before]))

    def reshaped(self) -> Iterator[tuple[str, torch.Size]]:
        """Yield names and shapes of tensors whose shape has changed in this pass."""
        for entry, shape, before in zip(self.entries, self.shapes, self._shapes_before, strict=True):
            if shape != before:
                yield entry.name, shape

    def packed(self, rank: int, world_size: int) -> torch.Tensor:
        """Return this rank's part of the vector."""
        found = self._require()
        if self.rule not in _NEUTRAL:
            return found
        rows = found.new_zeros(world_size, found.numel())
        rows[rank] = found
        return rows.view(-1)

    def finish(self, total: torch.Tensor, counts: torch.Tensor, world_size: int) -> int:
        """Give the tensors the values that follow from all ranks; return the length of the vector used.

        Args:
            total: the sum over ranks, from this group's part on.
            counts: the numbers before all vectors.
            world_size: ranks.
        """
        size = self._before.numel()
        used = size * (world_size if self.rule in _NEUTRAL else 1)
        part, counts = total[:used].to(self._before), counts.to(self._before)
        if self.rule is Rule.MEAN:
            value = self._base + part / counts[0].clamp(min=1.0)
        elif self.rule is Rule.SUM:
            value = self._base + part
        elif self.rule is Rule.LEADER:
            value = part
        else:
            rows = part.view(world_size, size)
            value = rows.amin(0) if self.rule is Rule.MIN else rows.amax(0)
        value = torch.where(counts[1 if self.rule is Rule.LEADER else 0] > 0, value, self._before)
        write(self.entries, [
            torch.view_as_complex(own) if is_complex else own.round() if is_integer else own
            for own, is_complex, is_integer in zip(self._views(value), self._is_complex, self._integers, strict=True)
        ])  # fmt: skip
        return used

    def _require(self) -> torch.Tensor:
        if self._found is None:
            self._found = torch.full_like(self._before, _NEUTRAL.get(self.rule, 0.0))
        return self._found

    def _start_from(self, before: torch.Tensor) -> None:
        """Keep the values before the pass, and what is subtracted from each value and added once to the sum."""
        self._before = self._base = before
        if self.rule is Rule.MEAN:  # only finite numbers can be subtracted
            self._base = torch.nan_to_num(before, nan=0.0, posinf=0.0, neginf=0.0)
        elif self.rule is Rule.SUM:
            if self._decays.numel() != before.numel():
                self._decays = torch.cat([
                    torch.full_like(own.reshape(-1), rule_of(entry).decay)
                    for entry, own in zip(self.entries, self._views(before), strict=True)
                ])  # fmt: skip
            self._base = before * self._decays

    def _flat(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        if self._is_simple:
            return torch.cat([value.reshape(-1) for value in values]).to(self.dtype)
        return torch.cat([_real(value).reshape(-1).to(self.device, self.dtype) for value in values])

    def _views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the tensors' parts of a flat vector, each in its shape; a complex one has another dimension of 2."""
        start = 0
        for place, shape in enumerate(self.shapes):
            size = self._size(place, shape)
            yield flat[start : start + math.prod(size)].view(size)
            start += math.prod(size)

    def _size(self, place: int, shape: torch.Size) -> tuple[int, ...]:
        return (*shape, 2) if self._is_complex[place] else tuple(shape)


def groups_of(entries: Sequence[ForwardTensor]) -> list[RuleGroup]:
    """Return the groups of these tensors, in the order of their rules."""
    by_rule = {rule: [entry for entry in entries if rule_of(entry).rule is rule] for rule in COMBINED}
    return [RuleGroup(rule, own) for rule, own in by_rule.items() if own]


def packed(groups: Sequence[RuleGroup], samples: int, *, has_first: bool, rank: int, world_size: int) -> torch.Tensor:
    """Return the vector that the ranks add up."""
    parts = [group.packed(rank, world_size) for group in groups]
    dtype = torch.float32
    for part in parts:
        dtype = torch.promote_types(dtype, part.dtype)
    device = next((part.device for part in parts if not part.is_cpu), parts[0].device)
    head = torch.tensor([float(samples), float(has_first)], dtype=dtype, device=device)
    return torch.cat([head, *(part.to(device, dtype) for part in parts)])


def finish(groups: Sequence[RuleGroup], total: torch.Tensor, world_size: int) -> None:
    """Give all tensors the values that follow from the sum over ranks."""
    start = _HEAD
    for group in groups:
        start += group.finish(total[start:], total[:_HEAD], world_size)


def _format(values: Sequence[torch.Tensor]) -> torch.dtype:
    """Return a floating-point format that holds all of these values; integers up to 2^53."""
    dtype = torch.float32
    for value in values:
        own = _real(value)
        dtype = torch.promote_types(dtype, own.dtype if own.is_floating_point() else torch.float64)
    return dtype


def _real(value: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(value) if value.is_complex() else value.detach()
