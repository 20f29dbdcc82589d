"""Training without a loop of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from heterotrain import data
from heterotrain.session import EpochHook, Job, init

Loss = Callable[[torch.nn.Module, Any], torch.Tensor | tuple[torch.Tensor, float]]


def fit(
    model: torch.nn.Module,
    dataset: data.MapDataset,
    *,
    loss: Loss,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    evaluate: Callable[[Job, torch.nn.Module], EpochHook] | None = None,
    collate: data.Collate | None = None,
    clip_norm: float | None = None,
    job: Job | None = None,
    **settings: Any,
) -> Job:
    """Train the model over all epochs and return the job.

    Args:
        model: trained in place.
        dataset: with a length and indices; the same on every rank.
        loss: from model and micro-batch to the mean loss, or to (sum, weight) where samples weigh differently.
        optimizer: makes the optimizer from the parameters, for instance ``lambda p: torch.optim.AdamW(p, lr=3e-4)``.
        evaluate: makes an end-of-epoch hook from the job and the model.
        collate: makes a batch of a list of samples; torch's own by default.
        clip_norm: greatest norm of a step's gradient.
        job: one that ``init`` returned; by default a new one.
        settings: for ``init``, where there is no operator.

    Raises:
        UsageError: see ``init`` and ``Job.steps``.
    """
    job = job or init(**settings)
    model = job.wrap(model)
    stepper = job.optimizer(optimizer(model.parameters()))
    if evaluate is not None:
        job.on_epoch_end(evaluate(job, model))
    for step in job.steps(dataset, collate=collate):
        with step:
            for batch in step.micro_batches():
                value = loss(model, batch)
                if isinstance(value, tuple):
                    step.backward(value[0], weight=value[1])
                else:
                    step.backward(value)
            step.apply(stepper, clip_norm=clip_norm)
    return job
