"""How many workers each job gets: the best sum of scores over all options that fit together, as one programme.

The bound speaks for listed options. Only options that a better sum may contain are columns: at prices of the rows, an
option that loses more than what separates the bound from a known choice is in none (Everett 1963).

Legend: ``O`` options of a job, ``P`` its pools, ``R`` rows of pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from heterotrain_planner.allocate.candidate import Candidate
from heterotrain_planner.allocate.job_options import JobOptions, PoolRows
from heterotrain_planner.allocate.value import LEAST_GAIN
from heterotrain_planner.programme import Floats, Ints

_MOST_NODES = 300
"""Nodes of one search tree."""
_FEW_OPTIONS = 12
"""Options of a job, on average, up to which there is one programme without prices."""
_FIRST_OPTIONS = 6
"""Options of a job, on average, in the first of two programmes."""
_MOST_COLUMNS, _MOST_OPTIONS = 800, 60
"""Options of one programme, and of a job on average, at most: with few jobs of very many options, nodes take long."""
_ROUNDS_OF_PRICES = 40
_ENTERING = 4
"""Options of one job that enter the linear programme at a time."""
_PART_OF_LEAST_GAIN = 0.02
"""Gap of a programme, relative to what the change of one job has to gain: a smaller one could decide nothing."""
_ROUNDING = 1e-7


class SharedNodes(NamedTuple):
    """One option for each job.

    Attributes:
        options: positions in the jobs' options.
        value: the sum of their scores.
        bound: no listed options that fit together have a larger sum.
        certain: whether no workers were taken to need more nodes than there are without a proof.
    """

    options: tuple[int, ...]
    value: float
    bound: float
    certain: bool


def share(candidates: Sequence[Candidate], rows: PoolRows, start: Sequence[int]) -> SharedNodes:
    """Return the options of all jobs with the best sum of scores.

    Args:
        candidates: the jobs that run.
        rows: of the pools.
        start: their options in force, or others that fit together.
    """
    if not candidates:
        return SharedNodes((), 0.0, 0.0, certain=True)
    least = min(candidate.job.weight * candidate.job.exponent for candidate in candidates)
    gap = _PART_OF_LEAST_GAIN * LEAST_GAIN * least
    known = sum(float(c.arrays[1][o]) for c, o in zip(candidates, start, strict=True))
    total = sum(len(candidate.options) for candidate in candidates)
    if total <= _FEW_OPTIONS * len(candidates):
        every = [np.arange(len(candidate.options)) for candidate in candidates]
        return _picked(candidates, rows, every, SharedNodes(tuple(start), known, np.inf, certain=True), gap)
    bound, losses = _priced(candidates, rows, start)
    best = SharedNodes(tuple(start), known, bound, certain=True)
    before = -1.0
    # The options that lose least first; what they reach leaves fewer others to look at.
    for slack in (_slack(losses, _FIRST_OPTIONS * len(candidates)), np.inf):
        width = min(
            slack,
            best.bound - best.value + _ROUNDING,
            _slack(losses, max(_MOST_COLUMNS, _MOST_OPTIONS * len(candidates))),
        )
        if width <= before or best.bound - best.value <= gap:
            break
        kept = [
            np.union1d(np.flatnonzero(loss_O <= width), [option])
            for loss_O, option in zip(losses, best.options, strict=True)
        ]
        found = _picked(candidates, rows, kept, best, gap)
        whole = width >= bound - found.value
        # A programme of some options bounds only these.
        best = found._replace(bound=min(bound, max(found.bound, best.value)) if whole else bound)
        before = width
    return best


def _slack(losses: Sequence[Floats], most: int) -> float:
    """Return the loss that at most so many options stay below."""
    every = np.concatenate(losses)
    return float("inf") if len(every) <= most else float(np.partition(every, most - 1)[most - 1])


def _picked(
    candidates: Sequence[Candidate], rows: PoolRows, kept: Sequence[Ints], best: SharedNodes, gap: float
) -> SharedNodes:
    offers = [_offer(candidate, own) for candidate, own in zip(candidates, kept, strict=True)]
    start = [int(np.searchsorted(own, option)) for own, option in zip(kept, best.options, strict=True)]
    found = rows.pick(offers, start=start, gap=gap, most_nodes=_MOST_NODES)
    if found is None or found.value <= best.value + _ROUNDING:
        bound = best.bound if found is None else max(found.bound, best.value)
        return best._replace(bound=bound, certain=best.certain and (found is None or found.certain))
    options = tuple(int(own[option]) for own, option in zip(kept, found.options, strict=True) if option is not None)
    return SharedNodes(options, found.value, found.bound, found.certain)


def _offer(candidate: Candidate, own: Ints) -> JobOptions:
    counts_OP, score_O = candidate.arrays
    return JobOptions(candidate.job, counts_OP[own], score_O[own], required=True)


def _priced(candidates: Sequence[Candidate], rows: PoolRows, start: Sequence[int]) -> tuple[float, list[Floats]]:
    """Return a bound of the sum of scores, and what each option loses against the best of its job at those prices."""
    worker_PR = [rows.kinds_of(candidate.job) @ rows.need_KR for candidate in candidates]
    active = [{0, option} for option in start]
    bound, losses = np.inf, []
    for _ in range(_ROUNDS_OF_PRICES):
        columns = [np.array(sorted(own)) for own in active]
        price_R = rows.prices([_offer(candidate, own) for candidate, own in zip(candidates, columns, strict=True)])
        nets = [
            candidate.arrays[1] - candidate.arrays[0] @ (own_PR @ price_R)
            for candidate, own_PR in zip(candidates, worker_PR, strict=True)
        ]
        most = [float(net_O.max()) for net_O in nets]
        now = sum(most) + float(price_R @ rows.limit_R)
        if now < bound:
            bound, losses = now, [high - net_O for high, net_O in zip(most, nets, strict=True)]
        entered = False
        for own, listed, net_O, high in zip(active, columns, nets, most, strict=True):
            if high > float(net_O[listed].max()) + _ROUNDING:
                best = np.argpartition(-net_O, min(_ENTERING, len(net_O)) - 1)[:_ENTERING]
                own.update(best[net_O[best] > float(net_O[listed].max())].tolist())
                entered = True
        if not entered:
            break
    return bound, losses
