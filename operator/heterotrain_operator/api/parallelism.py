"""``spec.parallelism``: whether each process holds the whole model, or several hold it together."""

from __future__ import annotations

from heterotrain_core.contract.choices import Parallelism as Mode
from pydantic import Field

from heterotrain_operator.api.schema import Model, Rule

PLANNED = (Mode.DATA, Mode.SHARDED)
"""Modes for which the operator makes plans; ``decide/plan/arrangement`` is the place for those with stages."""


class Parallelism(
    Model,
    rules=(
        Rule(
            cel="self.mode in ['Data', 'Sharded']",
            holds=lambda self: self.mode in PLANNED,
            message="parallelism.mode Pipeline and Auto are not available yet, because the operator does not plan "
            "stages: choose Data or Sharded",
        ),
    ),
):
    """How the model is divided among the processes of a job."""

    mode: Mode = Field(
        default=Mode.DATA,
        description="Data: each process holds the whole model. Sharded: the processes of a worker hold it together, "
        "and each worker gets one share of the batch; for models that fit no single accelerator. The script has to use "
        "job.wrap. Pipeline and Auto are reserved.",
    )
