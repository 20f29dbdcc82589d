"""Settings that are fixed for a pod's whole life, passed once as JSON in an environment variable."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from heterotrain_core.contract.choices import (
    Backend,
    Choice,
    Compression,
    OnDivergence,
    OnNonFinite,
    Parallelism,
    Precision,
)
from heterotrain_core.version import __version__

ANY_EPOCHS = 2**31
"""As many passes over the data as a number of steps needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Training settings that no plan changes.

    Attributes:
        epochs: passes over the data set, at least 1; ``ANY_EPOCHS`` where only steps count.
        steps: committed steps after which the training ends, perhaps before its last epoch; ``None`` for no such limit.
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
        checkpoint_resume_from: where to continue while the job has no checkpoint of its own: URI of a folder, or name
            of a job of the same namespace; ``None`` to begin.
        grace_s: seconds between SIGTERM and SIGKILL.
        peer_timeout_s: silence of a host after which its ranks count as lost.
    """

    epochs: int = 1
    steps: int | None = None
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
    checkpoint_resume_from: str | None = None
    grace_s: float = 30.0
    peer_timeout_s: float = 3.0


_MOST_NAMED = 300
_CHOICES = {
    "precision": Precision,
    "parallelism": Parallelism,
    "backend": Backend,
    "compression": Compression,
    "on_non_finite": OnNonFinite,
    "on_divergence": OnDivergence,
}


class UnknownSettingError(ValueError):
    """The operator asks for something that this version of the library does not have."""


def encode_config(config: TrainingConfig) -> str:
    """Return the configuration as one line of JSON with sorted keys.

    Fields with their default are left out. So an older image reads the configuration of a newer operator unless the
    job uses something that the image does not have. A default is never changed: a new field takes its place.
    """
    plain = {field.name: getattr(config, field.name) for field in fields(config)}
    given = {field.name: plain[field.name] for field in fields(config) if plain[field.name] != field.default}
    return json.dumps(given, sort_keys=True, separators=(",", ":"))


def decode_config(text: str) -> TrainingConfig:
    """Read a configuration; missing fields take their default.

    Raises:
        UnknownSettingError: it has a field or a choice that this version does not know. To leave it out would train
            something else than the job asks for.
        ValueError: the text is not a JSON object.
    """
    raw: Any = json.loads(text)
    if not isinstance(raw, dict):
        raise ValueError(f"the training configuration has to be a JSON object, not {type(raw).__name__}")
    known = {field.name for field in fields(TrainingConfig)}
    raw = {name: value for name, value in raw.items() if name in known or value is not None}  # null asks for nothing
    unknown = sorted(set(raw) - known)
    unknown += [
        f"{name}: {raw[name]}" for name, kind in _CHOICES.items() if name in raw and not _knows(kind, raw[name])
    ]
    if unknown:
        raise UnknownSettingError(
            f"this image has heterotrain {__version__}, which does not know {', '.join(unknown)[:_MOST_NAMED]}: use an "
            "image of the operator's version, or leave these settings out of the job"
        )
    return TrainingConfig(**raw)


def _knows(kind: type[Choice], value: Any) -> bool:
    try:
        kind(value)
    except ValueError:
        return False
    return True
