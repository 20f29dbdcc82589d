"""The settings of the training that a pod gets for its whole life."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from heterotrain_core.contract.choices import Parallelism
from heterotrain_core.contract.config import TrainingConfig, encode_config
from heterotrain_core.uris import job_folder

from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.views import JobView, ValidJob

DEFAULT_GRACE_S = 30


def grace_s_of(pod: Mapping[str, Any]) -> int:
    """Return the seconds between SIGTERM and SIGKILL of a pod's spec."""
    return int(pod.get("terminationGracePeriodSeconds") or DEFAULT_GRACE_S)


def settings_text(job: ValidJob, *, grace_s: float) -> str:
    """Return the settings as the pod's variable holds them."""
    config = training_config(job.spec, grace_s=grace_s)
    return encode_config(replace(config, checkpoint_resume_from=resume_source(job)))


def resume_source(job: JobView) -> str | None:
    """Return where a job continues while its folder is empty; ``None`` to begin.

    A job that has trained with another store continues from its own folder there.
    """
    if job.spec is None or job.spec.checkpoint is None:
        return None
    earlier = stores_after(job, job.spec.checkpoint.uri)[1:]
    if earlier:
        return job_folder(earlier[0], namespace=job.key.namespace, name=job.key.name, uid=job.uid)
    return job.spec.checkpoint.resume_from


def stores_after(job: JobView, uri: str | None) -> tuple[str, ...]:
    """Return the store of the workers and, if the job's newest checkpoint was made in another one, that one."""
    known = job.status.internal.stores
    if uri is None or (known and known[0] == uri):
        return known
    return (uri, *(known[:1] if job.status.last_checkpoint is not None else ()))


def _of_workers(spec: HeteroTrainJobSpec) -> Parallelism:
    """Return the mode that workers are told: only planned members tell them from each other, and their plans do."""
    mode = spec.parallelism.mode
    return Parallelism.AUTO if mode is Parallelism.SHARDED_ACROSS_WORKERS else mode


def training_config(spec: HeteroTrainJobSpec, *, grace_s: float) -> TrainingConfig:
    """Return the settings that stay the same for a pod's whole life."""
    training, checkpoint = spec.training, spec.checkpoint
    fixed = TrainingConfig(
        epochs=training.passes,
        steps=training.steps,
        base_batch_samples=training.base_batch_samples,
        seed=training.seed,
        precision=training.precision,
        learning_rate_scaling=training.learning_rate_scaling,
        learning_rate_warmup_samples=training.learning_rate_warmup_samples,
        parallelism=_of_workers(spec),
        backend=training.communication.backend,
        compression=training.communication.compression,
        on_non_finite=training.on_non_finite,
        on_divergence=training.on_divergence,
        grace_s=grace_s,
        peer_timeout_s=float(spec.elastic_policy.peer_timeout_seconds),
    )
    if checkpoint is None:
        return fixed
    return replace(
        fixed,
        checkpoint_uri=checkpoint.uri,
        checkpoint_interval_s=checkpoint.interval_seconds,
        checkpoint_max_to_keep=checkpoint.max_to_keep,
    )
