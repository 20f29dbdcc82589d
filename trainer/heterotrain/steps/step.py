"""One step as a transaction: committed by all ranks or by none.

``with step:`` suppresses errors that are not the script's fault: a lost peer, another rank's vote, too little memory.
The iterator then yields the same step again, with the same samples, random numbers and buffers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from traceback import clear_frames
from types import TracebackType
from typing import NoReturn, Protocol, Self

import torch

from heterotrain.errors import NonFinite, PeerLost, RepeatStep, UsageError, drop_frames
from heterotrain.exchange.gate import Gate
from heterotrain.network.control import BEFORE, StepDecision
from heterotrain.numerics.fused import can_stay_behind
from heterotrain.numerics.non_finite import Action
from heterotrain.numerics.out_of_memory import out_of_memory
from heterotrain.parts.interface import SecondPhase
from heterotrain.state.admission import plain_numbers
from heterotrain.state.prepared import Confirmation
from heterotrain.steps.clipping import ClipLimits, clip
from heterotrain.steps.clock import Phase
from heterotrain.steps.finite_gradient import read_gate, reason_to_skip
from heterotrain.steps.result import GradientNorm, StepResult
from heterotrain.steps.step_passes import PassContext, StepPasses
from heterotrain.steps.summed_loss import check_alike
from heterotrain.steps.task import Task
from heterotrain.steps.usage import check_apply, check_same_pass

_log = logging.getLogger(__name__)


class StepContext(PassContext, Protocol):
    """What a step needs of the loop around it (``steps.loop``)."""

    def look_ahead(self, task: Task) -> bool:
        """Load samples of the next step while the device computes; return whether any were loaded."""

    def vote(self, step: Step, *, ok: bool) -> StepDecision:
        """Exchange the control vectors and wait for the buckets; raises ``PeerLost``."""

    def confirm(
        self, step: Step, second: SecondPhase, decision: StepDecision, finish: Callable[[Confirmation], None] | None
    ) -> Confirmation:
        """Run the second phase; ``finish`` may end the step later if its result is unknown. Raises ``PeerLost``."""

    def commit(self, step: Step, decision: StepDecision) -> None:
        """Record a step that all ranks finished."""

    def fail(self, error: Exception) -> NoReturn:
        """Raise an error that all ranks have found in the same step, when all of them have."""

    def non_finite(self, what: str, action: Action) -> None:
        """Report a step whose loss or gradient is not finite."""

    def open_exchanges(self, *, are_open: bool) -> None:
        """Allow or refuse exchanges of the script with other ranks."""

    def leave_pass(self, reason: str) -> None:
        """Leave a forward or backward pass in the middle, on all ranks of this rank's member."""


