"""Share one global batch so that the slowest member finishes as early as possible, exact to the last sample.

The same function runs in the operator, in the forecast and in the trainer's survivors, so that all of them know the same
shares from the same models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heterotrain_core.contract.plan import Binding, CommunicationTime
from heterotrain_core.split.curve import SplitMember, TableTime, member_problem
from heterotrain_core.split.gaps import Run, pick
from heterotrain_core.split.level import least_shares
from heterotrain_core.split.proportion import evenly, in_proportion
from heterotrain_core.split.timing import Floats, Ints, Timing, table_seconds

__all__ = ["Infeasible", "Split", "balance", "balance_many", "evaluate", "evenly", "in_proportion"]

_ALONE = CommunicationTime()


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """An optimal division of one global batch.

    Attributes:
        shares: samples per member, by rank; they sum to the global batch.
        micro_batches: micro-batches per member, 0 for an empty share.
        step_s: predicted seconds of a step: of ``balance`` the least possible.
        member_s: when the step would end if the member alone held it up; the largest is ``step_s``.
        own_s: each member's own compute seconds.
        bindings: what keeps each member from helping more. Memory: at its cap, and one granule more would still
            finish before the slowest. Floor: at its floor, and somebody else would do its last granule sooner (also an
            empty share). Otherwise compute or communication, by which of the two terms its step time is.
        solo_samples_per_s: sum over members of share / own compute seconds.
        efficiency: (global batch / step_s) / solo_samples_per_s, in (0, 1].
        reason: one sentence for people.
    """

    shares: tuple[int, ...]
    micro_batches: tuple[int, ...]
    step_s: float
    member_s: tuple[float, ...]
    own_s: tuple[float, ...]
    bindings: tuple[Binding, ...]
    solo_samples_per_s: float
    efficiency: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """No division exists.

    Attributes:
        reason: what forbids it and what would help, in one sentence.
        limit: the nearest global batch that floors and caps allow, in samples; ``None`` where no batch would help.
    """

    reason: str
    limit: int | None = None


def balance(
    total_samples: int, members: Sequence[SplitMember], *, communication: CommunicationTime = _ALONE
) -> Split | Infeasible:
    """Return the shares with the least step time ``max_i t_i(b_i)`` under floors, caps and granularity.

    Provably optimal in integers: the least level at which the members together take the batch is one of finitely many
    step times, and that one is found (``level``); tables that fall and mixed granularities are followed exactly
    (``gaps``). Among optimal divisions the others are levelled, too, and ties go evenly to the lower ranks.

    Args:
        total_samples: the global batch, at least 1.
        members: by rank.
        communication: T_o and T_u in seconds, gamma in [0, 1].
    """
    return balance_many((total_samples,), members, communication=communication)[0]


def balance_many(
    totals: Sequence[int], members: Sequence[SplitMember], *, communication: CommunicationTime = _ALONE
) -> tuple[Split | Infeasible, ...]:
    """Return ``balance`` for each of several global batches, in one vectorised pass."""
    if problem := _problem(members, communication):
        return tuple(problem for _ in totals)
    timing = Timing(members, communication, max(totals, default=0))
    limits = _limit_problems(totals, members, timing)
    feasible = [total for total, limit in zip(totals, limits, strict=True) if limit is None]
    if not feasible:
        return tuple(limit for limit in limits if limit is not None)
    odd = [int(c) for table in timing.tables if np.any(table.own_G != table.reach_G) for c in table.columns]
    if odd or len(set(timing.granularity_W.tolist())) > 1:
        answers = iter([_with_gaps(total, members, communication, timing, sorted(odd)) for total in feasible])
    else:
        shares_CW = least_shares(timing, feasible)
        answers = iter(_described(timing, members, shares_CW))
    return tuple(next(answers) if limit is None else limit for limit in limits)


def evaluate(
    shares: Sequence[int], members: Sequence[SplitMember], *, communication: CommunicationTime = _ALONE
) -> Split | Infeasible:
    """Return what given shares come to, optimal or not; infeasible where they break a floor, a cap or a granularity."""
    if problem := _problem(members, communication):
        return problem
    if len(shares) != len(members):
        return Infeasible(reason=f"there are {len(shares)} shares for {len(members)} members")
    timing = Timing(members, communication, max(shares))
    shares_W: Ints = np.array(shares, dtype=np.int64)
    odd = np.flatnonzero(
        (shares_W < timing.lo_W) | (shares_W > timing.cap_W) | (shares_W % timing.granularity_W != 0)
    ).tolist()
    if odd:
        low, cap = int(timing.lo_W[odd[0]]), int(timing.cap_W[odd[0]])
        return Infeasible(
            reason=f"member {odd[0]} cannot take {shares[odd[0]]} samples: it may have {low} to {cap} in steps of "
            f"{members[odd[0]].granularity_samples}"
        )
    if not any(shares):
        return Infeasible(reason="all shares are zero", limit=1)
    return _described(timing, members, shares_W[None, :])[0]


def _problem(members: Sequence[SplitMember], communication: CommunicationTime) -> Infeasible | None:
    if not members:
        return Infeasible(reason="there is nobody to share the batch: add a member")
    for index, member in enumerate(members):
        if clause := member_problem(member):
            return Infeasible(reason=f"member {index} {clause}")
    parts = (communication.overlapped_s, communication.last_bucket_s)
    if not all(math.isfinite(x) and x >= 0 for x in parts) or not 0 <= communication.gamma <= 1:
        return Infeasible(reason=f"the communication model {communication} needs finite times >= 0 and gamma in [0, 1]")
    return None


def _limit_problems(totals: Sequence[int], members: Sequence[SplitMember], timing: Timing) -> list[Infeasible | None]:
    """Return for each batch what limits it out, ``None`` where they allow it."""
    crossed = np.flatnonzero(timing.lo_W > timing.cap_W).tolist()
    if crossed:
        member = members[crossed[0]]
        broken = Infeasible(
            reason=f"member {crossed[0]} needs at least {member.floor_samples} samples but may have at most "
            f"{int(timing.cap_W[crossed[0]])} (granularity {member.granularity_samples}): lower its floor or leave it out"
        )
        return [broken] * len(totals)
    least, most = int(timing.lo_W.sum()), int(timing.cap_W.sum())
    unit = math.gcd(*(member.granularity_samples for member in members))
    return [_limit_problem(total, least, most, unit) for total in totals]


def _limit_problem(total: int, least: int, most: int, unit: int) -> Infeasible | None:
    if total < 1:
        return Infeasible(
            reason=f"a global batch of {total} samples cannot be shared: it has to be at least 1", limit=max(1, least)
        )
    if total < least:
        return Infeasible(
            reason=f"the global batch of {total} is below the sum of all floors, {least}: use fewer members or a "
            "larger batch",
            limit=least,
        )
    if total > most:
        return Infeasible(
            reason=f"the global batch of {total} is above the sum of all caps, {most}: use more members or a smaller "
            "batch",
            limit=most,
        )
    if total % unit:
        return Infeasible(
            reason=f"the global batch of {total} is no multiple of the granularity {unit}",
            limit=max(total // unit * unit, -(-least // unit) * unit),
        )
    return None


def _with_gaps(
    total: int, members: Sequence[SplitMember], communication: CommunicationTime, timing: Timing, odd: list[int]
) -> Split | Infeasible:
    """Return the optimum where some members' reachable shares have gaps, by bisection on the level down to one float."""
    unit = math.gcd(*(member.granularity_samples for member in members))
    smooth = [index for index in range(len(members)) if index not in set(odd)]
    groups = sorted({members[index].granularity_samples for index in smooth})
    columns_of = {g: np.array([i for i in smooth if members[i].granularity_samples == g]) for g in groups}
    grids = {int(column): table for table in timing.tables for column in table.columns if int(column) in set(odd)}

    exchange_s = communication.overlapped_s + communication.last_bucket_s

    def choice(level: float) -> tuple[int, ...] | None:
        most_W = timing.most(np.array([level]))
        sets: list[list[Run]] = []
        for g, columns in columns_of.items():
            first, last = int(timing.lo_W[columns].sum()), int(most_W[columns].sum())
            sets.append([Run(first // unit, last // unit, g // unit)])
        for index in odd:
            table = grids[index]
            step_G = table.own_G + exchange_s
            allowed = step_G <= max(level, float(step_G.min()))
            edges = np.flatnonzero(np.diff(np.concatenate(([False], allowed, [False])).astype(np.int8)))
            runs = zip(edges[::2].tolist(), (edges[1::2] - 1).tolist(), strict=True)
            at = [tuple((table.lo + x * table.granularity) // unit for x in run) for run in runs]
            sets.append([Run(first, last, table.granularity // unit) for first, last in at])
        return pick(sets, total // unit)

    low = 0.0
    high = max([float(timing.step_s(timing.hi_W).max()), *(float(grids[i].own_G.max()) + exchange_s for i in odd)])
    best = choice(high)
    if best is None:
        return Infeasible(
            reason=f"no shares sum to {total} with these granularities, floors and caps: use a batch that is a multiple "
            "of the largest granularity"
        )
    while low < (middle := (low + high) / 2) < high:
        found = choice(middle)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    shares_W = np.zeros(len(members), dtype=np.int64)
    for (_, columns), amount in zip(columns_of.items(), best, strict=False):
        part = Timing([members[i] for i in columns], communication, total)
        shares_W[columns] = least_shares(part, (amount * unit,))[0]
    for index, amount in zip(odd, best[len(groups) :], strict=True):
        shares_W[index] = amount * unit
    return _described(timing, members, shares_W[None, :])[0]


def _described(timing: Timing, members: Sequence[SplitMember], shares_CW: Ints) -> list[Split]:
    """Return the splits with times, bindings and bounds."""
    micro_CW = timing.micro_batches(shares_CW)
    own_CW = timing.own_s(shares_CW)
    backward_CW = timing.last_backward_s(shares_CW)
    exposed_CW = np.maximum(timing.overlapped_s - timing.hidden * backward_CW, 0.0)
    step_CW = own_CW + exposed_CW + timing.last_s
    # What one granule more would cost, limits aside for caps.
    next_CW = _next_s(timing, members, shares_CW)
    slowest_C1 = step_CW.max(axis=1)[:, None]
    room_CW = np.where(shares_CW < timing.hi_W, next_CW, np.inf)
    nobody_C1 = np.full((len(shares_CW), 1), np.inf)  # a single member has no others
    two = np.partition(np.concatenate((room_CW, nobody_C1), axis=1), 1, axis=1)[:, :2]
    others_CW = np.where(room_CW == two[:, :1], two[:, 1:], two[:, :1])
    at_floor = (shares_CW == timing.lo_W) & ((shares_CW == 0) | (others_CW < step_CW))
    at_cap = (shares_CW == timing.cap_W) & (next_CW < slowest_C1)
    code_CW = np.where(at_floor, 3, np.where(at_cap, 2, np.where(exposed_CW > 0, 1, 0)))
    with np.errstate(divide="ignore", invalid="ignore"):
        solo_C = np.where(shares_CW > 0, shares_CW / own_CW, 0.0).sum(axis=1)
    return [
        _split(
            shares=tuple(shares_CW[c].tolist()),
            micro_batches=tuple(micro_CW[c].tolist()),
            member_s=tuple(step_CW[c].tolist()),
            own_s=tuple(own_CW[c].tolist()),
            codes=code_CW[c],
            solo=float(solo_C[c]),
        )
        for c in range(len(shares_CW))
    ]


_BINDINGS = np.array(list(Binding), dtype=object)  # by code: compute, communication, memory, floor


def _split(
    *,
    shares: tuple[int, ...],
    micro_batches: tuple[int, ...],
    member_s: tuple[float, ...],
    own_s: tuple[float, ...],
    codes: Ints,
    solo: float,
) -> Split:
    counts = np.bincount(codes, minlength=len(_BINDINGS)).tolist()
    bound = ", ".join(f"{binding.value} {count}" for binding, count in zip(Binding, counts, strict=True) if count)
    total, step_s = sum(shares), max(member_s)
    return Split(
        shares=shares,
        micro_batches=micro_batches,
        step_s=step_s,
        member_s=member_s,
        own_s=own_s,
        bindings=tuple(_BINDINGS[codes].tolist()),
        solo_samples_per_s=solo,
        efficiency=total / step_s / solo,
        reason=f"{len(shares)} members take {total} samples in {step_s:.4g} s; bound by {bound}",
    )


def _next_s(timing: Timing, members: Sequence[SplitMember], shares_CW: Ints) -> Floats:
    """Return each member's step time with one granule more; beyond a table's end its last slope goes on."""
    more_CW = shares_CW + timing.granularity_W
    times_CW = timing.model_step_s(more_CW)
    for index in np.flatnonzero(timing.is_table_W).tolist():
        member = members[index]
        table = member.compute
        assert isinstance(table, TableTime)  # noqa: S101  # is_table_W says so; mypy cannot see it
        end = table.points[-1][0]
        micro_cap = int(timing.micro_W[index])
        wanted = more_CW[:, index]
        own = table_seconds(table, np.minimum(wanted, end), micro_cap)
        if len(table.points) > 1:
            (n0, t0), (n1, t1) = table.points[-2:]
            own = own + np.maximum(wanted - end, 0) * max(0.0, (t1 - t0) / (n1 - n0))
        times_CW[:, index] = own + timing.overlapped_s + timing.last_s
    return times_CW
