"""One pass of this rank's stage over all samples of its member."""

from __future__ import annotations

from collections.abc import Callable

from heterotrain.numerics.method import Numerics
from heterotrain.parts.batches import LossFunction
from heterotrain.parts.stages.stage import Method, Result, Share, Stage
from heterotrain.steps.clock import Clock, Phase
from heterotrain.steps.step_context import StepContext
from heterotrain.steps.task import Task


def run_stage(
    stage: Stage, loss_fn: LossFunction, task: Task, *, context: StepContext, numerics: Numerics, clock: Clock,
    before_last: Callable[[], None],
) -> Result:  # fmt: skip
    """Run forward and backward passes of a stage for a task's micro-batches; return weight, loss and times.

    Args:
        stage: of this rank.
        loss_fn: as in ``step.compute``.
        task: this rank's part of the step, with at least one micro-batch.
        context: fetches samples.
        numerics: of the job.
        clock: of the step, which gets the times.
        before_last: called before the last backward pass.

    Raises:
        PeerLost: another rank of the member is lost.
        UsageError: as in ``step.compute``.
    """
    sizes = task.micro_batches
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    share = Share(
        step=task.number, start=task.position - task.cursor, sizes=sizes, batch_samples=task.batch_samples,
        fetch=lambda index: context.fetch(task, starts[index], sizes[index]),
    )  # fmt: skip
    method = Method(autocast=numerics.precision.autocast, loss_scale=numerics.loss_scale)
    result = stage.run(share, loss_fn, method=method, before_last=before_last)
    clock.took({
        Phase.LOAD: result.load_s, Phase.FORWARD: result.forward_s, Phase.BACKWARD: result.backward_s,
    })  # fmt: skip
    clock.last_backward = clock.now()
    return result
