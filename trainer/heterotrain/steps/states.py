"""How far a rank is with a step; ``transaction.py`` says what each change of state makes safe."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class StepState(Enum):
    """The states of a step, or of one of its passes, on this rank."""

    OPEN = auto()
    SENT = auto()
    VOTED = auto()
    APPLIED = auto()
    QUEUED = auto()
    BETWEEN = auto()
    COMMITTED = auto()
    REPEAT = auto()


@dataclass(frozen=True, slots=True)
class Transaction:
    """A step's state, with what belongs to it; a change of state is a new value.

    Attributes:
        state: of the step, or of its current pass.
        skip_reason: why the weights stay as they are; empty if they do not.
        failure: why the step is repeated, in ``REPEAT`` only.
        was_sent: whether the others had heard of this rank when it failed, in ``REPEAT`` only.
    """

    state: StepState = StepState.OPEN
    skip_reason: str = ""
    failure: Exception | None = None
    was_sent: bool = False

    @property
    def is_sent(self) -> bool:
        """Whether this rank has told the others that it finished its part, so that they may commit the step."""
        return self.was_sent or self.state not in (StepState.OPEN, StepState.REPEAT)


OPEN = Transaction()
ENDED = (StepState.QUEUED, StepState.COMMITTED)
"""A script is done with a step in these states."""


def after_gate(*, was_open: bool, is_cut: bool) -> StepState:
    """Return what becomes of a queued step when its gate has been read.

    Args:
        was_open: so that the weights have changed.
        is_cut: whether the formation is: then nobody goes on in it.

    Returns:
        ``COMMITTED``; ``REPEAT`` in the next formation; or ``QUEUED``: the gradient is not finite, so the gate was
        closed on every rank, and all of them vote against the step that follows, and repeat this one.
    """
    if was_open:
        return StepState.COMMITTED
    return StepState.REPEAT if is_cut else StepState.QUEUED
