"""Compares the data of all ranks of a formation before they train together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

from heterotrain.checkpoints.same_data import ADVICE, Description, describe, difference, names_of
from heterotrain.data.slices import Source
from heterotrain.errors import UsageError
from heterotrain.network.group import Group
from heterotrain.network.mesh.exchange import Purpose

_log = logging.getLogger(__name__)


class DataAgreement:
    """The description of this rank's data, and its comparison with those of the other ranks."""

    def __init__(self, source: Source, *, seed: int, purpose: Purpose = Purpose.LIBRARY) -> None:
        """Look at a few samples; ``purpose`` is that of the exchanges with other ranks."""
        self._source = source
        self._seed = seed
        self._purpose = purpose
        self._description = describe(source, seed=seed)
        self._trained = False

    def check(self, group: Group, fail: Callable[[Exception], NoReturn]) -> None:
        """Compare the data of all ranks.

        Args:
            group: the new formation's connections.
            fail: raises an error that all ranks have found, when all have.

        Raises:
            UsageError: they differ, and no rank has trained yet, or this one is new.
            PeerLost: the group broke meanwhile.
        """
        rows = group.gather_now(self._description.row(trained=self._trained), self._purpose)
        old = [rank for rank, row in enumerate(rows) if row[3]]
        first = old[0] if old else 0
        names = names_of(self._source)
        found = {rank: difference(rows[first], row, names) for rank, row in enumerate(rows)}
        others = {rank: what for rank, what in found.items() if what}
        if others and self._is_repeatable(group):
            what = "; ".join(f"rank {rank} has {each}" for rank, each in others.items())
            sentence = f"ranks have different data than rank {first}: {what}. {ADVICE}"
            if not old:
                fail(UsageError(sentence))
            if group.rank in others:
                raise UsageError(f"the job trains with other data: {sentence}")
            _log.warning("%s: they are refused", sentence)
        self._trained = True

    def _is_repeatable(self, group: Group) -> bool:
        """Return whether all ranks read the same samples a second time; else their differences mean nothing."""
        again: Description = describe(self._source, seed=self._seed)
        own, other = self._description.row(trained=False), again.row(trained=False)
        same = not difference(own, other, names_of(self._source))
        if all(row[0] for row in group.gather_now([float(same)], self._purpose)):
            return True
        _log.warning(
            "some rank reads other samples a second time, so whether ranks have the same data is not known: let random "
            "changes of samples draw from torch's, numpy's or Python's own generator"
        )
        return False
