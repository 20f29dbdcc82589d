"""Training without a hand-written loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from heterotrain.data import batches
from heterotrain.data.sources import NumberedStream
from heterotrain.errors import UsageError
from heterotrain.initialization import init
from heterotrain.session import Job
from heterotrain.steps.hooks import EpochHook
from heterotrain.steps.result import StepResult
from heterotrain.steps.step import Step

Loss = Callable[[torch.nn.Module, Any], torch.Tensor | tuple[torch.Tensor, float]]


def fit(
    model: torch.nn.Module,
    dataset: batches.MapDataset | NumberedStream | Iterable[Any],
    *,
    loss: Loss,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    evaluate: Callable[[Job, torch.nn.Module], EpochHook] | None = None,
    collate: batches.Collate | None = None,
    shuffle: bool = True,
    workers: int = 0,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    on_step: Callable[[Step, StepResult], None] | None = None,
    job: Job | None = None,
    **settings: Any,
) -> Job:
    """Train the model over all epochs and return the job.

    Args:
        model: trained in place.
        dataset: see ``Job.steps``.
        loss: returns the mean loss of model and micro-batch, or (sum, weight) where samples have different weights.
        optimizer: makes the optimizer from the parameters, for example ``lambda p: torch.optim.AdamW(p, lr=3e-4)``.
        scheduler: makes the learning-rate scheduler from the optimizer; see ``Job.scheduler``.
        evaluate: makes an end-of-epoch hook from the job and the model.
        collate: makes a batch from a list of samples; torch's own by default.
        shuffle: see ``Job.steps``.
        workers: processes that load samples ahead; with 0 the training process loads them.
        clip_norm: upper limit for the norm of a step's gradient.
        clip_value: upper limit for the magnitude of each of its elements.
        on_step: called on every rank with each committed step and the result of its ``apply``, for example to log it.
        job: the return value of ``init``; by default a new job.
        settings: arguments for ``init``, used where there is no operator.

    Raises:
        UsageError: see ``init``, ``Job.wrap``, ``Job.optimizer``, ``Job.scheduler`` and ``Job.steps``.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            "fit needs a function that makes the optimizer, because the model moves to its device first. Write "
            f"optimizer=lambda p: torch.optim.{type(optimizer).__name__}(p, …)."
        )
    model = (job := job or init(**settings)).wrap(model)
    stepper = job.optimizer(optimizer(model.parameters()))
    if scheduler is not None:
        job.scheduler(scheduler(stepper))
    if evaluate is not None:
        job.on_epoch_end(evaluate(job, model))
    for step in job.steps(dataset, collate=collate, shuffle=shuffle, workers=workers, confirm="late"):
        with step:
            for batch in step.micro_batches():
                value = loss(model, batch)
                is_pair = isinstance(value, tuple) and len(value) == 2  # noqa: PLR2004  # (sum, weight)
                step.backward(*(value if is_pair else (value,)))
            result = step.apply(stepper, clip_norm=clip_norm, clip_value=clip_value)
        if on_step is not None and step.committed:
            on_step(step, result)
    return job
