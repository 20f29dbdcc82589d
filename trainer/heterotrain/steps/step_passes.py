"""The passes of one step over this rank's micro-batches: a script drives them, or the part runs them by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from heterotrain.errors import PeerLost, UsageError
from heterotrain.exchange.host_copy import HostCopy
from heterotrain.exchange.interface import Gradients
from heterotrain.exchange.timeline import ReductionTimestamps
from heterotrain.network.group import Group
from heterotrain.numerics.all_gather import Gathered, all_gather
from heterotrain.numerics.method import Numerics
from heterotrain.numerics.noise import Measurement
from heterotrain.parts.batches import LossFunction, check_loss_function, inputs_and_targets, loss_and_weight
from heterotrain.parts.interface import Method, OwnSchedule, Part
from heterotrain.state.admission import check_loss, check_weight
from heterotrain.steps.attempt import Attempts
from heterotrain.steps.clock import Clock, Phase
from heterotrain.steps.micro_batches import BegunPass, MicroBatches, MicroBatchLoop, share_of
from heterotrain.steps.states import OPEN, StepState, Transaction
from heterotrain.steps.summed_loss import SummedLosses
from heterotrain.steps.task import Task
from heterotrain.steps.usage import check_another_pass


class PassContext(Protocol):
    """What passes need of the loop around a step (``steps.loop``)."""

    def enter(self, step: StepPasses) -> None:
        """Prepare for a pass: its random numbers and, before the first one, copies for another attempt."""

    def measure(self, step: StepPasses) -> Measurement | None:
        """Return the measurement of the step's gradients, or ``None`` if they are not measured."""

    def fetch(self, task: Task, offset: int, size: int) -> Any:
        """Return ``size`` samples of the task, starting at its ``offset``-th, as a batch on the device."""


