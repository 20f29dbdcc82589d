"""Rates of jobs' options, kept from one allocation to the next: they take most of the time and seldom change."""

from __future__ import annotations

from dataclasses import replace

from heterotrain_planner.allocate.capacity import PoolCapacity
from heterotrain_planner.allocate.problem import JobDemand
from heterotrain_planner.allocate.value import Floats, Ints, possible_counts, rates, thinned_out


class RateCache:
    """The possible numbers of workers of each kind of job, with their rates."""

    def __init__(self) -> None:
        """Start empty."""
        self._entries: dict[tuple[object, ...], tuple[Ints, Floats, bool]] = {}
        self._used: set[tuple[object, ...]] = set()

    def __len__(self) -> int:
        """Return the number of kinds of jobs."""
        return len(self._entries)

    def of(self, job: JobDemand, capacity: PoolCapacity) -> tuple[Ints, Floats, bool]:
        """Return numbers of workers from each of the job's pools, one row each, their rates, and whether these are all.

        Args:
            job: the demand.
            capacity: of the pools.
        """
        slots = tuple(capacity.slots(job_pool.pool, job_pool.size) for job_pool in job.pools)
        # Jobs from one template have the same rates, whatever their names and their remaining work.
        key: tuple[object, ...] = (
            slots,
            job.pools,
            job.min_workers,
            job.max_workers,
            job.batch_samples,
            job.largest_batch_samples,
            job.noise_samples,
            job.communication,
            job.communication_members,
            job.exchange_seen,
            job.variation,
            job.objective,
            job.layouts,
            tuple(sorted(job.current.items())) if thinned_out(job, slots) else (),
        )
        self._used.add(key)
        if key not in self._entries:
            counts_OP, complete = possible_counts(job, slots)
            rate_O = rates(job, counts_OP) if len(counts_OP) else counts_OP.sum(axis=1) * 1.0
            if job.layouts is not None and len(counts_OP) and not rate_O.any():
                # No nodes of this cluster hold the model. With some workers, the job says what is missing.
                rate_O = rates(replace(job, layouts=None), counts_OP)
            self._entries[key] = (counts_OP, rate_O, complete)
        return self._entries[key]

    def forget_unused(self) -> None:
        """Drop entries that were not used since the last call."""
        self._entries = {key: entry for key, entry in self._entries.items() if key in self._used}
        self._used.clear()
