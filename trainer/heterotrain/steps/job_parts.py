"""What a job of one rank consists of, before its first step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from heterotrain_core.contract.config import TrainingConfig

from heterotrain.checkpoints.manager import CheckpointManager
from heterotrain.clock import Clock
from heterotrain.identity import Identity
from heterotrain.membership.interface import Membership
from heterotrain.numerics.method import Numerics
from heterotrain.parts.interface import Wrapped
from heterotrain.state.training import TrainState
from heterotrain.telemetry.report import RankMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class JobParts:
    """The parts of a job that live as long as its process.

    Attributes:
        identity: of this rank.
        config: of the training.
        device: of this rank.
        training: its state.
        membership: forms groups of ranks.
        checkpoints: writes and reads the state.
        numerics: the numeric settings.
        report: telemetry.
        wrapped: the part of the model, once the script has wrapped it.
        clock: measures how long peers are silent, and the limits of waits.
    """

    identity: Identity
    config: TrainingConfig
    device: torch.device
    training: TrainState
    membership: Membership
    checkpoints: CheckpointManager
    numerics: Numerics
    report: RankMetrics
    wrapped: Wrapped
    clock: Clock
