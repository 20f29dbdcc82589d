"""One step as a transaction: committed by all ranks or by none.

``with step:`` suppresses errors that are not the script's fault: a lost peer, another rank's vote, too little memory.
The iterator then yields the same step again, with the same samples, random numbers and buffers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from traceback import clear_frames
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self

import torch

from heterotrain.errors import NonFinite, PeerLost, RepeatStep, UsageError, drop_frames
from heterotrain.network.control import BEFORE, StepDecision
from heterotrain.network.group import Group
from heterotrain.numerics.all_gather import Gathered, all_gather
from heterotrain.numerics.fused import can_stay_behind
from heterotrain.numerics.gate import Gate
from heterotrain.numerics.gradients import Gradients
from heterotrain.numerics.host_copy import HostCopy
from heterotrain.numerics.method import Numerics
from heterotrain.numerics.noise import Measurement
from heterotrain.numerics.non_finite import Action
from heterotrain.numerics.out_of_memory import out_of_memory
from heterotrain.parts.batches import LossFunction, check_loss_function, inputs_and_targets, loss_and_weight
from heterotrain.parts.interface import Method, OwnSchedule, Part, SecondPhase, Share
from heterotrain.state.admission import check_loss, check_weight, plain_numbers
from heterotrain.state.prepared import Confirmation
from heterotrain.steps.attempt import Attempts
from heterotrain.steps.clipping import ClipLimits, clip
from heterotrain.steps.clock import Clock, Phase
from heterotrain.steps.finite_gradient import read_gate, reason_to_skip
from heterotrain.steps.micro_batches import BegunPass, MicroBatches, MicroBatchLoop
from heterotrain.steps.result import GradientNorm, StepResult
from heterotrain.steps.summed_loss import SummedLosses, check_alike
from heterotrain.steps.task import Task
from heterotrain.steps.usage import check_another_pass, check_apply, check_backward, check_same_pass

_log = logging.getLogger(__name__)


class StepContext(Protocol):
    """What a step needs of the loop around it (``steps.loop``)."""

    def enter(self, step: Step) -> None:
        """Prepare for a pass: its random numbers and, before the first one, copies for another attempt."""

    def measure(self, step: Step) -> Measurement | None:
        """Return the measurement of the step's gradients, or ``None`` if they are not measured."""

    def fetch(self, task: Task, offset: int, size: int) -> Any:
        """Return ``size`` samples of the task, starting at its ``offset``-th, as a batch on the device."""

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
class Step:
    """One step of the training loop.

    Attributes:
        is_retry: whether this is another attempt at a step that this rank has tried before.
        lockstep: whether every rank gets the same number of micro-batches.
        is_open: whether the script is inside ``with step:``.
        is_undone: whether nobody commits this step, because the script of some rank has ended the training before it.
        updates: whether the optimizers' steps have begun.
        voted: whether this rank has told the others that it finished its part, so that they may commit the step.
        more: whether another pass over the micro-batches follows the current one.
        passes: passes before the current one.
        summed: what is known of losses without a weight.
    """

    task: Task
    reducer: Gradients
    numerics: Numerics
    group: Group | None
    context: StepContext
    attempts: Attempts
    part: Part
    is_retry: bool = False
    lockstep: bool = False
    summed: SummedLosses = field(default_factory=SummedLosses)
    measurement: Measurement | None = None
    clock: Clock = field(init=False)
    committed: bool = False
    skipped: bool = False
    failure: Exception | None = None
    voted: bool = False
    is_open: bool = False
    is_undone: bool = False
    updates: bool = False
    more: bool = False
    passes: int = 0
    weight: float = 0.0
    loss_sum: torch.Tensor | HostCopy | float = 0.0
    logged: dict[str, float] = field(default_factory=dict)
    _applied: bool = False
    _skip_reason: str = ""
    _began: bool = False
    _decision: StepDecision | None = None
    _squared: float | None = None
    _gate: Gate | None = None
    _exchanges_before: int = 0
    _counts: MicroBatches = field(init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(self.reducer.timeline)
        self._counts = MicroBatches(
            task=self.task, group=self.group, numerics=self.numerics, fetch=self.context.fetch, lockstep=self.lockstep
        )

    @property
    def epoch(self) -> int:
        """Epoch, from 0."""
        return self.task.epoch

    @property
    def number(self) -> int:
        """Number of the step, from 0: the committed steps before it, since the job began."""
        return self.task.number

    @property
    def batch_samples(self) -> int:
        """Samples of this step over all ranks."""
        return self.task.batch_samples

    @property
    def share_samples(self) -> int:
        """Samples of this step on this rank."""
        return self.task.share_samples

    def micro_batches(self, *, more: bool = False) -> Iterator[Any]:
        """Yield this rank's share of the batch, cut to fit into memory; nothing if the share is zero.

        The loop body runs in the configured precision up to ``step.backward``. If the model has BatchNorm layers, which
        wait for all ranks, a rank without a share gets one sample with weight zero. With ``job.steps(lockstep=True)``
        every rank gets as many micro-batches as the rank with the most; the additional ones come first and consist of
        one sample with weight zero (``step.is_padding``).

        When the loop over the micro-batches has ended, every parameter's ``grad`` is that of the global batch, equal on
        all ranks, as after ``loss.backward()`` with DistributedDataParallel; so are random numbers. Code between the
        loop and ``step.apply`` may look at gradients and change them.

        ``list(step.micro_batches())`` is all of them before the first backward pass, to count tokens with ``job.sum``,
        say. Gradients are complete in ``step.apply`` then, and not before. ``step.skip_batch`` leaves out a micro-batch
        that has nothing to train on.

        With ``more``, the step makes another pass over the same micro-batches, with a loop and gradients of its own. In
        between, the script may change weights, or let optimizers take a step by ``step.apply``. The step is still
        committed as a whole, by the ``step.apply`` after its last pass; a repeated step starts with the weights and
        optimizer states from before its first pass.

        Args:
            more: whether another loop over the micro-batches follows in this step; the same on every rank.

        Raises:
            UsageError: this is called outside ``with step:``, or again without ``more`` in the call before; or the
                loop's body changed gradients, or froze or replaced parameters; or ranks differ in ``more``.
        """
        self.part.check_script_runs()
        return self._loop(more=more)

    def _loop(self, *, more: bool = False) -> Iterator[Any]:
        """Return the loop over the micro-batches; see ``micro_batches``."""
        return MicroBatchLoop(self._counts, begin=partial(self._begin_pass, more=more), reduce=self._reduce)

    def compute(self, loss_fn: LossFunction) -> None:
        """Run forward and backward passes of this rank's share, in micro-batches and whatever layout there is.

        A batch is a pair, (inputs, targets). The model gets the inputs: a tuple or list as arguments, a mapping as
        named arguments, anything else as one argument.

        Args:
            loss_fn: returns the loss of (output, targets): the mean over the micro-batch's samples, or a sum and its
                weight as in ``backward``. It may use nothing else of the step, because a model that is divided into
                stages has its output in one place only.

        Raises:
            UsageError: ``loss_fn`` needs other arguments, a batch is not a pair, or as in ``micro_batches`` and
                ``backward``.
        """
        check_loss_function(loss_fn)
        if (schedule := self.part.schedule) is not None:
            self._run(schedule, loss_fn)
            return
        start = self.task.position - self.task.cursor
        for batch in self._loop():
            inputs, targets = inputs_and_targets(batch)
            loss, weight = loss_and_weight(loss_fn(self.part.forward(self.number, start, inputs), targets))
            if not self.is_padding and self._counts.sizes:
                start += self._counts.sizes[self._counts.backwards - self._counts.padding]
            self.backward(loss, weight)

    @property
    def is_padding(self) -> bool:
        """Whether the sample of the current micro-batch has weight zero, because this rank has fewer than others."""
        return self._counts.is_padding

    def all_gather(self, rows: torch.Tensor) -> Gathered:
        """Return the rows of all ranks' current micro-batches, and the place of this rank's own ones among them.

        ``rows`` has this rank's samples in its first dimension, whose size differs by rank. Gradients flow back to the
        ranks that sent the rows. The loss is the mean over this rank's own samples, as always: the step's gradient is
        then that of the whole batch in one process, if every rank has one micro-batch. With several, a sample is
        compared with those of the same round. Every rank has to make the same calls (``job.steps(lockstep=True)``).

        Raises:
            UsageError: ``job.steps`` was called without ``lockstep``, this is not between a micro-batch and its
                ``step.backward``, or the ranks' tensors differ in more than the first dimension.
        """
        if not self.lockstep:
            raise UsageError(
                "step.all_gather needs job.steps(..., lockstep=True): shares differ by rank, and all ranks have to "
                "make the same number of calls"
            )
        if self._counts.handed_out == self._counts.backwards:
            raise UsageError("call step.all_gather in the loop over step.micro_batches(), before step.backward")
        if self.group is None:
            return Gathered(rows=rows, start=0)
        self.group.begin_script_exchange("step.all_gather")
        gathered, anchor = all_gather(rows, self.group, counts=not self.is_padding)
        self._counts.anchors += [anchor] if anchor.requires_grad else []
        return gathered

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Add this micro-batch's gradient.

        Args:
            loss: the mean over the micro-batch's samples; or, with ``weight``, a sum. A sum without a weight is found
                in most cases.
            weight: the weight of the sum, for example the number of tokens that count. The step's gradient is that of
                the sum over all ranks divided by the sum of all weights.

        Raises:
            UsageError: this is not called exactly once for each micro-batch, the loss is not a scalar that depends on
                the model, the weight is not a number of at least 0, or a loss without weight is a sum over samples.
        """
        self._counts.leave_forward()
        began = self.clock.now() if self._counts.mark is None else self.clock.spent(Phase.FORWARD, self._counts.mark)
        check_backward(
            step=self.task.number, handed_out=self._counts.handed_out, backwards=self._counts.backwards,
            is_listed=self._counts.is_listed,
        )  # fmt: skip
        check_loss(loss)
        if loss.dtype in (torch.float16, torch.bfloat16):
            loss = loss.float()  # the factors below would overflow
        is_padding = self.is_padding
        if is_padding and not self.task.rounds:
            self._counts.backwards += 1
            self._take_part(loss)
            self._go_on()
            return
        check_weight(weight)
        samples = 0 if is_padding else self.task.micro_batches[self._counts.backwards - self._counts.padding]
        if self._counts.backwards > (0 if self.task.rounds else self._counts.padding):
            self.reducer.check_untouched()
        self._counts.backwards += 1
        last = self._counts.backwards == self._counts.padding + len(self.task.micro_batches)
        counted = 0.0 if is_padding else float(samples if weight is None else weight)
        self.weight += counted
        value = loss.item() if loss.is_cpu else loss.detach().double()  # do not wait for an accelerator here
        if not is_padding:
            before: Any = self.loss_sum  # a number or a tensor: it becomes a copy with the last micro-batch
            self.loss_sum = before + (value * samples if weight is None else value)
        if weight is None and self.summed.looks and samples not in self.summed.seen:
            self.summed.look(loss, samples, step=self.task.number)
        if last:
            if isinstance(self.loss_sum, torch.Tensor):
                self.loss_sum = HostCopy(self.loss_sum)
            self.reducer.arm(self.group)
        factor = 0.0 if is_padding else (samples if weight is None else 1.0) / self.task.batch_samples
        # Equal to backward of the loss times the factor, but autograd does not have to keep the product.
        gradient = loss.new_full(loss.shape, factor * self.numerics.loss_scale)
        loss.backward(gradient)
        self.numerics.forward_state.take(samples)
        ended = self.clock.spent(Phase.BACKWARD, began)
        if last:
            self.clock.last_backward = ended
            self.reducer.flush()
        else:
            self.reducer.remember()
        if self.measurement is not None:
            self.measurement.group_done(counted)
        if self._counts.is_listed:
            self._go_on()

    def skip_batch(self) -> None:
        """Leave out the current micro-batch, in place of ``step.backward``: its samples count for nothing.

        For a micro-batch in which ``collate`` has found nothing to train on. If it drops some samples only, give the
        others' number as the weight of their sum: ``step.backward(loss_sum, weight=len(x))``.

        Raises:
            UsageError: there is no current micro-batch, or layers or ranks wait for its forward pass.
        """
        counts = self._counts
        counts.leave_forward()
        check_backward(
            step=self.task.number, handed_out=counts.handed_out, backwards=counts.backwards, is_listed=counts.is_listed,
            call="step.skip_batch",
        )  # fmt: skip
        if self.task.is_joint or self.numerics.needs_all_ranks:
            raise UsageError(
                "step.skip_batch: other ranks wait for this rank's pass over the model, because "
                + ("the ranks of a member run it together" if self.task.is_joint else "of BatchNorm over all ranks")
                + ": run the model on another sample, and give its loss weight=0"
            )
        is_first = counts.backwards == counts.padding
        is_padding = self.is_padding
        counts.backwards += 1
        if is_padding:
            self._take_part(None)
        else:
            if not is_first:
                self.reducer.check_untouched()
            self.numerics.forward_state.take(0)
            if counts.backwards < counts.expected:
                self.reducer.remember()
            else:
                if isinstance(self.loss_sum, torch.Tensor):
                    self.loss_sum = HostCopy(self.loss_sum)
                self.reducer.arm(self.group)
                self.reducer.flush()
            if self.measurement is not None:
                self.measurement.group_done(0.0)
        self._go_on()

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

    def _finish_late(
        self,
        decision: StepDecision,
        update: Callable[[], object],
        confirmation: Confirmation,
    ) -> None:
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

    # -- the transaction ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.is_open = True
        self.context.open_exchanges(are_open=True)
        self._exchanges_before = 0 if self.group is None else self.group.script_exchanges
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

    def _check_open(self) -> None:
        if not self.is_open:
            raise UsageError("run each step inside `with step:`, so that all ranks commit it or none does")

    def _run(self, schedule: OwnSchedule, loss_fn: LossFunction) -> None:
        """Let the part run all passes of the member's samples by itself.

        Raises:
            PeerLost: another rank of the member is lost, or the formation is broken.
            UsageError: as in ``compute``.
        """
        self._begin_pass(more=False)
        if self._is_broken:
            raise PeerLost("the formation broke during the step")
        task, sizes = self.task, self._counts.sizes
        if sizes:
            starts = [sum(sizes[:index]) for index in range(len(sizes))]
            share = Share(
                step=task.number,
                start=task.position - task.cursor,
                sizes=sizes,
                batch_samples=task.batch_samples,
                fetch=lambda index: self.context.fetch(task, starts[index], sizes[index]),
            )
            method = Method(autocast=self.numerics.precision.autocast, loss_scale=self.numerics.loss_scale)
            result = schedule.run(share, loss_fn, method=method, before_last=partial(self.reducer.arm, self.group))
            seconds = (result.load_s, result.forward_s, result.backward_s)
            self.clock.took(dict(zip((Phase.LOAD, Phase.FORWARD, Phase.BACKWARD), seconds, strict=True)))
            self.clock.last_backward = self.clock.now()
            self._counts.handed_out = self._counts.backwards = len(sizes)
            self.weight, self.loss_sum = result.weight, result.loss_sum
            self.reducer.flush()
        self._reduce()

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
        return self.group is not None and self.group.script_exchanges != self._exchanges_before

    @property
    def _is_broken(self) -> bool:
        return self.group is not None and self.group.is_over()

    def _vote(self, *, ok: bool) -> StepDecision:
        self.voted = ok
        return self.context.vote(self, ok=ok)

    # -- internals ---------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Enter the forward pass of the next micro-batch, if the script has it already."""
        if self._counts.is_listed and self._counts.backwards < self._counts.handed_out:
            self._counts.anchors.clear()
            self._counts.enter_forward(self.clock.now())

    def _take_part(self, loss: torch.Tensor | None) -> None:
        """Run the exchanges of a backward pass; the gradients of a sample with weight zero are dropped."""
        counts = self._counts
        if loss is None:
            pass
        elif not counts.sizes:  # BatchNorm layers wait for all ranks, too
            loss.backward()
        elif counts.anchors:
            loss.backward(inputs=counts.anchors)
        self.numerics.forward_state.take(0)
        if not counts.sizes and counts.backwards == counts.padding:
            self._reduce_nothing()

    def _begin_pass(self, *, more: bool) -> BegunPass:
        """Begin a pass over the micro-batches.

        Raises:
            UsageError: the step is not open, or the pass before was the last one, by its ``more``.
        """
        self._check_open()
        if self._decision is not None:
            check_another_pass(step=self.task.number, more=self.more)
            if not (self._applied or self.skipped):
                self.numerics.forward_state.finish()
            self.passes += 1
            self._began = self._applied = self.voted = False
            self._counts.begin_again()
            self.weight = self.loss_sum = 0.0
            self._decision = self._squared = None
            self.context.enter(self)
        self.more = more
        self._begin()
        return BegunPass(self.clock, again=bool(self.passes), keep=more)

    def _begin(self) -> None:
        """Begin with the gradients; until now the script may freeze, unfreeze and replace parameters."""
        if not self._began:
            self._began = True
            self.reducer.begin(micro_batches=len(self._counts.sizes))
            task = self.task
            self.numerics.forward_state.begin(leads=task.share_samples > 0 and task.position == task.cursor)
            if self.clock.timeline is not self.reducer.timeline and not self.passes:
                self.clock = Clock(self.reducer.timeline)  # the first step finds the device
            self.measurement = self.context.measure(self)

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

    def _reduce_nothing(self) -> None:
        """Take part in the reductions with zeros, discarding the gradients of a sample with weight zero."""
        self.reducer.begin()
        self.reducer.arm(self.group)
        self.reducer.flush()
