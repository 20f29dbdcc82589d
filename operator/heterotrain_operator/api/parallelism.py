"""``spec.parallelism``: whether each process holds the whole model, or several hold it together."""

from __future__ import annotations

from heterotrain_core.contract.choices import Parallelism as Mode
from pydantic import Field

from heterotrain_operator.api.schema import Model

PLANNED_MODES = frozenset({Mode.PIPELINE, Mode.AUTO})
"""Modes whose members are planned from what the workers measure of the model."""


class Parallelism(Model):
    """How the model is divided among the processes of a job."""

    mode: Mode = Field(
        default=Mode.DATA,
        description="Data: each process holds the whole model. Sharded: the processes of a worker hold it together, "
        "and each worker gets one share of the batch; for models that fit no single accelerator. The script has to use "
        "job.wrap. Pipeline: several workers may hold the model together, each some of its layers; the workers measure "
        "the layers, and the operator decides which worker holds which. The script has to pass job.wrap a function. "
        "Auto: Data where the whole training state fits every device, else Pipeline.",
    )
    link_mbit_per_second: int = Field(
        default=10_000,
        ge=1,
        le=100_000_000,
        description="With mode Pipeline or Auto: megabits per second between two workers. Example: 10000.",
    )
