"""Appoints the rank that does what has to happen once for the whole job, such as writing to an experiment tracker."""

from __future__ import annotations

import logging
from collections.abc import Callable

_log = logging.getLogger(__name__)

LeaderHook = Callable[[bool], None]


class Leadership:
    """Whether this rank is the leader, the lowest rank of the current formation; and hooks for changes of that.

    At no time are there two leaders among the members of a formation.

    Attributes:
        hooks: called with whether this rank is the leader now, when that has changed.
        leads: whether this rank is the leader; false on every rank while the leader is unknown.
    """

    def __init__(self, *, leads: bool | None) -> None:
        """Start with a leader that is known before the first formation; ``None`` where the members are not known yet.

        Pods start at any time, and some never take part. One chosen before the members have met could be missing, and
        nobody would lead.
        """
        self.hooks: list[LeaderHook] = []
        self.leads = bool(leads)
        self._is_known = leads is not None
        self._announced = False

    def asked(self) -> bool:
        """Return whether this rank is the leader, for the script; warn once if the leader is not known yet."""
        if not self._is_known:
            self._is_known = True
            _log.warning(
                "job.is_leader is False on every rank before the first step, because the members of the job are not "
                "known earlier: use @job.on_leader_change for what only the leader has to set up"
            )
        return self.leads

    def formed(self, rank: int) -> None:
        """Take note of this rank in a new formation, and call the hooks if this rank became or ceased to be leader."""
        self.leads, self._is_known = rank == 0, True
        if self.leads is not self._announced:
            self._announced = self.leads
            for hook in self.hooks:
                hook(self.leads)
