"""Plans of the cluster, decoded once each: most passes, reads of telemetry and allocations find the same plan again.

Decoding checks every value, which takes as long as half a pass. A plan never changes once it is decoded, so all of them
may share it, in any thread.
"""

from __future__ import annotations

from typing import Final

from heterotrain_core.contract.codec import Refused, decode_plan
from heterotrain_core.contract.plan import Plan

MOST_CHARACTERS: Final = 20_000_000
"""Length of the plans that are kept decoded, together: those of 2,000 jobs with ten workers."""


class DecodedPlans:
    """The newest plan of each job."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, Plan | Refused]] = {}
        self._characters = 0

    def decode(self, text: str, *, job_uid: str) -> Plan | Refused:
        """Return the plan, or why it is refused; see ``codec.decode_plan``."""
        known = self._known.get(job_uid)
        if known is not None and known[0] == text:
            return known[1]
        found = decode_plan(text, job_uid=job_uid)
        self._known[job_uid] = (text, found)
        self._characters += len(text) - (len(known[0]) if known is not None else 0)
        if self._characters > MOST_CHARACTERS:  # jobs come and go; those that are there are decoded again
            self._known, self._characters = {}, 0
        return found


_PLANS: Final = DecodedPlans()


def decoded(text: str, *, job_uid: str) -> Plan | Refused:
    """Return the plan of a job, or why it is refused, decoded at most once as long as it stays the same."""
    return _PLANS.decode(text, job_uid=job_uid)
