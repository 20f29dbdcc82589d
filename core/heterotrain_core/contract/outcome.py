"""What a worker leaves behind as its termination message.

Exit code 0 alone says nothing: an evicted worker leaves with 0, too. A job succeeds only by ``finished``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum

MAX_MESSAGE_BYTES = 4096
"""The kubelet keeps this much of a termination message."""


class Ending(StrEnum):
    """How a worker ended."""

    FINISHED = "finished"
    """Every epoch is committed."""
    LEFT = "left"
    """It was told to go (SIGTERM, drain) and its peers know."""
    FAILED = "failed"
    """Its own fault: an exception in the script, a bad configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A worker's last word: how it ended, why in one sentence, and where the training stood (epoch, committed step)."""

    ending: Ending
    reason: str
    epoch: int
    step: int


def encode_outcome(outcome: Outcome) -> str:
    """Return the outcome as JSON that fits a termination message; a long reason is cut."""
    reason = outcome.reason
    while True:
        text = json.dumps({**asdict(outcome), "reason": reason}, sort_keys=True)
        excess = len(text.encode()) - MAX_MESSAGE_BYTES
        if excess <= 0:
            return text
        reason = reason[: max(0, len(reason) - excess - 1)] + "…" if len(reason) > excess + 1 else ""


def decode_outcome(text: str) -> Outcome | None:
    """Return the outcome, or ``None`` when the text is no outcome (a foreign or truncated message)."""
    try:
        raw = json.loads(text)
        return Outcome(
            ending=Ending(raw["ending"]), reason=str(raw["reason"]), epoch=int(raw["epoch"]), step=int(raw["step"])
        )
    except (ValueError, KeyError, TypeError):
        return None
