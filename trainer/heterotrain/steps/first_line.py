"""The first line of a run: what is trained, or that an earlier run has finished it."""

from __future__ import annotations

import logging

import torch

from heterotrain.data.progress import Progress
from heterotrain.membership.interface import ActiveGroup
from heterotrain.membership.roster import Roster

_log = logging.getLogger(__name__)


def say_where_it_begins(
    active_group: ActiveGroup, progress: Progress, *, device: torch.device, limit: str, epoch_samples: int | None,
    is_over: bool,
) -> None:  # fmt: skip
    """Log the first line, on the lowest rank; ``is_over``: an earlier run has finished the training."""
    if active_group.rank == 0 and is_over:
        _log.warning(nothing_left(progress))
    elif active_group.rank == 0:
        _log.info(first_line(active_group.roster, device=device, limit=limit, epoch_samples=epoch_samples))


def first_line(roster: Roster, *, device: torch.device, limit: str, epoch_samples: int | None) -> str:
    """Return what is trained, for people.

    Args:
        roster: the first formation.
        device: of the rank that logs it.
        limit: epochs or steps of the training.
        epoch_samples: samples of an epoch; ``None`` while unknown.
    """
    samples = "" if epoch_samples is None else f", an epoch has {epoch_samples:,} samples"
    batch = roster.plan.global_batch_samples
    ranks = len(roster.plan_ranks)
    return f"training on {device}, ranks: {ranks}, global batch: {batch} samples, {limit}{samples}"


def nothing_left(progress: Progress) -> str:
    """Return that an earlier run has finished the training, and how to go on."""
    return (
        f"nothing is left to train: an earlier run has finished the training after {progress.steps} steps in "
        f"{progress.epoch} epochs. To go on, ask for more epochs or steps; to begin again, use another folder for "
        "checkpoints"
    )
