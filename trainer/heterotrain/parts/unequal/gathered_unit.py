"""Layers of which each rank of a member keeps a part of any size, and which the ranks gather to compute them.

The parameters of the layers lie in a row, and each rank keeps one stretch of that row, as long as its part of the
training state says. Before the layers run, each rank sends its stretch to all others; after their backward pass, it
sends the others their stretches of its gradient, and adds up what it gets for its own one. So nothing is padded: memory
is in proportion to a rank's part. ``torch.distributed.fsdp.fully_shard`` makes equal parts, and its collectives need
messages of the same size from all ranks.

The busiest rank sends or receives its part n − 1 times. A gathering may begin some time before the layers run, so that
its messages travel while other layers compute.

While they are not gathered, a layer has this rank's stretches in place of its parameters, flat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from heterotrain.errors import UsageError
from heterotrain.network.gloo.member_group import MemberGroup
from heterotrain.parts.unequal.part_messages import PartExchange, sum_of_parts
from heterotrain.state.ranges import TensorRange

Place = tuple[torch.nn.Module, str]
"""A layer, and its name for a parameter."""


@dataclass(slots=True, eq=False)
class ParameterSlot:
    """One parameter.

    Attributes:
        name: its first name in the whole model.
        places: where layers have it; several where it is tied.
        whole: the gathered parameter.
        part: this rank's elements, flat.
        own: which ones they are.
        offset: elements before it in its row.
    """

    name: str
    places: tuple[Place, ...]
    whole: torch.nn.Parameter
    part: torch.nn.Parameter
    own: TensorRange
    offset: int


@dataclass(slots=True, eq=False)
class FlatParameters:
    """Parameters of one format, one after the other.

    Attributes:
        slots: the parameters.
        edges: where each rank's stretch begins, and the number of elements.
        values: memory for all of them, released while they are not gathered.
        gradient: sums of this rank's gradients; ``None`` outside of backward passes.
    """

    slots: list[ParameterSlot]
    edges: tuple[int, ...]
    values: torch.Tensor
    gradient: torch.Tensor | None = None

    def stretches(self, of: torch.Tensor) -> list[torch.Tensor]:
        """Return each rank's stretch of a tensor as long as the row."""
        return [of[start:stop] for start, stop in pairwise(self.edges)]


def rows_of(
    slots: Mapping[str, Sequence[Place]],
    edges_of: Callable[[int], Sequence[int]],
    *,
    rank: int,
    device: torch.device,
    gather_dtype: torch.dtype | None,
) -> list[FlatParameters]:
    """Return the rows of some parameters, one for each format.

    Args:
        slots: the places of each parameter by its first name; layers have parameters without memory there.
        edges_of: returns where each rank's stretch of so many elements begins, and their number.
        rank: this rank in the member.
        device: of this rank.
        gather_dtype: format of gathered parameters; ``None`` for their own.
    """
    formats: dict[tuple[torch.dtype, bool], list[tuple[str, tuple[Place, ...], torch.nn.Parameter]]] = {}
    for name, places in slots.items():
        layer, own = places[0]
        found = layer._parameters[own]  # noqa: SLF001  # torch has no public way
        if found is not None:
            formats.setdefault((found.dtype, found.requires_grad), []).append((name, tuple(places), found))
    rows = []
    for (dtype, _), members in formats.items():
        total = sum(parameter.numel() for *_, parameter in members)
        edges = tuple(edges_of(total))
        kept_as = gather_dtype if gather_dtype is not None and dtype.is_floating_point else dtype
        values = torch.empty(total, dtype=kept_as, device=device)
        row, offset = FlatParameters([], edges, values), 0
        for name, places, parameter in members:
            size = parameter.numel()
            start, stop = (min(max(edge - offset, 0), size) for edge in edges[rank : rank + 2])
            row.slots.append(ParameterSlot(
                name=name, places=places, own=TensorRange(name, start, stop), offset=offset,
                whole=torch.nn.Parameter(
                    values[offset : offset + size].view(parameter.shape), requires_grad=parameter.requires_grad
                ),
                part=torch.nn.Parameter(
                    torch.full((), torch.nan, device=device).to(dtype).expand(stop - start),
                    requires_grad=parameter.requires_grad,
                ),
            ))  # fmt: skip
            offset += size
        values.untyped_storage().resize_(0)
        rows.append(row)
    return rows


