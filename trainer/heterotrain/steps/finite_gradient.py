"""Judges a step whose loss or gradient is not finite; all ranks come to the same conclusion."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from heterotrain.errors import NonFinite
from heterotrain.exchange.gate import Gate, PassedGate
from heterotrain.exchange.interface import Gradients
from heterotrain.network.control import StepDecision
from heterotrain.network.group import Group
from heterotrain.numerics.method import Numerics
from heterotrain.numerics.non_finite import Action, describe, remedy

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


def reason_to_skip(
    numerics: Numerics, gradients: Gradients, decision: StepDecision, *, step: int, note: Callable[[str, Action], None]
) -> str:
    """Return why a step that is not finite is skipped; empty if it is applied nevertheless.

    Args:
        numerics: of the job.
        gradients: the step's.
        decision: of all ranks.
        step: its number.
        note: gets what is not finite, and what becomes of it.

    Raises:
        NonFinite: the training ends here.
    """
    action = numerics.non_finite_action()
    what = describe(
        step=step,
        ranks=decision.non_finite,
        gradient_of=None if decision.non_finite else gradients.first_non_finite() or "a part on another rank",
        history=numerics.losses,
    )
    note(what, action)
    if action is Action.FAIL:
        scale = numerics.loss_scale if numerics.precision.scales_loss else None
        advice = remedy(loss_scale=scale, skipped=numerics.losses.skipped)
        raise NonFinite(f"{what}. {advice}")
    if action is Action.APPLY:
        return ""
    return OVERFLOWED if numerics.loss_scale > 1.0 else what
