"""Divide one global batch so that the slowest member finishes as early as possible, exact to the last sample.

The operator, the forecast and the trainer's surviving workers run the same function, so they get the same shares from
the same models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from heterotrain_core.contract.plan import CommunicationTime
from heterotrain_core.split.gaps import ShareRun, pick
from heterotrain_core.split.level import least_shares
from heterotrain_core.split.member import SplitMember, member_problem
from heterotrain_core.split.proportion import evenly, in_proportion
from heterotrain_core.split.result import Infeasible, Split, describe
from heterotrain_core.split.step_time import Ints, Timing

__all__ = ["Infeasible", "Split", "balance", "balance_many", "evaluate", "evenly", "in_proportion"]

_ALONE = CommunicationTime()


def balance(
    total_samples: int, members: Sequence[SplitMember], *, communication: CommunicationTime = _ALONE
) -> Split | Infeasible:
    """Return the shares with the least step time ``max_i t_i(b_i)`` under floors, caps and granularity.

    Provably optimal in integers: the least level at which the members together take the batch is one of finitely many
    step times, and ``level`` finds it. ``gaps`` treats falling tables and mixed granularities exactly. Among optimal
    divisions, the other members are levelled as well, and ties go evenly to the lower ranks.

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
    odd = [int(c) for table in timing.tables if table.falls for c in table.columns]
    if odd or len(set(timing.granularity_W.tolist())) > 1:
        answers = iter([_with_gaps(total, members, communication, timing, sorted(odd)) for total in feasible])
    else:
        shares_CW = least_shares(timing, feasible)
        answers = iter(describe(timing, members, shares_CW))
    return tuple(next(answers) if limit is None else limit for limit in limits)


def evaluate(
    shares: Sequence[int], members: Sequence[SplitMember], *, communication: CommunicationTime = _ALONE
) -> Split | Infeasible:
    """Return the times of given shares, optimal or not; infeasible where they break a floor, cap or granularity."""
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
    return describe(timing, members, shares_W[None, :])[0]


def _problem(members: Sequence[SplitMember], communication: CommunicationTime) -> Infeasible | None:
    if not members:
        return Infeasible(reason="there are no members to share the batch: add one")
    for index, member in enumerate(members):
        if clause := member_problem(member):
            return Infeasible(reason=f"member {index} {clause}")
    parts = (communication.overlapped_s, communication.last_bucket_s)
    if not all(math.isfinite(x) and x >= 0 for x in parts) or not 0 <= communication.gamma <= 1:
        return Infeasible(reason=f"the communication model {communication} needs finite times >= 0 and gamma in [0, 1]")
    return None


def _limit_problems(totals: Sequence[int], members: Sequence[SplitMember], timing: Timing) -> list[Infeasible | None]:
    """Return for each batch the limit that forbids it, ``None`` where all allow it."""
    crossed = np.flatnonzero(timing.lo_W > timing.cap_W).tolist()
    if crossed:
        member = members[crossed[0]]
        broken = Infeasible(
            reason=f"member {crossed[0]} needs at least {member.floor_samples} samples but may have at most "
            f"{int(timing.cap_W[crossed[0]])} (granularity {member.granularity_samples}): lower its floor "
            "or leave it out"
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
            reason=f"the global batch of {total} is below {least}, the sum of the smallest shares: use fewer members "
            "or a larger batch",
            limit=least,
        )
    if total > most:
        return Infeasible(
            reason=f"the global batch of {total} is above {most}, the sum of the largest shares: use more members or a "
            "smaller batch",
            limit=most,
        )
    if total % unit:
        return Infeasible(
            reason=f"the global batch of {total} is not a multiple of the granularity {unit}",
            limit=max(total // unit * unit, -(-least // unit) * unit),
        )
    return None


def _with_gaps(
    total: int, members: Sequence[SplitMember], communication: CommunicationTime, timing: Timing, odd: list[int]
) -> Split | Infeasible:
    """Return the optimum where some members' reachable shares have gaps, by bisection on the level to one float."""
    unit = math.gcd(*(member.granularity_samples for member in members))
    smooth = [index for index in range(len(members)) if index not in set(odd)]
    groups = sorted({members[index].granularity_samples for index in smooth})
    columns_of = {g: np.array([i for i in smooth if members[i].granularity_samples == g]) for g in groups}
    grids = {int(column): table for table in timing.tables for column in table.columns if int(column) in set(odd)}

    exchange_s = communication.overlapped_s + communication.last_bucket_s

    def choice(level: float) -> tuple[int, ...] | None:
        most_W = timing.most(np.array([level]))
        sets: list[list[ShareRun]] = []
        for g, columns in columns_of.items():
            first, last = int(timing.lo_W[columns].sum()), int(most_W[columns].sum())
            sets.append([ShareRun(first // unit, last // unit, g // unit)])
        for index in odd:
            table = grids[index]
            step_G = table.own_G + exchange_s
            allowed = step_G <= max(level, float(step_G.min()))
            edges = np.flatnonzero(np.diff(np.concatenate(([False], allowed, [False])).astype(np.int8)))
            runs = zip(edges[::2].tolist(), (edges[1::2] - 1).tolist(), strict=True)
            at = [tuple((table.lo + x * table.granularity) // unit for x in run) for run in runs]
            sets.append([ShareRun(first, last, table.granularity // unit) for first, last in at])
        return pick(sets, total // unit)

    low = 0.0
    high = max([float(timing.step_s(timing.hi_W).max()), *(float(grids[i].own_G.max()) + exchange_s for i in odd)])
    best = choice(high)
    if best is None:
        return Infeasible(
            reason=f"no shares sum to {total} with these granularities, floors and caps: "
            "use a batch that is a multiple of the largest granularity"
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
    return describe(timing, members, shares_W[None, :])[0]
