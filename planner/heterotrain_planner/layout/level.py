"""The least time in which members out of a table's templates take a whole global batch.

Within a time T, a template takes ``n = 1 + ⌊(T − first) / next⌋`` micro-batches. So the members of a step that takes T
are an integer programme: the most samples that the devices can take within T. Its value grows with T, and T is found
by bisection: first for the linear relaxation, which gives the bound, then upwards from there for whole members.

Legend: ``J`` multisets and further templates, ``B`` sizes of micro-batches, ``K`` kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from heterotrain_core.contract.plan import LayoutKind

from heterotrain_planner.layout.costs import Floats, Ints
from heterotrain_planner.layout.integer import Chosen, choose
from heterotrain_planner.layout.result import Template
from heterotrain_planner.layout.simplex import Optimum, maximise
from heterotrain_planner.layout.template_table import TemplateTable

TOLERANCE = 1e-5
"""Relative width at which the search for the bound ends."""
LEAST_STEP = 0.0005
"""Smallest growth of a time that was too short for whole members, as a ratio."""
MOST_TRIALS = 40
"""Times that are tried for whole members before the longest possible one."""
MOST_HALVINGS = 12
"""Further trials between the last time that was too short and the first that was not."""


class Effort(NamedTuple):
    """How far a search goes.

    Attributes:
        close: relative distance, between a time that is too short and one that is not, at which it ends.
        nodes: of each integer programme.
    """

    close: float
    nodes: int


ROUGH, FINE = Effort(0.002, 30), Effort(0.0005, 60)
"""To compare choices; to work one out."""
_PROOF = 1e-9
"""Relative distance below the batch at which a bound counts as a proof."""
MOST_MEMBERS = 1024
"""Members of one job."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TemplateOptions:
    """The templates that a cover may use.

    Attributes:
        need_JK: devices.
        first_BJ, next_BJ: seconds of the first and of each further micro-batch; infinite where nothing fits.
        samples_BJ: of a micro-batch.
        most_BJ: micro-batches that a member may have: as many as its memory is planned for, or those of the batch.
        batch_samples: the global batch.
        pipelines: how many of the columns are the multisets of the table, in its order.
        further: the other columns.
    """

    need_JK: Ints
    first_BJ: Floats
    next_BJ: Floats
    samples_BJ: Ints
    most_BJ: Ints
    batch_samples: int
    pipelines: int
    further: tuple[Template, ...]

    def micro_batches(self, level_s: float) -> Ints:
        """Return how many micro-batches each template takes within a time, ``_BJ``; 0 where it is too short."""
        possible = self.first_BJ <= level_s * (1 + 1e-12)
        with np.errstate(invalid="ignore"):
            further = np.where(possible, (level_s - self.first_BJ) / self.next_BJ, 0.0)
        counts = np.minimum(np.floor(np.clip(further, 0.0, 1e15) + 1e-9).astype(np.int64) + 1, self.most_BJ)
        return np.where(possible, counts, 0)

    def samples(self, level_s: float) -> tuple[Floats, Ints]:
        """Return how many samples each template takes within a time, and with which size of micro-batch, ``_J``."""
        samples_BJ = self.micro_batches(level_s) * self.samples_BJ
        choice_J = np.argmax(samples_BJ, axis=0)
        return np.minimum(samples_BJ.max(axis=0), self.batch_samples).astype(float), choice_J

    def needs(self, least_samples_J: Ints) -> Ints:
        """Return what a member of each template uses up: devices, samples that it has to get, and one place."""
        return np.column_stack([self.need_JK, least_samples_J, np.ones(len(self.need_JK), dtype=np.int64)])

    def limits(self, devices_K: Ints) -> Ints:
        """Return how much of that there is.

        Members have to get no more samples than a batch rounded up to whole micro-batches has.
        """
        return np.concatenate([devices_K, [self.batch_samples + int(self.samples_BJ.max()) - 1, MOST_MEMBERS]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Members by template that take the global batch within ``level_s``.

    Attributes:
        level_s: the time.
        bound_s: no whole members take less: the time that the relaxation needs, raised by what branch and bound proved.
        amounts: members by template.
    """

    level_s: float
    bound_s: float
    amounts: Mapping[int, int]


def template_options(
    templates: TemplateTable, further: Sequence[Template], kinds: frozenset[LayoutKind], least_stages: int
) -> TemplateOptions:
    """Return the templates of some kinds of layouts; pipelines have at least so many stages."""
    sizes = templates.family.counts_UK.sum(axis=1)
    allowed = np.zeros(len(sizes), dtype=bool)
    if LayoutKind.REPLICATED in kinds:
        allowed |= sizes == 1
    if LayoutKind.PIPELINE in kinds:
        allowed |= sizes > 1
    allowed &= sizes >= least_stages
    more = [each for each in further if each.layout.kind in kinds]
    batches = len(templates.costs)

    def columns(values: Floats | Ints, own: Sequence[float], nothing: float) -> Floats:
        """Put the values of further templates behind the table's, each in the row of the first size."""
        rows = np.full((batches, len(own)), nothing)
        rows[0] = own
        return np.hstack([np.asarray(values, dtype=float), rows])

    sample_B = np.array([each.micro_batch_samples for each in templates.costs])
    most_B = np.array([each.micro_batches for each in templates.costs])
    shape = templates.fill_BU.shape
    batch = templates.problem.batch_samples
    return TemplateOptions(
        need_JK=np.vstack([templates.family.counts_UK, *(np.array([each.devices], dtype=np.int64) for each in more)]),
        first_BJ=columns(np.where(allowed, templates.fill_BU, np.inf), [each.first_s for each in more], np.inf),
        next_BJ=columns(templates.slowest_BU, [each.next_s for each in more], np.inf),
        samples_BJ=columns(
            np.broadcast_to(sample_B[:, None], shape), [each.micro_batch_samples for each in more], 1
        ).astype(np.int64),
        most_BJ=columns(
            np.broadcast_to(most_B[:, None], shape), [-(-batch // each.micro_batch_samples) for each in more], 1
        ).astype(np.int64),
        batch_samples=batch,
        pipelines=shape[1],
        further=tuple(more),
    )


class Search:
    """Looks for the least time in which members take a whole batch, first in parts, then whole.

    Args:
        options: the templates.
        devices_K: to form members of.
        least_members: that there have to be.
    """

    def __init__(self, options: TemplateOptions, devices_K: Ints, least_members: int) -> None:
        self._options, self._least = options, least_members
        self._fits = np.flatnonzero(
            (options.need_JK <= devices_K).all(axis=1) & np.isfinite(options.first_BJ).any(axis=0)
        )
        self._limits = options.limits(devices_K)
        self._longest_s = float(
            np.max(
                np.where(np.isfinite(options.first_BJ), options.first_BJ + options.next_BJ * options.batch_samples, 0)
            )
        )
        self._basis: tuple[int, ...] = ()

    def most_members(self) -> tuple[int, Ints]:
        """Return how many members the devices can form, and the devices that these need, ``_K``."""
        if not len(self._fits):
            return 0, np.zeros(self._options.need_JK.shape[1], dtype=np.int64)
        possible = np.isfinite(self._options.first_BJ)
        smallest_J = np.where(possible, self._options.samples_BJ, np.iinfo(np.int64).max // 2).min(axis=0)
        most = choose(np.ones(len(self._fits)), self._options.needs(smallest_J)[self._fits], self._limits)
        used_K = sum(
            (number * self._options.need_JK[self._fits[j]] for j, number in most.amounts.items()),
            np.zeros(self._options.need_JK.shape[1], dtype=np.int64),
        )
        return max(0, int(most.value)), used_K

    def relaxed_s(self, guess_s: float = 0.0) -> float | None:
        """Return the least time of members in parts, which no whole members beat; ``None`` where there are none.

        Args:
            guess_s: about the least time, where it is known; any number is right.
        """
        if not len(self._fits):
            return None
        shortest_s = float(np.min(self._options.first_BJ[:, self._fits]))
        bound_s = _too_short(shortest_s, self._longest_s, guess_s, lambda at_s: self._relaxed(at_s) is not None)
        # Just above the bound, there are members; if not, there are none at all.
        there = self._relaxed(bound_s * (1 + 2 * TOLERANCE)) or self._relaxed(self._longest_s)
        return None if there is None else bound_s

    def reaches(self, level_s: float, effort: Effort) -> bool:
        """Return whether whole members are found that take the batch within a time."""
        return level_s >= self._longest_s or bool(self._chosen(level_s, effort.nodes)[1])

    def whole(self, least_s: float, effort: Effort = FINE, known: Level | None = None) -> Level | None:
        """Return whole members and their time, within ``effort.close`` of the least one.

        It is further away only where the integer programme ended without a proof; ``Level.bound_s`` holds in any case.

        Args:
            least_s: the result of ``relaxed_s``.
            effort: how far to search.
            known: a result of less effort.
        """
        low_s = bound_s = least_s if known is None else known.bound_s
        best = known
        at_s = low_s
        for trial in range(MOST_TRIALS + MOST_HALVINGS + 1):
            if best is not None:
                if best.level_s <= low_s * (1 + effort.close) or trial > MOST_TRIALS + MOST_HALVINGS:
                    break
                at_s = (low_s + best.level_s) / 2
            elif trial == MOST_TRIALS:
                at_s = max(at_s, self._longest_s)
            found, amounts = self._chosen(at_s, effort.nodes)
            if amounts:
                best = Level(level_s=at_s, bound_s=bound_s, amounts=amounts)
                continue
            low_s = at_s
            if found.bound < self._options.batch_samples * (1 - _PROOF):
                bound_s = max(bound_s, at_s)
            # Time grows as the missing samples ask, or doubles where there are too few members so far.
            more = self._options.batch_samples / found.value if found.value > 0 else 2.0
            at_s *= max(1 + LEAST_STEP, min(2.0, more))
        return None if best is None else replace(best, bound_s=min(bound_s, best.level_s))

    def _offers(self, at_s: float) -> tuple[Floats, Ints]:
        """Return samples and needs of the templates that fit."""
        samples_J, choice_J = self._options.samples(at_s)
        needs = self._options.needs(np.take_along_axis(self._options.samples_BJ, choice_J[None], axis=0)[0])
        return samples_J[self._fits], needs[self._fits]

    def _relaxed(self, at_s: float) -> Optimum | None:
        """Return members in parts that take the batch within a time."""
        samples_J, needs = self._offers(at_s)
        found = maximise(
            samples_J, needs.T.astype(float), self._limits.astype(float), least=self._least, start=self._basis
        )
        if found is None:
            return None
        self._basis = found.basis
        return found if found.value >= self._options.batch_samples * (1 - _PROOF) else None

    def _chosen(self, at_s: float, nodes: int) -> tuple[Chosen, dict[int, int]]:
        """Return the best whole members within a time, and their amounts if they take the batch."""
        value_J, needs = self._offers(at_s)
        used = np.flatnonzero(value_J > 0)
        wanted = float(self._options.batch_samples)
        found = choose(value_J[used], needs[used], self._limits, least=self._least, wanted=wanted, most_nodes=nodes)
        taken = found.amounts if found.value >= wanted * (1 - _PROOF) else {}
        return found, {int(self._fits[used[key]]): number for key, number in taken.items() if number}


def _too_short(start_s: float, longest_s: float, guess_s: float, enough: Callable[[float], bool]) -> float:
    """Return the longest time that is not enough, within the tolerance."""
    low = high = max(start_s, guess_s)
    if guess_s > start_s:
        # Away from the guess by growing steps, until one side is enough and the other is not.
        step = 1.01
        if enough(high):
            while low > start_s and enough(low := max(start_s, low / step)):
                high, step = low, step * step
        else:
            while high < longest_s and not enough(high := high * step):
                low, step = high, min(2.0, step * step)
    else:
        while high < longest_s and not enough(high):
            low, high = high, high * 2
    while high > low * (1 + TOLERANCE):
        middle = (low + high) / 2
        if middle in (low, high):  # no number lies between them
            break
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low