@dataclass(slots=True, eq=False)
class GatheredUnit:
    """Layers that are gathered and released together.

    Attributes:
        rows: their parameters.
        group: the member's ranks.
        is_gathered: whether the layers have whole parameters now.
    """

    rows: list[FlatParameters]
    group: MemberGroup
    is_gathered: bool = False
    _watched: set[int] = field(default_factory=set)
    _used: set[int] = field(default_factory=set)
    _arriving: list[PartExchange] | None = None
    """Exchanges that have begun, for a unit that is not gathered yet."""

    def __post_init__(self) -> None:
        for slot in self.slots:
            self._put(slot, slot.part)

    @property
    def slots(self) -> list[ParameterSlot]:
        """All parameters."""
        return [slot for row in self.rows for slot in row.slots]

    @property
    def is_trained(self) -> bool:
        """Whether any parameter gets gradients."""
        return any(slot.part.requires_grad for slot in self.slots)

    def begin_gathering(self) -> None:
        """Begin to exchange parameters; ``gather`` ends it. Parts must not change in between.

        Raises:
            PeerLost: another rank of the member is lost or has left the pass.
        """
        if self.is_gathered or self._arriving is not None:
            return
        self._arriving = []
        for row in self.rows:
            values = row.values.data  # writing through .data leaves the version that autograd has recorded
            row.values.untyped_storage().resize_(values.nbytes)
            for slot in row.slots:
                begin = slot.offset + slot.own.start
                values[begin : begin + slot.own.elements].copy_(slot.part.detach())
            stretches = row.stretches(values)
            self._arriving.append(PartExchange(self.group, [stretches[self.group.rank()]] * len(stretches), stretches))

    def gather(self) -> None:
        """Give the layers whole parameters.

        Raises:
            PeerLost: another rank of the member is lost or has left the pass.
        """
        if self.is_gathered:
            return
        self.begin_gathering()
        for exchange in self._arriving or ():
            exchange.finish()
        self._arriving, self.is_gathered = None, True
        for slot in self.slots:
            self._watch(slot)
            self._put(slot, slot.whole)

    def release(self) -> None:
        """Give the layers this rank's stretches again, and free the memory of the rest.

        Raises:
            PeerLost: the unit was on its way, and another rank of the member is lost or has left the pass.
        """
        if self._arriving is not None:
            self.gather()  # messages would arrive in memory that is not there any more
        if not self.is_gathered:
            return
        self.is_gathered = False
        for slot in self.slots:
            self._put(slot, slot.part)
        for row in self.rows:
            row.values.untyped_storage().resize_(0)

    def begin_backward(self) -> None:
        """Gather, and make room for gradients.

        Raises:
            PeerLost: as in ``gather``.
        """
        self.gather()
        for row in self.rows:
            trained = [slot for slot in row.slots if slot.whole.requires_grad]
            if row.gradient is None and trained:
                row.gradient = torch.zeros_like(row.values)
                for slot in trained:
                    size = slot.whole.numel()
                    slot.whole.grad = row.gradient[slot.offset : slot.offset + size].view(slot.whole.shape)

    @property
    def is_open(self) -> bool:
        """Whether a backward pass has begun, whose gradients are not reduced yet."""
        return any(row.gradient is not None for row in self.rows)

    def reduce(self) -> None:
        """Release the layers, add up all ranks' gradients and keep this rank's stretch.

        Hooks on this rank's parts are called, as those on parameters after a gradient was added to them. A part without
        any gradient stays so: the reduction between members finds out which parameters no rank has used.

        Raises:
            PeerLost: as in ``gather``.
        """
        self.release()  # the sums take the memory of the parameters
        used, self._used = self._used, set()
        for row in self.rows:
            total, row.gradient = row.gradient, None
            if total is None:
                continue
            for slot in row.slots:
                slot.whole.grad = None
            total = total.to(row.slots[0].part.dtype)
            sums = sum_of_parts(self.group, row.stretches(total))
            begin_own = row.edges[self.group.rank()]
            for slot in row.slots:
                begin = slot.offset + slot.own.start - begin_own
                own = sums[begin : begin + slot.own.elements]
                if slot.own.elements and (id(slot) in used or own.any()):  # or another rank has used it
                    _add(slot.part, own)

    def check_ended(self) -> None:
        """Check that no gradient came after those of the unit were reduced.

        Raises:
            UsageError: one did.
        """
        for slot in self.slots:
            if id(slot) in self._used:
                raise UsageError(
                    f"the gradient of parameter {slot.name!r} came after those of its layer: use the parameters of a "
                    "layer in the list of layers in that layer alone"
                )

    def forget(self) -> None:
        """Leave a pass wherever it is; parts keep their values and gradients."""
        self._used.clear()
        for row in self.rows:
            row.gradient = None
            for slot in row.slots:
                slot.whole.grad = None
            if (
                self.is_gathered or self._arriving is not None
            ):  # messages may still arrive in this memory: it is freed when they are over
                row.values = torch.empty_like(row.values)
                for slot in row.slots:
                    size = slot.whole.numel()
                    slot.whole.data = row.values[slot.offset : slot.offset + size].view(slot.whole.shape)
        if self._arriving is not None:
            self._arriving, self.is_gathered = None, True
        self.release()

    def _put(self, slot: ParameterSlot, parameter: torch.nn.Parameter) -> None:
        for layer, own in slot.places:
            setattr(layer, own, parameter)  # recurrent layers have lists of their parameters, too

    def _watch(self, slot: ParameterSlot) -> None:
        """Freeze or thaw the whole parameter like this rank's part, and note when it has got a gradient."""
        slot.whole.requires_grad_(slot.part.requires_grad)
        key = id(slot)
        if slot.whole.requires_grad and key not in self._watched:
            self._watched.add(key)
            register: Any = slot.whole.register_post_accumulate_grad_hook
            register(lambda _parameter: self._used.add(key))


def _add(part: torch.nn.Parameter, sums: torch.Tensor) -> None:
    """Add to the gradient of a part, and call what waits for it."""
    if part.grad is None:
        part.grad = sums.clone()
    else:
        part.grad.add_(sums)
    hooks: Any = getattr(part, "_post_accumulate_grad_hooks", None) or {}
    for hook in list(hooks.values()):
        hook(part)
