"""Settings that are fixed for a pod's whole life, passed once as JSON in an environment variable."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from heterotrain_core.contract.choices import Backend, Compression, OnDivergence, OnNonFinite, Parallelism, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Training settings that no plan changes.

    Attributes:
        epochs: passes over the data set, at least 1.
        base_batch_samples: the global batch that the user's learning rate was chosen for.
        seed: seeds the sample permutation and every rank's generators.
        precision: a value of ``Precision``, in any case.
        learning_rate_scaling: a value of ``scaling_rules.Scaling``, in any case.
        learning_rate_warmup_samples: samples over which a changed factor on the learning rate takes effect; ``None``
            leaves the choice to the trainer.
        parallelism: how members are formed: a value of ``Parallelism``, in any case.
        backend: a value of ``Backend``, in any case.
        compression: of gradients on the wire: a value of ``Compression``, in any case.
        bucket_mib: DDP's bucket size in MiB.
        on_non_finite: for a step whose loss or gradient is not finite: a value of ``OnNonFinite``, in any case.
        on_divergence: for ranks whose training state differs: a value of ``OnDivergence``, in any case.
        checkpoint_uri: where checkpoints go (``file:///…`` or any fsspec URI); ``None`` keeps none.
        checkpoint_interval_s: seconds between durable checkpoints.
        checkpoint_max_to_keep: number of newest checkpoints that are kept.
        checkpoint_max_age_s: age beyond which a checkpoint is not kept, unless it is the newest; ``None`` sets no
            limit.
        grace_s: seconds between SIGTERM and SIGKILL.
        peer_timeout_s: silence of a host after which its ranks count as lost.
    """

    epochs: int = 1
    base_batch_samples: int = 64
    seed: int = 0
    precision: str = Precision.AUTO
    learning_rate_scaling: str = "None"
    learning_rate_warmup_samples: int | None = None
    parallelism: str = Parallelism.DATA
    backend: str = Backend.AUTO
    compression: str = Compression.NONE
    bucket_mib: float = 25.0
    on_non_finite: str = OnNonFinite.FAIL
    on_divergence: str = OnDivergence.FAIL
    checkpoint_uri: str | None = None
    checkpoint_interval_s: float = 600.0
    checkpoint_max_to_keep: int = 3
    checkpoint_max_age_s: float | None = None
    grace_s: float = 30.0
    peer_timeout_s: float = 3.0


def encode_config(config: TrainingConfig) -> str:
    """Return the configuration as one line of JSON with sorted keys."""
    return json.dumps(asdict(config), sort_keys=True, separators=(",", ":"))


def decode_config(text: str) -> TrainingConfig:
    """Read a configuration; fields that this version does not know are an error, missing ones take their default.

    Raises:
        ValueError: the text is not a JSON object or names an unknown field.
    """
    raw: Any = json.loads(text)
    if not isinstance(raw, dict):
        raise ValueError(f"the training configuration has to be a JSON object, not {type(raw).__name__}")
    known = {field.name for field in fields(TrainingConfig)}
    if unknown := sorted(set(raw) - known):
        raise ValueError(
            f"the training configuration has unknown fields {unknown}: operator and image differ in version"
        )
    return TrainingConfig(**raw)
