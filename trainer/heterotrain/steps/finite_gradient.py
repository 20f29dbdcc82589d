"""What becomes of a step whose loss or gradient is not finite; all ranks come to the same conclusion."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from heterotrain.errors import NonFinite
from heterotrain.network.control import StepDecision
from heterotrain.network.group import Group
from heterotrain.numerics.gate import Gate, PassedGate
from heterotrain.numerics.non_finite import Action, describe, remedy

if TYPE_CHECKING:
    from heterotrain.steps.step import Step

OVERFLOWED = "the gradient overflowed in fp16"


def read_gate(gate: Gate, group: Group | None) -> PassedGate:
    """Wait until the device has passed a step's gate.

    Raises:
        PeerLost: it was closed, and a sum may be a part.
    """
    with nullcontext() if group is None else group.named_wait("the accelerator, and the reductions queued on it"):
        passed = gate.read()
    if group is not None and not passed.was_open:
        group.check_whole()
    return passed


def reason_to_skip(step: Step, decision: StepDecision) -> str:
    """Return why a step that is not finite is skipped; empty if it is applied nevertheless.

    Raises:
        NonFinite: the training ends here.
    """
    action = step.numerics.non_finite_action()
    what = describe(
        step=step.number,
        ranks=decision.non_finite,
        gradient_of=None if decision.non_finite else step.reducer.first_non_finite() or "a part on another rank",
        history=step.numerics.losses,
    )
    step.context.non_finite(what, action)
    if action is Action.FAIL:
        scale = step.numerics.loss_scale if step.numerics.precision.scales_loss else None
        advice = remedy(loss_scale=scale, skipped=step.numerics.losses.skipped)
        step.context.fail(NonFinite(f"{what}. {advice}"))
    if action is Action.APPLY:
        return ""
    return OVERFLOWED if step.numerics.loss_scale > 1.0 else what
