"""Sets up a rank before its script has a model: the job's configuration, and the way to the other ranks."""

from __future__ import annotations

from typing import Any

from heterotrain_core.contract.config import TrainingConfig
from heterotrain_core.contract.outcome import Ending

from heterotrain.errors import UsageError
from heterotrain.identity import Identity, Mode, read_config
from heterotrain.membership.elastic import Elastic
from heterotrain.membership.fixed import Fixed
from heterotrain.membership.interface import Membership, OwnSide
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


def membership_of(own: OwnSide, config: TrainingConfig, *, report: RankMetrics, shards: int) -> Membership:
    """Return how the ranks of this job find each other: by the operator's plans, or once and for all.

    Args:
        own: this rank.
        config: of the job.
        report: exports what a worker waits for.
        shards: ranks of a member that divide the model among themselves.
    """
    if own.identity.mode is Mode.OPERATED:
        elastic = Elastic(own, on_spare=report.waits_as_spare)
        report.look_up(gauges=elastic.gauges)
        return elastic
    return Fixed(own, batch_samples=config.base_batch_samples, shards=shards, settings=_settings(config))


def _settings(config: TrainingConfig) -> dict[str, Any]:
    """Return the arguments of ``heterotrain.init`` that have to be the same on every rank."""
    return {
        "batch_samples": config.base_batch_samples, "epochs": config.epochs, "steps": config.steps,
        "seed": config.seed, "precision": config.precision, "compression": config.compression,
        "on_non_finite": config.on_non_finite, "on_divergence": config.on_divergence,
        "parallelism": config.parallelism,
    }  # fmt: skip
