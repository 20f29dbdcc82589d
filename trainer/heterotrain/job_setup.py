"""Sets up a rank before its script has a model: the job's configuration, and the way to the other ranks."""

from __future__ import annotations

import time
from typing import Any

import torch
from heterotrain_core.contract.choices import Backend
from heterotrain_core.contract.config import TrainingConfig
from heterotrain_core.contract.outcome import Ending

from heterotrain.checkpoints.manager import CheckpointManager
from heterotrain.clock import Clock
from heterotrain.errors import UsageError
from heterotrain.identity import Identity, Mode, read_config
from heterotrain.membership.elastic import Elastic
from heterotrain.membership.fixed import Fixed
from heterotrain.membership.interface import Membership, Place
from heterotrain.state import admission
from heterotrain.state.training import TrainState
from heterotrain.telemetry.report import RankMetrics
from heterotrain.termination_message import TerminationMessage


def operator_config(identity: Identity) -> TrainingConfig | None:
    """Return the operator's configuration; a worker that cannot read it says so in its outcome.

    Raises:
        UsageError: the configuration cannot be read.
    """
    try:
        return read_config()
    except UsageError as error:
        TerminationMessage(identity.termination_path, where=lambda: (0, 0)).write(
            Ending.FAILED, str(error), cause=error.cause
        )
        raise


def membership_of(
    identity: Identity,
    config: TrainingConfig,
    training: TrainState,
    checkpoints: CheckpointManager,
    *,
    device: torch.device,
    report: RankMetrics,
    shards: int,
    place: Place,
    clock: Clock = time.monotonic,
) -> Membership:
    """Return how the ranks of this job find each other: by the operator's plans, or once and for all.

    Args:
        identity: of this rank.
        config: of the job.
        training: the state that ranks send to each other.
        checkpoints: of the job.
        device: of this rank.
        report: exports what a worker waits for.
        shards: ranks of a member that divide the model among themselves.
        place: gives this rank the part of the model that a plan says.
        clock: measures how long peers are silent, and waits for them.
    """
    backend = admission.choice("backend", config.backend, Backend)
    if identity.mode is Mode.OPERATED:
        elastic = Elastic(
            identity, training, checkpoints, device=device, timeout_s=config.peer_timeout_s, backend=backend,
            on_spare=report.waits_as_spare, place=place, clock=clock,
        )  # fmt: skip
        report.look_up(gauges=elastic.gauges)
        return elastic
    return Fixed(
        identity, training, checkpoints, device=device, batch_samples=config.base_batch_samples, backend=backend,
        timeout_s=config.peer_timeout_s, shards=shards, settings=_settings(config), place=place,
    )  # fmt: skip


def _settings(config: TrainingConfig) -> dict[str, Any]:
    """Return the arguments of ``heterotrain.init`` that have to be the same on every rank."""
    return {
        "batch_samples": config.base_batch_samples, "epochs": config.epochs, "steps": config.steps,
        "seed": config.seed, "precision": config.precision, "compression": config.compression,
        "on_non_finite": config.on_non_finite, "on_divergence": config.on_divergence,
        "parallelism": config.parallelism,
    }  # fmt: skip
