"""A linear programme with few rows and many columns, by the revised simplex method.

The rows are the kinds of devices and the least number of members, so a basis is a tiny matrix. It is inverted in every
iteration, and one product with all columns prices them.

Legend: ``R`` rows, ``J`` columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from heterotrain_planner.layout.costs import Floats, Ints

_TOLERANCE = 1e-9
"""Of reduced values and directions, relative to columns whose largest value is 1."""
_MOST_ITERATIONS = 2000
_STALLED = 40
"""Iterations without progress after which the first possible column enters, which cannot cycle (Bland 1977)."""


class Optimum(NamedTuple):
    """The best solution of a linear programme.

    Attributes:
        value: largest sum of values.
        columns: indices of the columns in use.
        amounts: of each of them, above 0.
        loss_J: how much the value falls, at least, for each whole amount of a column that is used.
        basis: columns of the last basis, for a programme with other values.
    """

    value: float
    columns: Ints
    amounts: Floats
    loss_J: Floats
    basis: tuple[int, ...] = ()


def maximise(
    value_J: Floats, need_RJ: Floats, limit_R: Floats, *, least: int = 0, start: Sequence[int] = ()
) -> Optimum | None:
    """Return the largest ``Σ value x`` with ``need x ≤ limit``, ``Σ x ≥ least`` and x ≥ 0; ``None`` if there is none.

    Each column has to need something, so that the programme is bounded. ``limit_R`` may not be negative.

    Args:
        value_J: of the columns.
        need_RJ: by row and column.
        limit_R: by row.
        least: sum of all amounts, at least.
        start: basis of an optimum with the same needs and limits, to start from; values may differ.
    """
    size = len(value_J)
    rows = len(limit_R)
    if size == 0:
        return None if least > 0 else Optimum(0.0, np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0))
    scale = float(np.max(np.abs(value_J))) or 1.0
    if least <= 0:
        matrix = np.hstack([need_RJ, np.eye(rows)])
        cost = np.concatenate([value_J / scale, np.zeros(rows)])
        slack = list(range(size, size + rows))
        basis, amounts, reduced = _iterate(matrix, cost, limit_R, _feasible(matrix, limit_R, start) or slack)
    else:
        count = np.concatenate([np.ones(size), np.zeros(rows), [-1.0, 1.0]])  # surplus, then artificial
        matrix = np.vstack([np.hstack([need_RJ, np.eye(rows), np.zeros((rows, 2))]), count])
        limit = np.append(limit_R, float(least))
        cost = np.concatenate([value_J / scale, np.zeros(rows + 2)])
        artificial = size + rows + 1
        begin = _feasible(matrix, limit, start) or _any_basis(matrix, limit, artificial, least)
        if begin is None:
            return None
        basis, amounts, reduced = _iterate(matrix[:, :artificial], cost[:artificial], limit, begin)
    used = [
        (column, amount) for column, amount in zip(basis, amounts, strict=True) if column < size and amount > _TOLERANCE
    ]
    columns = np.array([column for column, _ in used], dtype=np.int64)
    amount_J = np.array([amount for _, amount in used])
    value = float(value_J[columns] @ amount_J) if used else 0.0
    return Optimum(value, columns, amount_J, np.maximum(0.0, -scale * reduced[:size]), tuple(basis))


def _feasible(matrix: Floats, limit: Floats, basis: Sequence[int]) -> list[int] | None:
    """Return a basis if it is a basis of this matrix with amounts that are not negative."""
    if len(basis) != len(limit) or max(basis) >= matrix.shape[1]:
        return None
    try:
        amounts = np.linalg.solve(matrix[:, list(basis)], limit)
    except np.linalg.LinAlgError:
        return None
    return list(basis) if (amounts >= 0).all() else None


def _any_basis(matrix: Floats, limit: Floats, artificial: int, least: int) -> list[int] | None:
    """Return a basis with ``least`` members, ``None`` where there is none: the artificial column is driven out."""
    start = [*range(artificial - len(limit), artificial - 1), artificial]
    basis, amounts, _ = _iterate(matrix, -(np.arange(artificial + 1) == artificial).astype(float), limit, start)
    if any(column == artificial and amount > _TOLERANCE * least for column, amount in zip(basis, amounts, strict=True)):
        return None
    # The artificial column may be left in the basis at zero. The surplus column, its negative, takes its place.
    return [artificial - 1 if column == artificial else column for column in basis]


def _iterate(matrix: Floats, cost: Floats, limit: Floats, basis: list[int]) -> tuple[list[int], Floats, Floats]:
    """Improve a feasible basis until no column promises more."""
    best, stalled = -np.inf, 0
    amounts, reduced = limit, cost
    for _ in range(_MOST_ITERATIONS):
        inverse = np.linalg.inv(matrix[:, basis])
        amounts = np.maximum(inverse @ limit, 0.0)
        value = float(cost[basis] @ amounts)
        stalled = 0 if value > best + _TOLERANCE else stalled + 1
        best = max(best, value)
        reduced = cost - (cost[basis] @ inverse) @ matrix
        reduced[basis] = 0.0
        entering = int(np.argmax(reduced > _TOLERANCE)) if stalled > _STALLED else int(np.argmax(reduced))
        if reduced[entering] <= _TOLERANCE:
            break
        direction = inverse @ matrix[:, entering]
        rows = np.flatnonzero(direction > _TOLERANCE)
        if not len(rows):
            break
        ratios = amounts[rows] / direction[rows]
        tied = rows[ratios <= ratios.min() + 1e-12]
        leaving = min(tied.tolist(), key=lambda row: basis[row])
        basis = [entering if row == leaving else column for row, column in enumerate(basis)]
    return basis, amounts, reduced
