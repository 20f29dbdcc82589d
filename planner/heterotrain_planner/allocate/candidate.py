"""A job with all its options: the input of every search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from heterotrain_planner.allocate.problem import JobDemand, Size
from heterotrain_planner.allocate.value import Floats, Ints, Option

Choice = tuple[Option | None, ...]
"""One option for each candidate, ``None`` for a job that waits."""
Need = Mapping[tuple[str, Size], int]
"""Workers by pool and size."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job with its options, best first; the sequence of candidates is the order of admission.

    Attributes:
        job: the demand.
        options: its options.
        complete: whether these are all that limits and slots allow.
    """

    job: JobDemand
    options: tuple[Option, ...]
    complete: bool = True
    _smallest: list[Option] = field(default_factory=list, compare=False, repr=False)
    _by_counts: dict[tuple[int, ...], Option] = field(default_factory=dict, compare=False, repr=False)
    _arrays: list[tuple[Ints, Floats]] = field(default_factory=list, compare=False, repr=False)
    _needs: dict[tuple[int, ...], dict[tuple[str, Size], int]] = field(default_factory=dict, compare=False, repr=False)

    def need(self, option: Option | None) -> Need:
        """Return the workers of an option by pool and size."""
        if option is None:
            return {}
        if option.counts not in self._needs:
            self._needs[option.counts] = need_of(self.job, option.counts)
        return self._needs[option.counts]

    @property
    def smallest_first(self) -> Sequence[Option]:
        """The options with the fewest workers first; of equally many, the best first."""
        if not self._smallest:
            self._smallest.extend(sorted(self.options, key=lambda option: (sum(option.counts), -option.score)))
        return self._smallest

    @property
    def arrays(self) -> tuple[Ints, Floats]:
        """The options' workers (``counts_OP``, one row each) and scores (``score_O``), in the order of options."""
        if not self._arrays:
            counts = np.array([option.counts for option in self.options], dtype=np.int64)
            scores = np.array([option.score for option in self.options], dtype=float)
            self._arrays.append((counts.reshape(len(scores), len(self.job.pools)), scores))
        return self._arrays[0]

    @property
    def by_counts(self) -> Mapping[tuple[int, ...], Option]:
        """The options by their numbers of workers."""
        if not self._by_counts:
            self._by_counts.update((option.counts, option) for option in self.options)
        return self._by_counts

    def index_of(self, counts: tuple[int, ...]) -> int:
        """Return the position of the job's option with these workers; only a few are ever looked up."""
        return int((self.arrays[0] == counts).all(axis=1).argmax())


def need_of(job: JobDemand, counts: Sequence[int]) -> dict[tuple[str, Size], int]:
    """Return a job's workers by pool and size, from those by its pools."""
    found: dict[tuple[str, Size], int] = {}
    for job_pool, count in zip(job.pools, counts, strict=True):
        if count:
            found[job_pool.pool, job_pool.size] = found.get((job_pool.pool, job_pool.size), 0) + count
    return found
