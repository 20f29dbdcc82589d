"""Ranks on CPUs whose updates are queued behind a gate, as on GPUs, so that steps can be confirmed late."""

from __future__ import annotations

from typing import Any

from distributed.fault_injectors import FaultInjector
from heterotrain.exchange import gate as gates
from heterotrain.network.group import Group
from heterotrain.steps import observer, transaction
from heterotrain.steps.late import LateSteps

LATE_PLACES = ("gate", "confirming", "confirmed late")
"""Counted by the step that waits: before its gate is queued, and before and after it is confirmed."""


def queue_updates(fault: FaultInjector) -> None:
    """Put updates behind gates in this process, where fused optimizers of torch honour them, and measure no step.

    A fault at the place ``gate`` cuts the formation without a reason, which closes the gate.
    """
    confirm, examined = LateSteps.confirm, transaction._examined

    def confirmed(self: LateSteps) -> bool:
        number = -1 if self.queued is None else self.queued.step.task.number
        fault.at("confirming", number)
        found = confirm(self)
        fault.at("confirmed late", number)
        return found

    def examining(step: Any, *arguments: Any) -> Any:
        if fault.at("gate", step.task.number):
            step.group.cut("a false alarm")
        return examined(step, *arguments)

    gates.runs_behind = lambda _flats: True
    observer.is_measured = lambda _number, _every: False
    Group.is_queued = True  # type: ignore[method-assign,assignment]  # a deliberate replacement
    LateSteps.confirm, transaction._examined = confirmed, examining  # type: ignore[method-assign]  # a deliberate wrapper