@dataclass(slots=True)
class StepPasses:
    """The passes of a step; the step itself is the transaction around them (``steps.step``).

    Attributes:
        lockstep: whether every rank gets the same number of micro-batches.
        is_open: whether the script is inside ``with step:``.
        transaction: how far this rank is with the step, or with the current pass.
        more: whether another pass over the micro-batches follows the current one.
        passes: passes before the current one.
        summed: what is known of losses without a weight.
        logged: values that the script has reported with this step.
        is_measured: whether it is one of those with costly measurements.
        timestamps: of its last pass, once it is queued.
    """

    task: Task
    reducer: Gradients
    numerics: Numerics
    group: Group | None
    context: PassContext
    attempts: Attempts
    part: Part
    lockstep: bool = False
    summed: SummedLosses = field(default_factory=SummedLosses)
    measurement: Measurement | None = None
    clock: Clock = field(init=False)
    transaction: Transaction = OPEN
    is_open: bool = False
    more: bool = False
    passes: int = 0
    weight: float = 0.0
    loss_sum: torch.Tensor | HostCopy | float = 0.0
    logged: dict[str, float] = field(default_factory=dict)
    is_measured: bool = False
    timestamps: ReductionTimestamps | None = None
    _began: bool = False
    _counts: MicroBatches = field(init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(self.reducer.exchange.timeline)
        self._counts = MicroBatches(
            task=self.task, group=self.group, numerics=self.numerics, fetch=self.context.fetch, lockstep=self.lockstep
        )

    @property
    def committed(self) -> bool:
        """Whether all ranks have finished the step."""
        return self.transaction.state is StepState.COMMITTED

    @property
    def skipped(self) -> bool:
        """Whether the weights stay as they are, because loss or gradient is not finite."""
        return bool(self.transaction.skip_reason)

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
        for batch in MicroBatchLoop(self._counts, begin=partial(self._begin_pass, more=False), reduce=self._reduce):
            inputs, targets = inputs_and_targets(batch)
            loss, weight = loss_and_weight(loss_fn(self.part.forward(self.number, start, inputs), targets))
            if not self.is_padding and self.task.micro_batches:
                start += self.task.micro_batches[self._counts.backwards - self._counts.padding]
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
        self.group.script.begin("step.all_gather")
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
        counts, sizes = self._counts, self.task.micro_batches
        if counts.forward is not None:
            counts.leave_forward()
        began = self.clock.now() if counts.mark is None else self.clock.spent(Phase.FORWARD, counts.mark)
        if counts.handed_out != counts.backwards + 1:
            counts.check_call("step.backward")
        check_loss(loss)
        if loss.dtype in (torch.float16, torch.bfloat16):
            loss = loss.float()  # the factors below would overflow
        is_padding = counts.padding > 0 and counts.is_padding
        if is_padding and not self.task.rounds:
            counts.backwards += 1
            self._take_part(loss)
            self._go_on()
            return
        check_weight(weight)
        samples = 0 if is_padding else sizes[counts.backwards - counts.padding]
        if counts.backwards > (0 if self.task.rounds else counts.padding):
            self.reducer.check_untouched()
        counts.backwards += 1
        last = counts.backwards == counts.padding + len(sizes)
        counted = 0.0 if is_padding else float(samples if weight is None else weight)
        self.weight += counted
        value = loss.item() if loss.is_cpu else loss.detach().double()  # do not wait for an accelerator here
        if not is_padding:
            before: Any = self.loss_sum  # a number or a tensor: it becomes a copy with the last micro-batch
            self.loss_sum = before + (value * samples if weight is None else value)
        if weight is None and self.summed.looks and samples not in self.summed.seen:
            self.summed.look(loss, samples, step=self.task.number, is_only=not (self.passes or self.more))
        if last:
            if isinstance(self.loss_sum, torch.Tensor):
                self.loss_sum = HostCopy(self.loss_sum)
            self.reducer.arm(self.group)
        factor = 0.0 if is_padding else (samples if weight is None else 1.0) / self.task.batch_samples
        # Equal to backward of the loss times the factor, but autograd does not have to keep the product.
        loss.backward(loss.new_full(loss.shape, factor * self.numerics.loss_scale))
        self.numerics.forward_state.take(samples)
        ended = self.clock.spent(Phase.BACKWARD, began)
        if last:
            self.clock.last_backward = ended
            self.reducer.flush()
        else:
            self.reducer.remember()
        if self.measurement is not None:
            self.measurement.group_done(counted)
        if counts.is_listed:
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
        counts.check_call("step.skip_batch")
        if self.task.is_joint or self.numerics.needs_all_ranks:
            raise UsageError(
                "step.skip_batch: other ranks wait for this rank's pass over the model, because "
                + ("the ranks of a member run it together" if self.task.is_joint else "of BatchNorm over all ranks")
                + ": run the model on another sample, and give its loss weight=0"
            )
        is_first, is_padding = counts.backwards == counts.padding, self.is_padding
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

    def _run(self, schedule: OwnSchedule, loss_fn: LossFunction) -> None:
        """Let the part run all passes of the member's samples by itself.

        Raises:
            PeerLost: another rank of the member is lost, or the formation is broken.
            UsageError: as in ``compute``.
        """
        self._begin_pass(more=False)
        if self._is_broken:
            raise PeerLost("the formation broke during the step")
        if self.task.micro_batches:
            method = Method(autocast=self.numerics.precision.autocast, loss_scale=self.numerics.loss_scale)
            share = share_of(self.task, self.context.fetch)
            result = schedule.run(share, loss_fn, method=method, before_last=partial(self.reducer.arm, self.group))
            seconds = (result.load_s, result.forward_s, result.backward_s)
            self.clock.took(dict(zip((Phase.LOAD, Phase.FORWARD, Phase.BACKWARD), seconds, strict=True)))
            self.clock.last_backward = self.clock.now()
            self._counts.handed_out = self._counts.backwards = len(share.sizes)
            self.weight, self.loss_sum = result.weight, result.loss_sum
            self.reducer.flush()
        self._reduce()

    @property
    def _is_broken(self) -> bool:
        return self.group is not None and self.group.is_over()

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
        elif not self.task.micro_batches:  # BatchNorm layers wait for all ranks, too
            loss.backward()
        elif counts.anchors:
            loss.backward(inputs=counts.anchors)
        self.numerics.forward_state.take(0)
        if not self.task.micro_batches and counts.backwards == counts.padding:
            self._reduce_nothing()

    def _begin_pass(self, *, more: bool) -> BegunPass:
        """Begin a pass over the micro-batches.

        Raises:
            UsageError: the step is not open, or the pass before was the last one, by its ``more``.
        """
        if not self.is_open:
            raise UsageError("run each step inside `with step:`, so that all ranks commit it or none does")
        if self.transaction.state is not StepState.OPEN:
            check_another_pass(step=self.task.number, more=self.more)
            if self.transaction.state is StepState.VOTED and not self.skipped:
                self.numerics.forward_state.finish()
            self.passes += 1
            self.transaction = Transaction(skip_reason=self.transaction.skip_reason)
            self._began = False
            self._counts.begin_again()
            self.weight = self.loss_sum = 0.0
            self.context.enter(self)
        self.more = more
        self._begin()
        return BegunPass(self.clock, again=bool(self.passes), keep=more)

    def _begin(self) -> None:
        """Begin with the gradients; until now the script may freeze, unfreeze and replace parameters."""
        if not self._began:
            self._began = True
            self.reducer.begin(micro_batches=len(self.task.micro_batches))
            task = self.task
            if self.group is not None and self.numerics.needs_all_ranks and self.group.sums_on_device:
                context = self.numerics.batch_norm_context
                context.on_device = task.batch_samples > 1 and self.reducer.give_way(self.group)
            self.numerics.forward_state.begin(leads=task.share_samples > 0 and task.position == task.cursor)
            if self.clock.timeline is not self.reducer.exchange.timeline and not self.passes:
                self.clock = Clock(self.reducer.exchange.timeline)  # the first step finds the device
            self.measurement = self.context.measure(self)

    def _reduce_nothing(self) -> None:
        """Take part in the reductions with zeros, discarding the gradients of a sample with weight zero."""
        self.reducer.begin()
        self.reducer.arm(self.group)
        self.reducer.flush()

    def _reduce(self) -> object:
        """Vote, and wait until the parameters have the gradient of the global batch; only the first call does it."""
        raise NotImplementedError
