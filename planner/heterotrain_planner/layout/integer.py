"""Members out of devices: the integer programme over all templates, by branch and bound on its linear relaxation.

    maximise  Σ value_j x_j   subject to   Σ need_kj x_j ≤ devices_k,  Σ x_j ≥ least,  x whole

Each node fixes some members and forbids some templates, so its relaxation has the form of the root's.

Devices are not all that members use up: needs may have further columns.

Legend: ``J`` templates, ``K`` kinds of devices and other needs.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from heterotrain_planner.layout.costs import Floats, Ints
from heterotrain_planner.layout.simplex import Optimum, maximise

MOST_NODES = 60
"""Nodes of one search: about a twentieth of a second."""
_TOLERANCE = 1e-9
_WHOLE = 1e-7
"""Distance from a whole number that counts as rounding."""


class Chosen(NamedTuple):
    """A set of members.

    Attributes:
        value: sum of values; −1 where no set was found.
        amounts: members by template.
        bound: no set has a larger value.
    """

    value: float
    amounts: Mapping[int, int]
    bound: float


def choose(
    value_J: Floats,
    need_JK: Ints,
    devices_K: Ints,
    *,
    least: int = 0,
    wanted: float = np.inf,
    most_nodes: int = MOST_NODES,
) -> Chosen:
    """Return members with the largest value.

    The search ends when the best set is proved, when it reaches ``wanted``, when no set can reach ``wanted``, or after
    ``most_nodes``.
    """
    search = _Search(value_J, need_JK, least)
    every = np.flatnonzero((need_JK <= devices_K).all(axis=1))
    root = search.relaxed(devices_K, every, 0)
    if root is None:
        return Chosen(-1.0, {}, -1.0)
    search.consider(Counter(), devices_K, root)
    # A template that loses more than what separates the bound from the goal is in no set that reaches the goal.
    goal = max(search.value, wanted if np.isfinite(wanted) else search.value)
    reaches = root.value >= goal * (1 - _TOLERANCE)  # rounding may leave the root just below the goal
    near = every[root.loss_J <= (root.value - goal) + _TOLERANCE * abs(goal)] if reaches else every[:0]
    counter = itertools.count()
    nodes = [(-root.value, next(counter), Counter[int](), devices_K, near, root)]
    bound = root.value
    for _ in range(most_nodes):
        bound = -nodes[0][0] if nodes else search.value
        if (
            bound <= search.value * (1 + _TOLERANCE)
            or search.value >= wanted
            or bound < wanted * (1 - _TOLERANCE) < np.inf
        ):
            break
        _, _, taken, left_K, allowed_J, found = heapq.heappop(nodes)
        search.consider(taken, left_K, found)
        fraction = found.amounts - np.floor(found.amounts + _WHOLE)
        if not len(fraction) or fraction.max() <= 2 * _WHOLE:  # nothing below a whole solution is better
            continue
        column = int(found.columns[int(np.argmax(fraction))])
        # Either one more of this template, or no more of it.
        for more in (1, 0):
            then = taken + Counter({column: more})
            left = left_K - more * need_JK[column]
            rest = allowed_J if more else allowed_J[allowed_J != column]
            rest = rest[(need_JK[rest] <= left).all(axis=1)]
            child = search.relaxed(left, rest, then.total())
            if child is not None:
                value = child.value + search.sum_of(then)
                goal = max(search.value, wanted if np.isfinite(wanted) else search.value)
                if value >= goal * (1 - _TOLERANCE):
                    rest = rest[child.loss_J <= (value - goal) + _TOLERANCE * abs(goal)]
                heapq.heappush(nodes, (-value, next(counter), then, left, rest, child))
    return Chosen(search.value, search.amounts, max(bound, search.value))


class _Search:
    """The best set of members so far, and what each node of the search computes."""

    def __init__(self, value_J: Floats, need_JK: Ints, least: int) -> None:
        self.value = -1.0
        self.amounts: Mapping[int, int] = {}
        self._value_J = value_J
        self._need_JK = need_JK
        self._need_KJ = need_JK.T.astype(float)
        self._least = least

    def relaxed(self, left_K: Ints, allowed_J: Ints, members: int) -> Optimum | None:
        """Return the relaxation for the devices that are left, after so many members, out of templates that fit."""
        limit = left_K.astype(float)
        found = maximise(self._value_J[allowed_J], self._need_KJ[:, allowed_J], limit, least=self._least - members)
        return None if found is None else found._replace(columns=allowed_J[found.columns])

    def sum_of(self, amounts: Mapping[int, int]) -> float:
        """Return the value of members by template."""
        return float(sum(self._value_J[column] * number for column, number in amounts.items()))

    def consider(self, taken: Counter[int], left_K: Ints, found: Optimum) -> None:
        """Round a relaxed solution down, fill up with further members, and keep the result if it is the best."""
        amounts = taken.copy()
        left = left_K
        for column, amount in zip(found.columns.tolist(), found.amounts.tolist(), strict=True):
            if whole := int(amount + _WHOLE):
                amounts[column] += whole
                left = left - whole * self._need_JK[column]
        if (left < 0).any():
            return
        for column, number in _greedy(self._value_J, self._need_JK, left):
            amounts[column] += number
        value = self.sum_of(amounts)
        if value > self.value and sum(amounts.values()) >= self._least:
            self.value, self.amounts = value, dict(amounts)


def _greedy(value_J: Floats, need_JK: Ints, left_K: Ints) -> list[tuple[int, int]]:
    """Return further members for the devices that are left, the most valuable first."""
    found = []
    fits = np.flatnonzero((need_JK <= left_K).all(axis=1) & (value_J > 0))
    while len(fits):
        column = int(fits[np.argmax(value_J[fits])])
        need = need_JK[column]
        number = int((left_K[need > 0] // need[need > 0]).min())
        found.append((column, number))
        left_K = left_K - number * need
        fits = fits[(need_JK[fits] <= left_K).all(axis=1)]
    return found
