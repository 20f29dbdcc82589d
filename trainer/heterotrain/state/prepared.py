"""A step of a divided model that this rank can finish, although it has not heard whether all others can.

Where every rank holds the whole model, a rank that missed the end of a step takes over the state of one that did not.
Nobody holds the whole of a divided state. So a step has two phases: each rank reports that it holds the sums of all its
own pieces, and applies them only when every rank has reported. A rank that loses its peers in between keeps its sums.
It applies them late if some rank has applied the step, because then all ranks had reported. If no surviving rank has,
the step is repeated: no part of the state has changed. (Two-phase commit with the survivors' vote as the recovery
rule: Gray 1978, Skeen 1981.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What all ranks together know of a step's gradient.

    Attributes:
        squared: squared norm over the whole model.
        is_finite: whether all of it is finite.
    """

    squared: float
    is_finite: bool


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step whose sums this rank holds.

    Attributes:
        number: committed steps before it.
        finish: applies and commits it.
        drop: undoes what the attempt has changed; it is repeated.
    """

    number: int
    finish: Callable[[Confirmation], None]
    drop: Callable[[], None]


@dataclass(frozen=True, slots=True)
class LastSteps:
    """What a rank of a new formation knows of its last steps.

    Attributes:
        steps: committed steps; -1 without a state.
        prepared: number of the step that it is prepared to finish; -1 for none.
        confirmed: number of the step whose confirmation it has; -1 for none.
        confirmation: of that step.
    """

    steps: int
    prepared: int = -1
    confirmed: int = -1
    confirmation: Confirmation = Confirmation(0.0, is_finite=True)


def decide_late(reports: Sequence[LastSteps]) -> Confirmation | None:
    """Return the confirmation with which prepared ranks apply their step late; ``None`` if they repeat it.

    It is the newest step that any rank is prepared for, if some rank has committed it. Ranks that are prepared for an
    older step were away for longer; they repeat nothing and take over what the others have.

    Args:
        reports: of all ranks of the new formation.
    """
    newest = max(report.prepared for report in reports)
    if newest < 0 or max(report.steps for report in reports) != newest + 1:
        return None
    return next((report.confirmation for report in reports if report.confirmed == newest == report.steps - 1), None)
