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
