"""``heterotrain.init``: the job that this process belongs to."""

from __future__ import annotations

import os

from heterotrain_core.contract.config import ANY_EPOCHS, TrainingConfig

from heterotrain.data.main_guard import check_not_imported
from heterotrain.errors import UsageError
from heterotrain.identity import read_identity
from heterotrain.job_setup import operator_config
from heterotrain.keywords import known_keywords
from heterotrain.numerics.batch_norm import BatchNorm
from heterotrain.session import Job
from heterotrain.state import admission


@known_keywords
def init(
    *,
    epochs: int | None = None,
    steps: int | None = None,
    batch_samples: int = 64,
    micro_batch_samples: int | None = None,
    seed: int = 0,
    checkpoint_uri: str | os.PathLike[str] | None = None,
    checkpoint_interval_s: float = 600.0,
    tensorboard_dir: str | os.PathLike[str] | None = None,
    precision: str = "auto",
    compression: str = "none",
    on_non_finite: str = "fail",
    on_divergence: str = "fail",
    batch_norm: str = BatchNorm.GLOBAL,
    parallelism: str = "data",
) -> Job:
    """Return the job that this process belongs to.

    In a worker pod the operator sets everything except ``micro_batch_samples``, ``tensorboard_dir`` and
    ``batch_norm``, and the other arguments are ignored. They are for a script that runs alone or under torchrun.

    Args:
        epochs: passes over the data set; 1 by default, or as many as ``steps`` need.
        steps: steps after which the training ends, counted since it began, also in a run that is continued.
        batch_samples: global batch over all ranks.
        micro_batch_samples: largest micro-batch; a rank with a larger share accumulates several. ``None`` tries the
            whole share first. In a job, ``workerPools[].microBatchSize`` may set a smaller one for a pool. Either is
            halved when a rank runs out of memory.
        seed: seed for the order of samples and for all random numbers; at least 0.
        checkpoint_uri: folder for checkpoints (``file:///…`` or a path); ``None`` writes no checkpoints.
        checkpoint_interval_s: seconds between checkpoints.
        tensorboard_dir: folder for TensorBoard files; ``HETEROTRAIN_TENSORBOARD_DIR`` in the environment overrides it.
        precision: format of the forward pass: ``fp32``, ``bf16``, ``fp16``, or ``auto`` (bf16 where the devices of all
            ranks have it); case does not matter.
        compression: format of gradients on the wire: ``none``, ``fp16`` or ``bf16``; case does not matter.
        on_non_finite: for a step whose loss or gradient is not finite: ``fail``, ``skip`` (leave the weights as they
            are) or ``ignore``; case does not matter.
        on_divergence: for ranks whose training states differ: ``fail``, ``warn`` or ``resync`` (one rank sends its
            state to the others); case does not matter.
        batch_norm: statistics of BatchNorm layers: ``global`` over all samples of a step, as in one process; or
            ``local`` over one micro-batch of one rank, as in DistributedDataParallel, with running statistics averaged
            over all ranks in each step; case does not matter.
        parallelism: ``data`` (every rank holds the whole model), ``sharded`` (the ranks of a worker divide its tensors
            among themselves; under torchrun those of a host), ``pipeline`` (the ranks of a member hold stages of it;
            under torchrun those of a host) or ``auto`` (as ``pipeline``, with whole models where they fit); case does
            not matter.

    Raises:
        UsageError: the environment contradicts itself, a value is not one of the allowed ones, or a loader process
            imports a script without a main guard.
    """
    check_not_imported()
    identity = read_identity()
    if micro_batch_samples is not None:
        micro_batch_samples = admission.whole_number("micro_batch_samples", micro_batch_samples, least=1)
    if not checkpoint_interval_s >= 0:
        raise UsageError(f"checkpoint_interval_s must be at least 0 seconds, not {checkpoint_interval_s}")
    config = operator_config(identity) or TrainingConfig(
        epochs=_epochs(epochs, steps),
        steps=None if steps is None else admission.whole_number("steps", steps, least=1),
        seed=admission.whole_number("seed", seed, least=0),
        base_batch_samples=admission.whole_number("batch_samples", batch_samples, least=1),
        checkpoint_uri=None if checkpoint_uri is None else os.fspath(checkpoint_uri),
        checkpoint_interval_s=checkpoint_interval_s,
        precision=precision,
        compression=compression,
        on_non_finite=on_non_finite,
        on_divergence=on_divergence,
        parallelism=parallelism,
    )
    folder = None if tensorboard_dir is None else os.fspath(tensorboard_dir)
    return Job(
        identity, config, tensorboard_dir=identity.tensorboard_dir or folder, micro_batch_samples=micro_batch_samples,
        batch_norm=batch_norm,
    )  # fmt: skip


def _epochs(epochs: int | None, steps: int | None) -> int:
    """Return the passes over the data set; without a number of them, steps decide."""
    if epochs is None:
        return 1 if steps is None else ANY_EPOCHS
    return admission.whole_number("epochs", epochs, least=1)