@dataclass(slots=True)
class Step(StepPasses):
    """One step of the training loop.

    Attributes:
        is_retry: whether this is another attempt at a step that this rank has tried before.
        is_undone: whether nobody commits this step, because the script of some rank has ended the training before it.
    """

    context: StepContext
    is_retry: bool = False
    failure: Exception | None = None
    is_undone: bool = False
    logged: dict[str, float] = field(default_factory=dict)
    _skip_reason: str = ""
    _gate: Gate | None = None
    _exchanges_before: int = 0

    def apply(
        self, *optimizers: torch.optim.Optimizer, clip_norm: float | None = None, clip_value: float | None = None
    ) -> StepResult:
        """Reduce the gradient over all ranks, clip it, update the model and advance; return what the step did.

        After a loop over ``step.micro_batches(more=True)``, update the model, but do not end the step. Then the result
        is that of this pass.

        A step whose loss or gradient is not finite never changes the weights, unless the job ignores it. The job fails
        or skips the step, as configured, on all ranks. In fp16, it is skipped and the loss scale halved. A skipped step
        (``step.skipped``) is committed with its samples like any other step.

        Args:
            optimizers: the optimizers from ``job.optimizer`` that take a step, one after the other; at least one.
            clip_norm: upper limit for the norm of the step's gradient; ``None`` for no limit.
            clip_value: upper limit for the magnitude of the gradient's elements, applied after ``clip_norm``; ``None``
                for no limit.

        Raises:
            NonFinite: loss or gradient is not finite, and the job is to fail then; or too many steps were skipped.
            UsageError: a micro-batch had no ``step.backward``, the step or pass was applied before, no optimizer or an
                unknown one was passed, or a limit is not above 0.
        """
        check_apply(
            step=self.task.number, optimizers=len(optimizers), is_applied=self.committed or self._applied,
            backwards=self._counts.backwards, expected=self._counts.expected,
            limits={"clip_norm": clip_norm, "clip_value": clip_value},
        )  # fmt: skip
        self._begin()
        reserve = self.part.reserve()  # kept until every rank has committed
        try:
            decision = self._reduce()
            limits = (clip_norm, clip_value)
            update = partial(self._update, optimizers, limits)
            if (second := self.part.second_phase) is not None:
                began = self.clock.now()
                finish = None if self.more else partial(self._finish_late, decision, update)
                self._accept(self.context.confirm(self, second, decision, finish), decision)
                self.clock.spent(Phase.SYNC, began)
        finally:
            reserve.clear()
        done = None if self._gate is None else self._queue_update(self._gate, decision, optimizers, limits)
        if done is None:
            began = self.clock.now()
            done = update()
            self.clock.spent(Phase.UPDATE, began)
        norm, rates = done
        self._applied = True
        if self.more:
            self.updates = False
        else:
            self.committed = True
            self.context.open_exchanges(are_open=False)  # a step that is committed is not repeated
            self.context.commit(self, decision)
        return StepResult(
            loss=math.nan if decision.loss is None else decision.loss, learning_rates=rates,
            samples=self.task.batch_samples, weight=decision.weight,
            skip_reason=self._skip_reason, _norm=norm,
        )  # fmt: skip

    def _update(
        self, optimizers: Sequence[torch.optim.Optimizer], limits: ClipLimits
    ) -> tuple[GradientNorm, tuple[float, ...]]:
        """Update the model, or skip that; return the norm of the gradient and the learning rates."""
        batch_samples = self.task.global_batch_samples
        if self.skipped:
            rates = self.numerics.skip(optimizers, global_batch_samples=batch_samples)
            return GradientNorm(self.reducer, norm=math.nan), rates
        self.numerics.forward_state.finish()
        norm = clip(self.reducer, self._squared, limits)
        if self.more:
            self.attempts.weights.keep_optimizers(optimizers)
        self.updates = True
        return norm, self.numerics.update(optimizers, global_batch_samples=batch_samples)

    def _queue_update(
        self, gate: Gate, decision: StepDecision, optimizers: Sequence[torch.optim.Optimizer], limits: ClipLimits
    ) -> tuple[GradientNorm, tuple[float, ...]] | None:
        """Queue the update behind the sums, then wait for the gate between them: the device goes on meanwhile.

        As ``_update``, but ``None`` if nothing has changed yet, and the host now knows what the gradient is.
        """
        reducer, batch_samples, (clip_norm, clip_value) = self.reducer, self.task.global_batch_samples, limits
        reducer.check_kept()
        changed = clip_norm is not None and reducer.take_back()
        if changed or clip_value is not None or not can_stay_behind(optimizers):
            self._settle(decision)
            return None
        began, is_known, self.updates = self.clock.now(), gate.is_current, True
        if clip_norm is not None:
            gate.clip(clip_norm)
        rates = self.numerics.update(optimizers, global_batch_samples=batch_samples, gate=gate)
        self.clock.spent(Phase.UPDATE, began)
        if not self._settle(decision):
            self.updates = False
            return None
        self.numerics.forward_state.finish()
        norm = math.sqrt(self._squared) if is_known and self._squared is not None else None
        return GradientNorm(reducer, norm=norm), rates

    def _settle(self, decision: StepDecision) -> bool:
        """Find out whether the sums are whole and the step is skipped; return whether a gate was open.

        Raises:
            PeerLost: a sum may be a part.
            NonFinite: the gradient is not finite, and the job is to fail then.
        """
        gate, self._gate = self._gate, None
        is_open = False
        if gate is not None:
            is_open, self._squared = read_gate(gate, self.group)
        elif self.group is not None:
            self.group.finish_device()
        # Ranks of a divided model know their own parts only; they compare them in the second phase.
        is_tested = is_open or self.skipped or bool(decision.non_finite) or self.part.second_phase is not None
        if not (is_tested or self.reducer.is_finite()):
            self._skip_reason = self._reason_to_skip(decision)
        self.skipped = bool(self._skip_reason)
        return is_open

    def _reason_to_skip(self, decision: StepDecision) -> str:
        """Return why this step, which is not finite, is skipped; empty if it is applied nevertheless.

        Raises:
            NonFinite: the job is to fail then.
        """
        try:
            return reason_to_skip(self.numerics, self.reducer, decision, step=self.number, note=self.context.non_finite)
        except NonFinite as error:
            self.context.fail(error)

    def _accept(self, confirmation: Confirmation, decision: StepDecision) -> None:
        """Take over what all ranks know of the gradient of a divided model.

        Raises:
            NonFinite: the gradient is not finite, and the job is to fail then.
        """
        if not confirmation.is_finite and not self._skip_reason:
            self._skip_reason = self._reason_to_skip(decision)
            self.skipped = bool(self._skip_reason)

    def _finish_late(self, decision: StepDecision, update: Callable[[], object], confirmation: Confirmation) -> None:
        """Apply the step with the sums that this rank has kept, now that it is known that every rank could."""
        self._accept(confirmation, decision)
        update()
        self._applied = self.committed = True

    def log(self, **values: float) -> None:
        """Report values of this step (numbers, or tensors with one element); a repeated step drops them.

        Raises:
            UsageError: a value is not a number.
        """
        self.logged.update(plain_numbers("step.log", values))

    def __enter__(self) -> Self:
        self.is_open = True
        self.context.open_exchanges(are_open=True)
        self._exchanges_before = 0 if self.group is None else self.group.script.started
        self.numerics.batch_norm_context.enter(
            self.group, micro_batches=len(self._counts.sizes),
            is_short=self.task.batch_samples < self.task.global_batch_samples,
        )  # fmt: skip
        self.context.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._counts.leave_forward()
        self.is_open = False
        if not self.committed:
            self.context.open_exchanges(are_open=False)
        self.numerics.batch_norm_context.leave()
        if error is None:
            if not self.committed:
                raise UsageError(
                    f"step {self.number} ended without step.apply(optimizer): call it after the "
                    + (
                        "last loop over step.micro_batches(), the one without more=True"
                        if self.more
                        else "loop over step.micro_batches(), in every step. To accumulate gradients, set a larger "
                        "global batch: a share is cut into micro-batches, and a step is one update"
                    )
                )
            return False
        if self.committed or not isinstance(error, Exception):
            return False
        if self.task.is_joint and not isinstance(error, RepeatStep):
            self.context.leave_pass(f"a rank of the member left the pass: {error}")
        if isinstance(error, PeerLost | RepeatStep):
            self.failure = error
        elif (self.more or not self.updates) and (memory := out_of_memory(error)) is not None:
            clear_frames(
                trace
            )  # the vote must not wait for memory that they hold: the interpreter keeps them till then
            drop_frames(error)
            self.failure = memory
            self._vote_to_repeat()
        elif isinstance(error, RuntimeError) and self._is_broken:
            self.failure = PeerLost(str(error))  # a collective inside the model failed with the formation
        else:
            return False
        drop_frames(error)
        if not self.is_undone:
            _log.info("step %d is repeated: %s", self.task.number, error)
        return True

    def withdraw(self) -> None:
        """Vote against the step without computing it, because the script has ended the training before it."""
        self.is_undone = True
        with self:
            self._begin()
            self._reduce_nothing()
            self._vote(ok=False)
            raise RepeatStep("the script has ended the training")

    def _vote_to_repeat(self) -> None:
        """Vote against the step after running out of memory, if peers may have sent something of this pass."""
        if self.task.is_joint:
            return  # the other ranks of the member have left the pass with this one
        is_sent = self._counts.backwards > 0 and self._counts.backwards == self._counts.expected
        if self.is_awaited or not (is_sent or self.passes):
            return  # a vote comes too late, or nothing of this step has been sent yet
        try:
            if is_sent:
                self.reducer.flush()
            else:  # the peers wait in this pass; this rank would begin again with the first one
                self._reduce_nothing()
            self._vote(ok=False)
        except PeerLost as lost:
            drop_frames(lost)
            self.failure = lost

    @property
    def is_awaited(self) -> bool:
        """Whether the others may have committed the step or wait for an exchange, so that a vote comes too late."""
        return self.voted or self.has_exchanged

    @property
    def has_exchanged(self) -> bool:
        """Whether the script has exchanged data with other ranks since the step began."""
        return self.group is not None and self.group.script.started != self._exchanges_before

    def _vote(self, *, ok: bool) -> StepDecision:
        self.voted = ok
        return self.context.vote(self, ok=ok)

    def _reduce(self) -> StepDecision:
        """Vote, and wait until the parameters have the gradient of the global batch; only the first call does it.

        Raises:
            PeerLost: the group broke meanwhile.
            RepeatStep: another rank voted against the step.
            NonFinite: loss or gradient is not finite, and the job is to fail then.
            UsageError: gradients were changed on the way.
        """
        if self._decision is not None:
            return self._decision
        if not self._counts.handed_out:
            self._reduce_nothing()
        self._look_ahead()
        began = self.clock.now()
        self.reducer.check_untouched()
        decision = self._vote(ok=True)
        self.clock.spent(Phase.SYNC, began)
        check_same_pass(step=self.task.number, same=decision.same_pass)
        if decision.summed:
            check_alike(decision.summed, step=self.task.number)
        if not decision.committed:
            self.is_undone = decision.ends == BEFORE
            raise RepeatStep("another rank could not finish its part")
        if self.more:
            self.attempts.keep_weights()
        self._examine(decision)
        self.reducer.remember()
        if (hooks := self.reducer.script_hooks).resting:
            if self.skipped:
                hooks.wake()
            else:
                hooks.call()
                self._squared = None  # they may have changed the gradient
        self._decision = decision
        return decision

    def _examine(self, decision: StepDecision) -> None:
        """Scale the gradient and have it tested: on an accelerator, where ``apply`` reads the result (``gate.py``)."""
        if decision.non_finite and not self._skip_reason:  # a step is skipped as a whole
            self._skip_reason = self._reason_to_skip(decision)
        self.skipped = bool(self._skip_reason)
        if not self.skipped:
            factor = self.task.batch_samples / decision.weight if decision.weight > 0 else 0.0
            factor /= self.numerics.loss_scale
            if factor != 1.0:
                self.reducer.scale(factor)
            self._gate = None if decision.non_finite else self.reducer.gate()
        measurement, gate = self.measurement, self._gate
        if gate is None or self.more or self.passes or self.reducer.script_hooks.resting:
            self._settle(decision)
        if measurement is not None and gate is not None:
            measurement.reduced(gate.squared)
        elif measurement is not None and not self.skipped:
            self._squared = float(measurement.reduced())

    def _look_ahead(self) -> None:
        """Load samples of the next step, while the device computes this one's gradients."""
        if self.more or self.part.schedule is not None or not self.context.look_ahead(self.task):
            return
        if self.clock.last_backward is not None:  # the device has waited only if it has passed this meanwhile
            self.clock.spent(Phase.LOAD, self.clock.last_backward)
