"""The transaction of a step: from the end of the last backward pass to the commit, on all ranks or on none.

``commit`` is that path in the order of time. It pauses once, where the script has the whole gradient and has not called
``step.apply``. A frozen ``Transaction`` (``states.py``) says how far this rank is. Errors say how the path ends early;
``Step.__exit__`` turns those that are nobody's fault into REPEAT. The changes of state, what makes each of them safe,
and who may rely on it:

OPEN to SENT: *this rank has computed its part.* Its buckets travel, and its vote follows them. The state changes before
    the vote's first byte leaves, because from then on others may commit the step with it. So a rank that fails in OPEN
    votes against the step, and one that fails later does not vote again: it leaves the formation. Nothing of its state
    has changed; in the next formation it takes over the state of a rank that has committed, if one has.

SENT to VOTED: *every rank has computed its part.* All ranks have the same votes and derive the same decision from them,
    so all come to VOTED or all repeat. Sums are complete, or the device's queue waits for them. A rank may rely on the
    others' votes and on nothing more: another one may be lost before it holds a sum. The script may look at gradients.

VOTED to APPLIED: *the weights change.* Where every rank holds the whole model, each goes on alone. A rank that is lost
    here leaves others behind that have the same decision, and one that has applied the step gives its state to those
    that have not (ADR 4). Where ranks hold different parts, nobody could repair another one, so all confirm first that
    they hold their sums, and a rank that loses its peers meanwhile keeps its sums and applies them late (ADR 21).
    On a GPU the update is queued behind a gate on the device, before the host knows how the sums have ended (ADR 53).
    Then APPLIED says "queued": nobody but the device may rely on it. Whoever reads the gate closed is back in VOTED,
    with every bit as it was.

APPLIED to QUEUED: *the host goes on* (ADR 63). Where nothing has to know at once (``Haste``), ``step.apply`` returns
    with the update in the device's queue, and the next step begins. Its passes see the new weights, or the old ones if
    the gate is closed. Its samples and seeds follow from the step that waits, and copies of buffers are kept from
    before both. Nothing else may rely on the step: whatever does, reads the gate first.

QUEUED to COMMITTED: *the gate was open.* It is read right before the vote on the next step, when that one's loss is
    known, so the device has passed it: the host does not wait. So a vote says that its rank has committed all steps
    before, ranks differ by one step at most, and a loss repeats one at most. A rank that needs to know earlier reads
    the gate earlier, alone: what it finds, all others find.

QUEUED to REPEAT: *nothing has happened.* Either the formation was cut. The rank cuts it, too, so that the device gets
    past the gate, and commits the step or goes back to before it; another rank may have committed it, and none the
    next one. Or the gradient is not finite. Then the gate was closed on all ranks. All vote against the step that
    follows, each with the number of steps that it has committed, and repeat this one, in which the host looks at the
    gradient, and names the parameter, skips or fails. If the numbers differ, the formation is over, and the newest
    state is passed on.

APPLIED to COMMITTED: *the sums are known to be whole and finite.* Either the host has looked before the update, or it
    has read the gate open. Progress, schedulers, logs and the generators' seeds follow in the same call. From here on
    checkpoints, hooks, plans and other ranks may rely on the step, and nothing repeats it. A skipped step comes here
    from VOTED: its samples count, its weights stay.

APPLIED to BETWEEN, and to OPEN again: *another pass over the micro-batches follows.* Weights and optimizers are copied
    before the first change, so that the step can still be repeated as a whole.

Any but COMMITTED to REPEAT: a peer is lost, another rank has voted against the step, or memory was short. The attempt
    is undone, and the iterator yields the same step with the same samples and random numbers. After SENT the others may
    have committed it; then the step that follows the next formation is the one after it.

"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from heterotrain.errors import EndedBefore, NonFinite, PeerLost, RepeatStep
from heterotrain.exchange.gate import Gate
from heterotrain.network.control import StepDecision
from heterotrain.numerics.fused import can_stay_behind
from heterotrain.state.prepared import Confirmation
from heterotrain.steps.agreement import Agreement
from heterotrain.steps.clipping import ClipLimits, clip
from heterotrain.steps.clock import Phase
from heterotrain.steps.columns import BEFORE, ENDS, MORE, SUMMED
from heterotrain.steps.finite_gradient import read_gate, reason_to_skip
from heterotrain.steps.result import GradientNorm, StepResult
from heterotrain.steps.states import StepState, Transaction
from heterotrain.steps.step_passes import StepPasses
from heterotrain.steps.summed_loss import check_alike
from heterotrain.steps.usage import refuse_other_pass


class Updates(NamedTuple):
    """The arguments of ``step.apply``."""

    optimizers: Sequence[torch.optim.Optimizer]
    limits: ClipLimits


class QueuedUpdate(NamedTuple):
    """An update behind a gate.

    Attributes:
        rates: learning rates, by group.
        is_known: whether the gate knows the norm of the gradient, because the script has not changed it since.
    """

    rates: tuple[float, ...]
    is_known: bool


class SummedGradient(NamedTuple):
    """What the host knows of a step's sums.

    Attributes:
        gate: tells on the device whether they are whole and finite, and has not been read; ``None`` if there is none.
        skip_reason: why they are not applied; empty if they are.
        squared: squared norm of the gradient; ``None`` where it is unknown.
    """

    gate: Gate | None
    skip_reason: str
    squared: float | None = None


def commit(step: StepPasses, together: Agreement) -> Generator[None, Updates, StepResult]:
    """Commit a step, or end one of its passes; see the module.

    Args:
        step: this rank has computed its part of it.
        together: what the ranks of the formation do together.

    Yields:
        Once, when the parameters have the gradient of the global batch; takes the arguments of ``step.apply``.

    Returns:
        What the step did.

    Raises:
        PeerLost: the group broke meanwhile.
        RepeatStep: another rank voted against the step.
        NonFinite: loss or gradient is not finite, and the job is to fail then.
        OutOfMemory: the update has no room.
        UsageError: gradients were changed on the way, or ranks have done different things.
    """
    part, exchange, task, clock, before = step.part, step.reducer, step.task, step.clock, step.transaction.skip_reason
    second = part.second_phase

    # OPEN to SENT, and to VOTED: exchange votes, and wait for the sums, or queue that
    began = clock.now()
    exchange.check_untouched()
    step.transaction = Transaction(StepState.SENT, before)
    decision = together.vote(step, ok=True)
    clock.spent(Phase.SYNC, began)
    _check(decision, task.number)
    if step.more:
        step.attempts.keep_weights()
    sums = _examined(step, together, decision, before)
    exchange.remember()
    if (hooks := exchange.script_hooks).resting:
        if sums.skip_reason:
            hooks.wake()
        else:
            hooks.call()
            sums = sums._replace(squared=None)  # they may have changed the gradient
    step.transaction = Transaction(StepState.VOTED, sums.skip_reason)

    updates = yield  # the script may look at gradients and change them

    # VOTED to APPLIED: all confirm the sums of a divided model; change the weights, or queue that
    reserve = part.reserve()  # kept until every rank has committed
    try:
        if second is not None:
            began = clock.now()
            late = partial(_finish_late, step, together, decision=decision, updates=updates, sums=sums)
            confirmation = together.confirm(step, second, decision, None if step.more else late)
            sums = _accepted(step, together, decision, sums, confirmation)
            clock.spent(Phase.SYNC, began)
    finally:
        reserve.clear()
    applied = None
    if sums.gate is not None:
        queued = _queue(sums.gate, step, updates)
        if queued is not None and together.may_wait(step, decision, changed=not queued.is_known):
            return _go_on(sums.gate, step, together, decision, queued)
        sums, applied = _read(sums, step, together, decision, queued)
    norm, rates = applied or _apply(step, updates, sums)

    # APPLIED to COMMITTED: record the step with everything that belongs to it
    if step.more:
        step.transaction = Transaction(StepState.BETWEEN, sums.skip_reason)
    else:
        step.transaction = Transaction(StepState.COMMITTED, sums.skip_reason)
        together.commit(step, decision)
    return StepResult(
        loss=math.nan if decision.loss is None else decision.loss, learning_rates=rates, samples=task.batch_samples,
        weight=decision.weight, _skip_reason=sums.skip_reason, _norm=norm,
    )  # fmt: skip


def _check(decision: StepDecision, number: int) -> None:
    """Go on where all ranks have voted for the step; see ``commit`` for the errors."""
    agreed = decision.agreed
    if agreed[ENDS] == BEFORE:
        raise EndedBefore
    if decision.apart:
        raise PeerLost("ranks have committed different numbers of steps")
    if not decision.committed:  # a rank that votes against the step may not know yet whether a pass follows
        raise RepeatStep("a rank could not finish its part, or the step before")
    if not agreed[MORE]:
        refuse_other_pass(number)
    if agreed[SUMMED]:
        check_alike(agreed[SUMMED], step=number)


def _examined(step: StepPasses, together: Agreement, decision: StepDecision, skip_reason: str) -> SummedGradient:
    """Scale the gradient and have it tested: on an accelerator, where ``_apply_behind`` reads the result."""
    exchange, measurement, gate = step.reducer, step.measurement, None
    if decision.non_finite and not skip_reason:  # a step is skipped as a whole
        skip_reason = _judged(step, together, decision)
    if not skip_reason:
        factor = step.task.batch_samples / decision.weight if decision.weight > 0 else 0.0
        factor /= step.numerics.loss_scale
        if factor != 1.0:
            exchange.scale(factor)
        gate = None if decision.non_finite else exchange.gate()
    sums = SummedGradient(gate, skip_reason)
    if gate is None or step.more or step.passes or exchange.script_hooks.resting:
        sums, _ = _look(step, together, decision, sums)
    if measurement is not None and gate is not None:
        measurement.reduced(gate.squared)
    elif measurement is not None and not sums.skip_reason:
        sums = sums._replace(squared=float(measurement.reduced()))
    return sums


def _look(
    step: StepPasses, together: Agreement, decision: StepDecision, sums: SummedGradient
) -> tuple[SummedGradient, bool]:
    """Wait until the sums are known to be whole; return what they are, and whether there was a gate, and it was open.

    Raises:
        PeerLost: a sum may be a part.
        NonFinite: the gradient is not finite, and the job is to fail then.
    """
    is_open, squared, skip_reason = False, sums.squared, sums.skip_reason
    if sums.gate is not None:
        is_open, squared = read_gate(sums.gate, step.group)
    elif step.group is not None:
        step.group.finish_device()
    # Ranks of a divided model know their own parts only; they compare them in the second phase.
    is_tested = is_open or bool(skip_reason) or bool(decision.non_finite)
    if not (is_tested or step.part.second_phase is not None or step.reducer.is_finite()):
        skip_reason = _judged(step, together, decision)
    return SummedGradient(None, skip_reason, squared), is_open


def _judged(step: StepPasses, together: Agreement, decision: StepDecision) -> str:
    """Return why this step, which is not finite, is skipped; empty if it is applied nevertheless.

    Raises:
        NonFinite: the job is to fail then.
    """
    try:
        return reason_to_skip(step.numerics, step.reducer, decision, step=step.number, note=together.non_finite)
    except NonFinite as error:
        together.fail(error)


def _accepted(
    step: StepPasses, together: Agreement, decision: StepDecision, sums: SummedGradient, confirmation: Confirmation
) -> SummedGradient:
    """Return the sums with what all ranks together know of the gradient of a divided model.

    Raises:
        NonFinite: the gradient is not finite, and the job is to fail then.
    """
    if confirmation.is_finite or sums.skip_reason:
        return sums
    return sums._replace(skip_reason=_judged(step, together, decision))


def _apply(step: StepPasses, updates: Updates, sums: SummedGradient) -> tuple[GradientNorm, tuple[float, ...]]:
    """Update the model, or skip that; return the norm of the gradient and the learning rates."""
    began, numerics, samples = step.clock.now(), step.numerics, step.task.global_batch_samples
    if sums.skip_reason:
        norm, rates = (
            GradientNorm(step.reducer, norm=math.nan),
            numerics.skip(updates.optimizers, global_batch_samples=samples),
        )
    else:
        numerics.forward_state.finish()
        norm = clip(step.reducer, sums.squared, updates.limits)
        if step.more:
            step.attempts.weights.keep_optimizers(updates.optimizers)
        step.reducer.lay_out()
        step.transaction = Transaction(StepState.APPLIED)
        rates = numerics.update(updates.optimizers, global_batch_samples=samples)
    step.clock.spent(Phase.UPDATE, began)
    return norm, rates


def _queue(gate: Gate, step: StepPasses, updates: Updates) -> QueuedUpdate | None:
    """Queue the update behind the sums; ``None`` where the host has to look first."""
    exchange, (clip_norm, clip_value) = step.reducer, updates.limits
    exchange.check_kept()
    changed = clip_norm is not None and exchange.take_back()
    if changed or clip_value is not None or not can_stay_behind(updates.optimizers):
        return None
    began, is_known = step.clock.now(), gate.is_current
    step.transaction = Transaction(StepState.APPLIED)
    if clip_norm is not None:
        gate.clip(clip_norm)
    exchange.lay_out()
    samples = step.task.global_batch_samples
    rates = step.numerics.update(updates.optimizers, global_batch_samples=samples, gate=gate)
    step.clock.spent(Phase.UPDATE, began)
    return QueuedUpdate(rates, is_known)


def _go_on(
    gate: Gate, step: StepPasses, together: Agreement, decision: StepDecision, queued: QueuedUpdate
) -> StepResult:
    """Let the next step begin; what the host does not know yet, the result finds out when it is asked."""

    def reason() -> str:
        return step.transaction.skip_reason if step.committed else "the step is repeated"

    step.numerics.forward_state.finish()  # copies from before the step take it back
    step.transaction = Transaction(StepState.QUEUED)
    together.queue(step, decision, gate)
    loss, samples = math.nan if decision.loss is None else decision.loss, step.task.batch_samples
    norm, weight = GradientNorm(step.reducer, gate=gate), decision.weight
    return StepResult(
        loss=loss, learning_rates=queued.rates, samples=samples, weight=weight, _skip_reason=reason, _norm=norm
    )


def _read(
    sums: SummedGradient, step: StepPasses, together: Agreement, decision: StepDecision, queued: QueuedUpdate | None
) -> tuple[SummedGradient, tuple[GradientNorm, tuple[float, ...]] | None]:
    """Wait for the gate, while the device goes on with an update that is queued behind it.

    As ``_apply``, but ``None`` if nothing has changed yet, and the host now knows what the gradient is.
    """
    sums, was_open = _look(step, together, decision, sums)
    if queued is None:
        return sums, None
    if not was_open:
        step.transaction = Transaction(StepState.VOTED, sums.skip_reason)
        return sums, None
    step.numerics.forward_state.finish()
    norm = math.sqrt(sums.squared) if queued.is_known and sums.squared is not None else None
    return sums, (GradientNorm(step.reducer, norm=norm), queued.rates)


def _finish_late(
    step: StepPasses,
    together: Agreement,
    confirmation: Confirmation,
    *,
    decision: StepDecision,
    updates: Updates,
    sums: SummedGradient,
) -> None:
    """Apply the step with the sums that this rank has kept, now that it is known that every rank could."""
    sums = _accepted(step, together, decision, sums, confirmation)
    _apply(step, updates, sums)
    step.transaction = Transaction(StepState.COMMITTED, sums.skip_reason)
