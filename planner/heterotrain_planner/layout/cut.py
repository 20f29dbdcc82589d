"""The best pipeline on given devices for a given number of micro-batches: order of kinds, and cuts.

    minimise  Σ busy + (n − 1) · max busy       over all orders and cuts that fit in memory

``reach`` minimises either term. With a limit on the other one, it gives the least sum S(τ) of pipelines whose stages
take at most τ, and S falls with τ. So no pipeline with a slowest stage between two levels τ_1 < τ_2 takes less than
``S(τ_2) + (n − 1) τ_1``. Intervals of τ are halved until this bound leaves nothing to gain.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from heterotrain_core.contract.plan import LayoutKind

from heterotrain_planner.layout.best_pipelines import Least, best_pipelines, trace
from heterotrain_planner.layout.costs import Costs
from heterotrain_planner.layout.family import Multisets, parts_of
from heterotrain_planner.layout.problem import Problem
from heterotrain_planner.layout.result import DeviceLayout, PlannedStage

CLOSE = 5e-4
"""Gap at which the search for a better pipeline ends."""
_ROUNDING = 1e-9
MOST_WORK = 20_000_000
"""Steps of all passes for one cut, about: a tenth of a second. Four passes are made however long each one takes."""

NEAR = 1.1
"""Share of a finalist over the shortest one by the formula, at most."""
MOST_FINALISTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A pipeline on the devices of one member.

    Attributes:
        stages: (index of the kind, first edge, end edge), in the order of computation.
        fill_s: seconds of all stages together.
        slowest_s: seconds of the slowest stage.
    """

    stages: tuple[tuple[int, int, int], ...]
    fill_s: float
    slowest_s: float

    def share_s(self, micro_batches: int) -> float:
        """Return the seconds of a share by the formula."""
        return self.fill_s + (micro_batches - 1) * self.slowest_s


def cut(costs: Costs, devices: Sequence[int], micro_batches: int, *, tolerance: float = CLOSE) -> Cut | None:
    """Return the pipeline with the shortest share on exactly these devices, ``None`` when none fits in memory."""
    found = finalists(costs, devices, micro_batches, tolerance=tolerance)
    return found[0] if found else None


def finalists(costs: Costs, devices: Sequence[int], micro_batches: int, *, tolerance: float = CLOSE) -> tuple[Cut, ...]:
    """Return good pipelines on exactly these devices, the one with the shortest share by the formula first.

    Args:
        costs: of one size of micro-batch.
        devices: by kind.
        micro_batches: of the share, at least 1.
        tolerance: gap at which the search ends, unless the effort is spent before.
    """
    search = _LevelSearch(costs, devices, micro_batches, tolerance)
    if search.best is None:
        return ()
    search.run()
    own_s = search.best.share_s(micro_batches)
    different = {each.stages: each for each in search.seen if each.share_s(micro_batches) <= own_s * NEAR}
    return tuple(sorted(different.values(), key=lambda each: each.share_s(micro_batches))[:MOST_FINALISTS])


