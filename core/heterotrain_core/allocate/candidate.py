"""A job with everything that it may have: what every search chooses from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from heterotrain_core.allocate.problem import JobDemand, Size
from heterotrain_core.allocate.value import Floats, Ints, Option

NOTHING = 1e-9
"""Scores that differ by less are equal."""

Choice = tuple[Option | None, ...]
Need = Mapping[tuple[str, Size], int]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job with its options, best first; the sequence of candidates is the order of admission."""

    job: JobDemand
    options: tuple[Option, ...]
    _smallest: list[Option] = field(default_factory=list, compare=False, repr=False)
    _by_counts: dict[tuple[int, ...], Option] = field(default_factory=dict, compare=False, repr=False)
    _arrays: list[tuple[Ints, Floats]] = field(default_factory=list, compare=False, repr=False)
    _places: dict[tuple[int, ...], int] = field(default_factory=dict, compare=False, repr=False)
    _needs: dict[tuple[int, ...], dict[tuple[str, Size], int]] = field(default_factory=dict, compare=False, repr=False)

    def need(self, option: Option | None) -> Need:
        """Return the workers of an option by pool and size."""
        if option is None:
            return {}
        found = self._needs.get(option.counts)
        if found is None:
            found = self._needs[option.counts] = {}
            for offer, count in zip(self.job.offers, option.counts, strict=True):
                if count:
                    found[offer.pool, offer.size] = found.get((offer.pool, offer.size), 0) + count
        return found

    @property
    def smallest(self) -> Sequence[Option]:
        """The options with the fewest workers first, the best of as many first."""
        if not self._smallest:
            self._smallest.extend(sorted(self.options, key=lambda option: (sum(option.counts), -option.score)))
        return self._smallest

    @property
    def arrays(self) -> tuple[Ints, Floats]:
        """The options' workers, one row each (``counts_OP``), and their scores (``score_O``), in the order of the options."""
        if not self._arrays:
            counts = np.array([option.counts for option in self.options], dtype=np.int64)
            scores = np.array([option.score for option in self.options], dtype=float)
            self._arrays.append((counts.reshape(len(scores), len(self.job.offers)), scores))
        return self._arrays[0]

    @property
    def by_counts(self) -> Mapping[tuple[int, ...], Option]:
        """The options by their workers."""
        if not self._by_counts:
            self._by_counts.update((option.counts, option) for option in self.options)
        return self._by_counts

    def place_of(self, option: Option) -> int:
        """Return where an option of this job is among its options."""
        if not self._places:
            self._places.update((each.counts, k) for k, each in enumerate(self.options))
        return self._places[option.counts]

    def freed(self, option: Option | None) -> dict[tuple[str, Size], int]:
        """Return the same as negative numbers: what becomes free without it."""
        return {key: -count for key, count in self.need(option).items()}


def difference(candidate: Candidate, before: Option | None, after: Option | None) -> dict[tuple[str, Size], int]:
    """Return what changes for the pools when a job goes from one option to another."""
    step = dict(candidate.need(after))
    for key, count in candidate.need(before).items():
        step[key] = step.get(key, 0) - count
    return {key: count for key, count in step.items() if count}
