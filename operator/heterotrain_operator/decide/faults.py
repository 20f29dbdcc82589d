"""Unexpected errors in parts of a pass, as values: the other parts still decide, and the status reports the error.

Whatever is computed from a tenant's data may meet a case that nobody has thought of. Membership, drain and pods must
not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from heterotrain_operator.api.conditions import ConditionType, ConditionValue, set_conditions
from heterotrain_operator.api.status import HeteroTrainJobStatus
from heterotrain_operator.api.text import quoted

INTERNAL_ERROR = "InternalError"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An unexpected error in one part of a pass.

    Attributes:
        part: what could not be computed, such as ``shares``.
        error: the exception.
        instead: what happens to the job, in one clause.
    """

    part: str
    error: Exception
    instead: str

    @property
    def sentence(self) -> str:
        """What happened and what to do, in one sentence of bounded length."""
        return (
            f"the operator failed to compute {self.part} ({type(self.error).__name__}: {quoted(str(self.error))}): "
            f"{self.instead}; this is a bug of the operator: report it with the traceback from the operator's log"
        )


class Faults:
    """Collects the unexpected errors of one pass."""

    def __init__(self) -> None:
        self.found: list[Fault] = []

    def guard(self, part: str, compute: Callable[[], _T], otherwise: Callable[[], _T], *, instead: str) -> _T:
        """Return a result; after an unexpected error, note it and return another one.

        Args:
            part: of the pass, for the sentence.
            compute: returns the result.
            otherwise: returns the result to use after an error.
            instead: what the other result means for the job, in one clause.
        """
        try:
            return compute()
        except Exception as error:  # noqa: BLE001  # reported, counted and logged by the caller
            self.found.append(Fault(part=part, error=error, instead=instead))
            return otherwise()

    @property
    def sentence(self) -> str:
        """The first error in one sentence; empty without one."""
        return self.found[0].sentence if self.found else ""


def with_fault(status: HeteroTrainJobStatus, sentence: str, *, generation: int, now: str) -> HeteroTrainJobStatus:
    """Return a status that reports an unexpected error: the job is stalled. An ended job stays as it ended."""
    holds = {condition.type for condition in status.conditions if condition.status == "True"}
    if holds & {ConditionType.SUCCEEDED.value, ConditionType.FAILED.value}:
        return status
    values = [
        ConditionValue(kind, kind is ConditionType.STALLED, INTERNAL_ERROR, sentence)
        for kind in (ConditionType.READY, ConditionType.RECONCILING, ConditionType.STALLED)
    ]
    changed = {
        condition.type: condition
        for condition in set_conditions(status.conditions, values, generation=generation, now=now)
    }
    kept = [changed.pop(condition.type, condition) for condition in status.conditions]
    return status.model_copy(update={"conditions": (*kept, *changed.values()), "reason": sentence})
