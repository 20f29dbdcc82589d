"""The result of dividing a batch: shares with their times and binding constraints, or why there are none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heterotrain_core.contract.plan import Binding
from heterotrain_core.split.member import CurveTime, SplitMember, TableTime
from heterotrain_core.split.step_time import Floats, Ints, Timing
from heterotrain_core.split.tabulated import table_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """An optimal division of one global batch.

    Attributes:
        shares: samples per member, by rank; they sum to the global batch.
        micro_batches: micro-batches per member, 0 for an empty share.
        step_s: predicted seconds of a step; from ``balance``, the least possible.
        member_s: when the step would end if the member alone held it up; the largest is ``step_s``.
        own_s: each member's own compute seconds.
        bindings: each member's binding constraint. Memory: at its cap, although one granule more would still finish
            before the slowest. Floor: at its floor, although another member would finish its last granule sooner (also
            an empty share). Otherwise compute or communication, whichever term determines its step time.
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
        reason: the obstacle and a remedy, in one sentence.
        limit: the nearest global batch that floors and caps allow, in samples; ``None`` where no batch would help.
    """

    reason: str
    limit: int | None = None


def describe(timing: Timing, members: Sequence[SplitMember], shares_CW: Ints) -> list[Split]:
    """Return the times and the binding constraints of each row of shares.

    Args:
        timing: of the members.
        members: by rank.
        shares_CW: samples, one row for each division; every row sums to its batch and keeps all limits.
    """
    micro_CW = timing.micro_batches(shares_CW)
    own_CW = timing.own_s(shares_CW)
    backward_CW = timing.last_backward_s(shares_CW)
    exposed_CW = np.maximum(timing.overlapped_s - timing.hidden * backward_CW, 0.0)
    step_CW = own_CW + exposed_CW + timing.last_s
    # The time with one granule more, ignoring caps.
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
    """Return each member's step time with one granule more; beyond its end, a table continues with its last slope."""
    more_CW = shares_CW + timing.granularity_W
    times_CW = timing.model_step_s(more_CW)
    for index in np.flatnonzero(timing.is_table_W).tolist():
        member = members[index]
        table = member.compute
        if isinstance(table, CurveTime):
            times_CW[:, index] = _further_s(timing, index, more_CW[:, index])
            continue
        assert isinstance(table, TableTime)  # noqa: S101  # implied by is_table_W
        end = table.points[-1][0]
        micro_cap = int(timing.micro_W[index])
        wanted = more_CW[:, index]
        own = table_seconds(table, np.minimum(wanted, end), micro_cap)
        if len(table.points) > 1:
            (n0, t0), (n1, t1) = table.points[-2:]
            own = own + np.maximum(wanted - end, 0) * max(0.0, (t1 - t0) / (n1 - n0))
        times_CW[:, index] = own + timing.overlapped_s + timing.last_s
    return times_CW


def _further_s(timing: Timing, index: int, wanted_C: Ints) -> Floats:
    """Return a curve's step time at these shares; beyond the limit, it continues with the last difference."""
    column_C = np.full(len(wanted_C), index)
    last, granularity = int(timing.hi_W[index]), int(timing.granularity_W[index])
    ends = np.array([last, max(last - granularity, int(timing.lo_W[index]))])
    end_s, before_s = timing.step_at(np.full(2, index), ends).tolist()
    within_s = timing.step_at(column_C, np.minimum(wanted_C, last))
    return np.where(wanted_C > last, end_s + (end_s - before_s), within_s)
