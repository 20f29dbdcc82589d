"""Step times of many members at once, and their inverse: the largest share that finishes within a time.

Legend: ``W`` members, ``L`` leading axes (candidate batches, or none). All arrays of one ``Timing`` are ``_W``.

With ``n`` samples in ``M = ceil(n / micro cap)`` micro-batches of nearly equal size, of which the last has
``floor(n / M)`` samples, a member needs (docs/mathematics.md)

    compute    C(n) = (q + k) n + (s + m) M + update
    backward   P(n) = k floor(n / M) + m            of the last micro-batch, the only one that overlaps the exchange
    step       t(n) = C(n) + T_u + max(0, T_o - (1 - gamma) P(n))

and the cluster's step is ``max_i t_i(n_i)``, the two-term formula regrouped by member. For models, ``t`` never falls
with ``n``; a falling table is replaced by its envelope (see ``gaps``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_core.split.member import CurveTime, SplitMember, TableTime
from heterotrain_core.split.tabulated import Lookup, ShareTable, curve_seconds, table_seconds

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

UNLIMITED = 2**40
"""Represents "no limit" in samples; products with it still fit 64 bits and are exact in a float."""


class Timing:
    """The members of one split as arrays."""

    def __init__(
        self,
        members: Sequence[SplitMember],
        communication: CommunicationTime,
        most_samples: int,
        *,
        exchange_L1: Floats | float = 1.0,
    ) -> None:
        """Lay out ``members`` (sound by ``member_problem``) for shares up to ``most_samples``.

        ``exchange_L1`` scales the exchange along the leading axes, where each of them stands for another cluster.
        """
        models = [m.compute if isinstance(m.compute, ComputeTime) else _NO_MODEL for m in members]
        self.k_W: Floats = np.array([c.backward_per_sample_s for c in models])
        self.m_W: Floats = np.array([c.backward_fixed_s for c in models])
        self.rate_W: Floats = np.array([c.per_sample_s for c in models]) + self.k_W
        self.fixed_W: Floats = np.array([c.fixed_s for c in models]) + self.m_W
        self.update_W: Floats = np.array([c.update_s for c in models])
        self.granularity_W: Ints = np.array([m.granularity_samples for m in members], dtype=np.int64)
        self.micro_W: Ints = np.array([m.micro_cap_samples or UNLIMITED for m in members], dtype=np.int64)
        floors = np.array([m.floor_samples for m in members], dtype=np.int64)
        caps = np.array([_cap(m) for m in members], dtype=np.int64)
        self.lo_W: Ints = -(-floors // self.granularity_W) * self.granularity_W
        self.cap_W: Ints = caps // self.granularity_W * self.granularity_W
        self.hi_W: Ints = np.minimum(self.cap_W, most_samples // self.granularity_W * self.granularity_W)
        self.overlapped_s: Floats | float = communication.overlapped_s * exchange_L1
        self.last_s: Floats | float = communication.last_bucket_s * exchange_L1
        self.overlaps = communication.overlapped_s > 0
        self.hidden = 1.0 - communication.gamma
        self.accumulates = bool(np.any(self.micro_W < self.hi_W))
        # Where the exchange varies, the backward pass of a curve hides nothing.
        hideable_s = self.overlapped_s if isinstance(self.overlapped_s, float) else 0.0
        self.is_table_W = np.array([not isinstance(m.compute, ComputeTime) for m in members])
        self.tables = self._tables(members, hideable_s) if self.is_table_W.any() else ()
        self.lookup = Lookup(self.tables, len(members)) if self.tables else None
        # Where this slope of the communication term is zero (q = 0, gamma = 0), a member only waits for its fixed part.
        self.late_W = self.rate_W - self.hidden * self.k_W

    def _tables(self, members: Sequence[SplitMember], hideable_s: float) -> tuple[ShareTable, ...]:
        groups: dict[tuple[TableTime | CurveTime, int, int, int, int], list[int]] = {}
        for column, member in enumerate(members):
            if not isinstance(member.compute, ComputeTime) and self.lo_W[column] <= self.hi_W[column]:
                limits = (int(self.lo_W[column]), int(self.hi_W[column]))
                key = (member.compute, *limits, int(self.micro_W[column]), member.granularity_samples)
                groups.setdefault(key, []).append(column)
        found = []
        for (compute, lo, hi, micro_cap, granularity), columns in groups.items():
            grid = np.arange(lo, hi + 1, granularity, dtype=np.int64)
            if isinstance(compute, CurveTime):
                own, back = curve_seconds(compute, grid, micro_cap)
                # A further micro-batch has a shorter backward, which hides less: what is hidden later is not counted.
                reach = np.maximum.accumulate(own - np.minimum(hideable_s, self.hidden * back))
                back = (own - reach) / self.hidden if self.hidden > 0 else back
            else:
                own = table_seconds(compute, grid, micro_cap)
                reach = np.ascontiguousarray(np.minimum.accumulate(own[::-1])[::-1])
                back = np.zeros_like(own)
            falls = isinstance(compute, TableTime) and bool(np.any(own != reach))
            found.append(ShareTable(np.array(columns, dtype=np.int64), lo, granularity, own, reach, back, falls))
        return tuple(found)

    def micro_batches(self, samples_LW: Ints) -> Ints:
        """Return the number of micro-batches of each share."""
        if not self.accumulates:
            return np.minimum(samples_LW, 1)
        return -(-samples_LW // self.micro_W)

    def own_s(self, samples_LW: Ints) -> Floats:
        """Return own compute seconds C(n)."""
        micro = self.micro_batches(samples_LW)
        own = self.rate_W * samples_LW + self.fixed_W * micro + self.update_W
        if (known := self.lookup) is not None:
            own[..., known.columns] = known.own_G[known.index(samples_LW[..., known.columns])]
        return own

    def last_backward_s(self, samples_LW: Ints) -> Floats:
        """Return the seconds P(n) of the last micro-batch's backward; 0 for an empty share and for tables."""
        micro = self.micro_batches(samples_LW)
        last = samples_LW // np.maximum(micro, 1) if self.accumulates else samples_LW
        backward = self.k_W * last + self.m_W * np.minimum(micro, 1)
        if (known := self.lookup) is not None:
            backward[..., known.columns] = known.back_G[known.index(samples_LW[..., known.columns])]
        return backward

    def step_s(self, samples_LW: Ints) -> Floats:
        """Return t(n): the end of the step if this member alone determined it."""
        times = self._model_step(samples_LW, slice(None))
        if (known := self.lookup) is not None:
            own = known.reach_G[known.index(samples_LW[..., known.columns])]
            times[..., known.columns] = own + (self.last_s + self.overlapped_s)
        return times

    def step_at(self, columns: Ints, samples: Ints) -> Floats:
        """Return t(n) for pairs of (member, share)."""
        times = self._model_step(samples, columns)
        if (known := self.lookup) is not None:
            places = known.place_W[columns]
            mine = places >= 0
            own = known.reach_G[known.index(samples[mine], places[mine])]
            times[mine] = own + (self.last_s + self.overlapped_s)
        return times

    def _model_step(self, samples_LW: Ints, columns: Ints | slice) -> Floats:
        if self.accumulates:
            # Quotients in floats are exact here: samples are below 2**53, and several times faster than in integers.
            samples: Floats = samples_LW.astype(float)
            micro: Floats | Ints = np.ceil(samples / self.micro_W[columns])
        else:
            micro = np.minimum(samples_LW, 1)
        times = (
            self.rate_W[columns] * samples_LW + self.fixed_W[columns] * micro + (self.update_W[columns] + self.last_s)
        )
        if self.overlaps:
            if self.accumulates:
                last: Floats | Ints = np.floor(samples / np.maximum(micro, 1.0))
                some = np.minimum(micro, 1.0)
            else:
                last, some = samples_LW, micro
            backward = self.k_W[columns] * last + self.m_W[columns] * some
            times += np.maximum(self.overlapped_s - self.hidden * backward, 0.0)
        return times

    def model_step_s(self, samples_LW: Ints) -> Floats:
        """Return t(n) by the models alone, also above the caps; meaningless for tables."""
        return self._model_step(samples_LW, slice(None))

    def real_most(self, level_L1: Floats) -> tuple[Floats, Floats]:
        """Return the real-valued share that each member finishes within a level, and its slope in samples per second.

        The slope is 0 where a limit holds the share. Both are ``_LW``; exact for models without accumulation.
        """
        budget = level_L1 - (self.update_W + self.last_s)
        fixed, late = self.fixed_W, self.late_W
        lower: Floats = np.zeros_like(late)
        upper: Floats = self.micro_W.astype(float)
        if self.accumulates:
            # Micro-batches of full size first, then the largest share in one more micro-batch.
            exposed = np.maximum(self.overlapped_s - self.hidden * (self.k_W * upper + self.m_W), 0.0)
            full = np.floor(_divide(budget - exposed, self.rate_W * upper + self.fixed_W))
            full = np.minimum(np.maximum(full, 0.0), np.ceil(self.hi_W / upper))
            micro = full + 1.0
            fixed = micro * self.fixed_W
            late = self.rate_W - self.hidden * self.k_W / micro
            lower, upper = full * upper, micro * upper
        left = budget - fixed
        by_compute = _divide(left, self.rate_W)
        most, slope = by_compute, _inverse(self.rate_W)
        if self.overlaps:
            amount = left - (self.overlapped_s - self.hidden * self.m_W)
            late_slope = _inverse(late)
            by_exchange = amount * late_slope if late_slope.all() else _divide(amount, late)
            slope = np.where(by_exchange < by_compute, late_slope, slope)
            most = np.minimum(by_compute, by_exchange)
        most = np.minimum(np.maximum(most, lower), upper)
        for table in self.tables:
            own_L1 = level_L1 - (self.last_s + self.overlapped_s)
            most[..., table.columns] = (
                table.lo + (np.searchsorted(table.reach_G, own_L1, side="right") - 1) * table.granularity
            )
        free = (most > self.lo_W) & (most < self.hi_W)
        return np.minimum(np.maximum(most, self.lo_W), self.hi_W), np.where(free, slope, 0.0)

    def most(self, level_L1: Floats) -> Ints:
        """Return the largest allowed share that each member finishes within a level; its floor where none is.

        The closed form gives the share up to rounding errors and the rounding of the last micro-batch. The two loops
        make it exact with respect to ``step_s``, in one or two passes. Their steps double, because a level has room for
        any number of samples that take less than its last digit.
        """
        real, _ = self.real_most(level_L1)
        whole = (real / self.granularity_W).astype(np.int64) * self.granularity_W
        shares: Ints = np.clip(whole, self.lo_W, self.hi_W)
        step = self.granularity_W
        while (late := (shares > self.lo_W) & (self.step_s(shares) > level_L1)).any():
            shares = np.where(late, np.maximum(shares - step, self.lo_W), shares)
            step = np.where(late, 2 * step, self.granularity_W)
        step = self.granularity_W
        while True:
            more = shares + step
            fits = (more <= self.hi_W) & (self.step_s(np.minimum(more, self.hi_W)) <= level_L1)
            if not (fits | (step > self.granularity_W)).any():
                return shares
            shares, step = np.where(fits, more, shares), np.where(fits, 2 * step, self.granularity_W)


_NO_MODEL = ComputeTime(per_sample_s=0.0, fixed_s=0.0, backward_per_sample_s=0.0, backward_fixed_s=0.0)


def _cap(member: SplitMember) -> int:
    cap = UNLIMITED if member.cap_samples is None else min(member.cap_samples, UNLIMITED)
    return min(cap, math.floor(member.compute.points[-1][0])) if isinstance(member.compute, TableTime) else cap


def _divide(amount: Floats, rate: Floats) -> Floats:
    """Return amount / rate; where the rate is zero, unlimited for an amount >= 0, otherwise -1."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if rate.all():
            return amount / rate
        return np.where(rate > 0, amount / rate, np.where(amount >= 0, float(UNLIMITED), -1.0))


def _inverse(rate: Floats) -> Floats:
    with np.errstate(divide="ignore", over="ignore"):
        if rate.all():
            return 1.0 / rate
        return np.where(rate > 0, 1.0 / rate, 0.0)
