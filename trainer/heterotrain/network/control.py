"""The control vector, the one small all-gather of a step: all ranks derive the same decision from the rows of all.

It is started after the rank's own backward pass and waited for together with the last bucket. So it is also the vote:
a step is committed by all ranks or by none. Values that are known only after the reduction are sent one step late.

A row has four numbers of the step itself, and *columns*: whatever features have to agree on. A column is a name and a
reduction; the feature that registers it gives this rank's numbers. In most steps no column of any rank has changed.
Then the rows are equal as bytes to those before, and so is what follows from them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from heterotrain.network.mesh.mesh import pack_floats, unpack_floats

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Rows = Sequence[Sequence[float]]
"""The numbers of one column, by rank."""
_STEP = struct.Struct("=4d")
_COLUMNS = itemgetter(slice(_STEP.size, None))


@dataclass(frozen=True, slots=True, eq=False)
class Column(Generic[T_co]):
    """Something that all ranks agree on in a step.

    Attributes:
        name: of it.
        reduction: makes the same value on all ranks of each rank's numbers, by rank. Every rank has the same number of
            them, and every integer is below 2^53.
    """

    name: str
    reduction: Callable[[Rows], T_co]


class Agreed(dict[Column[Any], Any]):
    """What all ranks have agreed on, by column."""

    if TYPE_CHECKING:

        def __getitem__(self, column: Column[T], /) -> T:
            """Return the value of a column."""


def one(reduction: Callable[[list[float]], T]) -> Callable[[Rows], T]:
    """Return the reduction of a column with one number for each rank."""
    return lambda rows: reduction([row[0] for row in rows])


@dataclass(frozen=True, slots=True)
class StepDecision:
    """The decision that follows from all rows of a step.

    Attributes:
        committed: every rank finished its part of the same step.
        weights: samples or tokens of each rank in the group.
        weight: their sum.
        loss: weighted mean loss; ``None`` when no rank has samples, or when it is not finite.
        non_finite: ranks in the group with a loss that is not finite.
        agreed: what follows from the columns.
        apart: ranks have committed different numbers of steps, so that only a new formation can go on.
    """

    committed: bool
    weights: tuple[float, ...]
    weight: float
    loss: float | None
    non_finite: tuple[int, ...]
    agreed: Agreed
    apart: bool = False


class Tally:
    """Makes this rank's rows, and decisions of all ranks' rows."""

    def __init__(self, columns: Sequence[Column[Any]]) -> None:
        """Count votes with these columns, the same on every rank."""
        self._columns = columns
        self._values: list[Sequence[float]] | None = None
        self._packed = b""
        self._counted: tuple[list[bytes], Agreed] | None = None

    def row(self, ok: bool, steps: int, weight: float, loss_sum: float, values: list[Sequence[float]]) -> bytes:  # noqa: FBT001  # as many numbers
        """Return this rank's row.

        Args:
            ok: whether this rank finished its part of the step.
            steps: that this rank has committed: ranks that differ here must not add their gradients.
            weight: samples or tokens behind this rank's gradient.
            loss_sum: sum of the loss over them.
            values: this rank's numbers, by column.
        """
        if values != self._values:
            self._values, self._packed = values, pack_floats([*chain.from_iterable(values)])
        return _STEP.pack(ok, steps, weight, loss_sum) + self._packed

    def values(self, column: Column[Any], rows: Sequence[bytes]) -> Rows:
        """Return the numbers of one column in rows of the newest vote, by rank."""
        return self._split([*map(_COLUMNS, rows)])[column]

    def decide(self, rows: Sequence[bytes]) -> StepDecision:
        """Return what follows from all rows of the newest vote, by rank; the same on every rank."""
        numbers, stride = memoryview(b"".join(rows)).cast("d"), len(rows[0]) // 8
        oks, steps = numbers[::stride].tolist(), numbers[1::stride].tolist()
        weights, loss_sums = numbers[2::stride].tolist(), numbers[3::stride].tolist()
        rest = [*map(_COLUMNS, rows)]
        if self._counted is None or rest != self._counted[0]:
            agreed = Agreed({column: column.reduction(found) for column, found in self._split(rest).items()})
            self._counted = rest, agreed
        weight = math.fsum(weights)
        loss, non_finite = _mean_loss(loss_sums, weights, weight)
        apart = steps.count(steps[0]) != len(steps)
        committed = min(oks) == 1.0 and not apart
        return StepDecision(committed, tuple(weights), weight, loss, non_finite, self._counted[1], apart)

    def _split(self, rest: Sequence[bytes]) -> Mapping[Column[Any], Rows]:
        """Return the numbers of each column, by rank."""
        numbers, found, start = [unpack_floats(row) for row in rest], {}, 0
        for column, own in zip(self._columns, self._values or (), strict=True):
            found[column] = [row[start : start + len(own)] for row in numbers]
            start += len(own)
        return found


def _mean_loss(
    loss_sums: Sequence[float], weights: Sequence[float], weight: float
) -> tuple[float | None, tuple[int, ...]]:
    """Return the weighted mean loss, and the ranks whose loss is not finite; a rank without weight has none."""
    if min(weights) > 0.0 and math.isfinite(sum(loss_sums)):  # so each of them is
        return math.fsum(loss_sums) / weight, ()
    counted = [rank for rank, own in enumerate(weights) if own > 0]
    non_finite = tuple([rank for rank in counted if not math.isfinite(loss_sums[rank])])
    if not counted or non_finite:
        return None, non_finite
    try:
        return math.fsum([loss_sums[rank] for rank in counted]) / weight, ()
    except OverflowError:  # finite losses whose sum is too large for float64
        return None, tuple(counted)
