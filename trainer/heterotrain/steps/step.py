"""One step as a transaction: committed by all ranks or by none.

``with step:`` suppresses errors that are not the script's fault: a lost peer, another rank's vote, too little memory.
The iterator then yields the same step again, with the same samples, random numbers and buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import dataclass, field
from traceback import clear_frames
from types import TracebackType
from typing import Self

import torch

from heterotrain.errors import EndedBefore, PeerLost, RepeatStep, UsageError, drop_frames
from heterotrain.numerics.out_of_memory import out_of_memory
from heterotrain.state.admission import plain_numbers
from heterotrain.steps.agreement import Agreement
from heterotrain.steps.clock import Phase
from heterotrain.steps.resources import StepResources
from heterotrain.steps.result import StepResult
from heterotrain.steps.script_exchanges import ScriptExchanges
from heterotrain.steps.states import ENDED, StepState, Transaction
from heterotrain.steps.step_passes import StepPasses
from heterotrain.steps.transaction import Updates, commit
from heterotrain.steps.usage import check_apply

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Step(StepPasses):
    """One step of the training loop.

    Attributes:
        is_retry: whether this is another attempt at a step that this rank has tried before.
    """

    context: StepResources
    agreement: Agreement = field(kw_only=True)
    exchanges: ScriptExchanges = field(kw_only=True)
    is_retry: bool = False
    _transaction: Generator[None, Updates, StepResult] | None = None
    _exchanges_before: int = 0
    _lost: PeerLost | RepeatStep | None = None

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
            step=self.task.number, optimizers=len(optimizers),
            is_applied=self.transaction.state in (StepState.BETWEEN, *ENDED),
            backwards=self._counts.backwards, expected=self._counts.expected,
            limits={"clip_norm": clip_norm, "clip_value": clip_value},
        )  # fmt: skip
        if not self._began:
            self._begin()
        self._reduce()
        try:
            self._advance(Updates(optimizers, (clip_norm, clip_value)))
        except StopIteration as ended:
            result: StepResult = ended.value
            return result
        raise AssertionError("the transaction pauses once")

    def log(self, **values: float) -> None:
        """Report values of this step (numbers, or tensors with one element); a repeated step drops them.

        Raises:
            UsageError: a value is not a number.
        """
        self.logged.update(plain_numbers("step.log", values))

    def __enter__(self) -> Self:
        self.is_open = True
        self.exchanges.open(are_open=True)
        self._exchanges_before = 0 if self.group is None else self.group.script.started
        self.numerics.batch_norm_context.enter(
            self.group, micro_batches=len(self.task.micro_batches),
            is_short=self.task.batch_samples < self.task.global_batch_samples,
        )  # fmt: skip
        self.context.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._counts.forward is not None:
            self._counts.leave_forward()
        self.is_open, is_over = False, self.transaction.state in ENDED
        if not is_over:
            self.exchanges.open(are_open=False)
        self.numerics.batch_norm_context.leave()
        if error is None:
            if not is_over:
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
        if is_over or not isinstance(error, Exception):
            return False
        if self.task.is_joint and not isinstance(error, RepeatStep):
            self.context.leave_pass(f"a rank of the member left the pass: {error}")
        failure: Exception
        was_sent, updates = self.transaction.is_sent, self.transaction.state is StepState.APPLIED
        if isinstance(error, PeerLost | RepeatStep):
            failure = error
        elif (self.more or not updates) and (memory := out_of_memory(error)) is not None:
            clear_frames(
                trace
            )  # the vote must not wait for memory that they hold: the interpreter keeps them till then
            drop_frames(error)
            failure = self._vote_to_repeat() or memory
        elif isinstance(error, RuntimeError) and self._is_broken:
            failure = PeerLost(str(error))  # a collective inside the model failed with the formation
        else:
            return False
        drop_frames(error)
        self._transaction = self._lost = None
        self.transaction = Transaction(StepState.REPEAT, failure=failure, was_sent=was_sent)
        if not isinstance(failure, EndedBefore):
            _log.info("step %d is repeated: %s", self.task.number, error)
        return True

    @property
    def committed(self) -> bool:
        """Whether all ranks have finished the step; one that waits for the next vote is confirmed now."""
        if self.transaction.state is StepState.QUEUED:
            self.agreement.late.is_confirmed()
        return self.transaction.state is StepState.COMMITTED

    @property
    def skipped(self) -> bool:
        """Whether the weights stay as they are, because loss or gradient is not finite."""
        if self.transaction.state is StepState.QUEUED:
            return not self.committed
        return bool(self.transaction.skip_reason)

    def withdraw(self) -> None:
        """Vote against the step without computing it, because the script has ended the training before it."""
        with self:
            self._begin()
            self._reduce_nothing()
            self.agreement.vote(self, ok=False)
            raise EndedBefore

    def _vote_to_repeat(self) -> PeerLost | None:
        """Vote against the step after running out of memory, if peers may have sent something of this pass."""
        if self.task.is_joint:
            return None  # the other ranks of the member have left the pass with this one
        is_sent = self._counts.backwards > 0 and self._counts.backwards == self._counts.expected
        if self.is_awaited or not (is_sent or self.passes):
            return None  # a vote comes too late, or nothing of this step has been sent yet
        try:
            if is_sent:
                self.reducer.flush()
            else:  # the peers wait in this pass; this rank would begin again with the first one
                self._reduce_nothing()
            self.agreement.vote(self, ok=False)
        except PeerLost as lost:
            drop_frames(lost)
            return lost
        return None

    @property
    def is_awaited(self) -> bool:
        """Whether the others may have committed the step or wait for an exchange, so that a vote comes too late."""
        return self.transaction.is_sent or self.has_exchanged

    @property
    def has_exchanged(self) -> bool:
        """Whether the script has exchanged data with other ranks since the step began."""
        return self.group is not None and self.group.script.started != self._exchanges_before

    def _reduce(self) -> None:
        """Begin the transaction of this pass, unless it has begun; see ``commit`` for what it raises."""
        if self._transaction is None or self.transaction.state is StepState.OPEN:
            if not self._counts.handed_out:
                self._reduce_nothing()
            self._look_ahead()
            self._transaction = commit(self, self.agreement)
            self._advance(None)

    def _advance(self, updates: Updates | None) -> None:
        """Run the transaction to its pause, or to its end; an error that the script swallows is raised again."""
        if self._lost is not None or self._transaction is None:
            raise self._lost or AssertionError("_reduce comes first")
        try:
            if updates is None:
                next(self._transaction)
            else:
                self._transaction.send(updates)
        except (PeerLost, RepeatStep) as error:
            self._lost = error
            raise

    def _look_ahead(self) -> None:
        """Load samples of the next step, while the device computes this one's gradients."""
        if self.more or self.part.schedule is not None or not self.context.look_ahead(self.task):
            return
        if self.clock.last_backward is not None:  # the device has waited only if it has passed this meanwhile
            self.clock.spent(Phase.LOAD, self.clock.last_backward)