class _LevelSearch:
    """Halves intervals of the slowest stage's time until none of them can hold a shorter share.

    Attributes:
        best: the pipeline with the shortest share; ``None`` when none fits in memory.
        seen: all that were found.
    """

    def __init__(self, costs: Costs, devices: Sequence[int], micro_batches: int, tolerance: float) -> None:
        self._costs, self._family = costs, parts_of(devices)
        self._used = [kind for kind, count in enumerate(devices) if count]
        self._micro_batches, self._tolerance = micro_batches, tolerance
        self._open: list[tuple[float, float, float, float]] = []
        """Intervals (bound, low, high, least sum up to high): nothing inside is shorter than the bound."""
        self.best = self._within(math.inf, Least.SLOWEST)
        self.seen = [] if self.best is None else [self.best]

    def run(self) -> None:
        """Search from the least possible slowest stage up to the whole model on one device."""
        costs = self._costs
        low_s = self.seen[0].slowest_s
        self._try(low_s)
        # Each unit takes at least as long as on the fastest of the kinds.
        least_s = float(np.min([np.diff(costs.compute_E(kind)) for kind in self._used], axis=0).sum())
        whole_s = float(max(costs.compute_E(kind)[-1] + costs.again_KE[kind, -1] for kind in self._used)) + 2 * float(
            costs.receive_CE.max()
        )
        self._push(low_s, whole_s, least_s)
        classes, edges = costs.receive_CE.shape
        steps = int((self._family.counts_UK > 0).sum()) * classes * classes * edges * edges // 2
        more = self._micro_batches - 1
        for trial in range(max(2, min(32, MOST_WORK // max(1, steps)))):
            if not self._open:
                break
            _, low, high, sum_s = heapq.heappop(self._open)
            if more:  # beyond this level, even the least sum is too long; the best may beat the whole range
                high = max(low, min(high, (self._shortest_s() - sum_s) / more))
            middle = high if trial == 0 else (low + high) / 2
            found = self._try(middle)
            self._push(low, min(middle, found.slowest_s), found.fill_s)
            self._push(middle, high, sum_s)

    def _try(self, level_s: float) -> Cut:
        """Return the pipeline with the least sum whose stages take at most so long, and keep it."""
        found = self._within(level_s, Least.FILL)
        assert found is not None, "the level is not below the least one"  # noqa: S101  # which has a pipeline
        self.seen.append(found)
        self.best = min(self.best or found, found, key=lambda each: each.share_s(self._micro_batches))
        return found

    def _within(self, level_s: float, least: Least) -> Cut | None:
        found = best_pipelines(self._costs, self._family, least=least, level_s=level_s, keep=True)
        if not math.isfinite(found.slowest_U[-1]):
            return None
        stages = tuple(trace(self._costs, self._family, found, least=least, level_s=level_s))
        fill_s, slowest_s = float(found.fill_U[-1]), float(found.slowest_U[-1])
        return Cut(stages=stages, fill_s=fill_s, slowest_s=slowest_s)

    def _push(self, low: float, high: float, sum_s: float) -> None:
        bound = sum_s + (self._micro_batches - 1) * low
        if bound < self._shortest_s() * (1 - self._tolerance) and high > low * (1 + _ROUNDING):
            heapq.heappush(self._open, (bound, low, high, sum_s))

    def _shortest_s(self) -> float:
        return math.inf if self.best is None else self.best.share_s(self._micro_batches)


def slowest_with_room(costs: Costs, devices: Sequence[int]) -> float:
    """Return the seconds of the slowest stage of the best pipeline if memory were no limit."""
    family = parts_of(devices)
    found = best_pipelines(replace(costs, memory_K=np.full_like(costs.memory_K, np.inf)), family)
    return float(found.slowest_U[-1])


def layout_of(problem: Problem, costs: Costs, stages: Sequence[tuple[int, int, int]]) -> DeviceLayout:
    """Return the stages of a cut with their seconds and bytes."""
    kinds = [kind for kind, _, _ in stages]
    last = len(stages) - 1
    found = []
    for index, (kind, edge, end) in enumerate(stages):
        before = costs.class_KK[kinds[index - 1], kind] if index else 0
        behind = costs.class_KK[kind, kinds[index + 1]] if index < last else 0
        kept = costs.kept(last - index + 1)
        again = end > costs.plain_ends(kind, last - index + 1)[edge]
        state = costs.state_E[end] - costs.state_E[edge] + (costs.working_EE[edge, end] if again else 0.0)
        kept_E = costs.kept_E if again else costs.activation_E
        backward_E = costs.backward_KE[kind] + (costs.again_KE[kind] if again else 0.0)
        found.append(
            PlannedStage(
                kind=problem.kinds[kind].name,
                first_unit=int(costs.unit_E[edge]),
                last_unit=int(costs.unit_E[end]) - 1,
                forward_s=float(costs.forward_KE[kind, end] - costs.forward_KE[kind, edge]),
                backward_s=float(backward_E[end] - backward_E[edge]),
                input_s=float(costs.receive_CE[before, edge]),
                gradient_s=float(costs.receive_CE[behind, end]),
                memory_bytes=math.ceil(state + kept * (kept_E[end] - kept_E[edge])),
                recomputes=bool(again),
            )
        )
    return DeviceLayout(kind=LayoutKind.PIPELINE if last else LayoutKind.REPLICATED, stages=tuple(found))


def memory_reach(costs: Costs, family: Multisets) -> list[int]:
    """Return for each multiset the most groups of units, counted from the end, that its devices can hold.

    Holding fewer units never takes more memory. So the front stage of the best arrangement may start where the best
    one of the others ends, and one number for each multiset is enough.
    """
    last = len(costs.unit_E) - 1
    # ``starts[kind, position][edge]``: the first edge from which one stage reaches ``edge``.
    starts: dict[tuple[int, int], list[int]] = {}
    reached: list[int] = []
    for index, row in enumerate(family.counts_UK.tolist()):
        position = sum(row)
        best = 0
        for kind, count in enumerate(row):
            if not count:
                continue
            if (kind, position) not in starts:
                ends = costs.ends(kind, position)
                starts[kind, position] = [int((ends < edge).sum()) for edge in range(last + 1)]
            before = int(family.before_UK[index, kind])
            edge = last - (reached[before] if before >= 0 else 0)
            best = max(best, last - min(edge, starts[kind, position][edge]))
        reached.append(best)
    return reached
