"""What is trained, independent of the machines: ``spec.training``."""

from __future__ import annotations

from heterotrain_core.contract.choices import Backend, Compression, Precision
from heterotrain_core.contract.plan import BoundaryKind
from heterotrain_core.scaling_rules import Scaling
from pydantic import Field

from heterotrain_operator.api.schema import CEL, Model
from heterotrain_operator.api.types import MAX_BATCH


class Rebalance(
    Model,
    rules=(
        CEL(
            rule="self.boundary == 'Steps' ? self.everySteps > 0 : self.everySteps == 0",
            message="everySteps belongs to boundary: Steps and has to be at least 1 there; leave it out for other boundaries",
        ),
    ),
):
    """When and how readily shares are changed."""

    boundary: BoundaryKind = Field(
        default=BoundaryKind.EPOCH,
        description="Where new shares take effect: at an epoch's end, every everySteps steps, or Never (even shares, the baseline).",
    )
    every_steps: int = Field(
        default=0, ge=0, le=1_000_000, description="Steps between boundaries; only with boundary: Steps."
    )
    min_gain_percent: int = Field(
        default=1,
        ge=0,
        le=100,
        description="Shares change only if the predicted step time falls by at least this many percent. Uncertain "
        "measurements raise the threshold. Example: 1.",
    )


class Communication(Model):
    """How gradients travel."""

    backend: Backend = Field(
        default=Backend.AUTO, description="Auto takes NCCL where every rank has a GPU of its own, else Gloo."
    )
    compression: Compression = Field(
        default=Compression.NONE,
        description="Number format of gradients on the wire; anything but None loses accuracy.",
    )
    bucket_mib: int = Field(
        default=25,
        alias="bucketMiB",
        ge=1,
        le=1024,
        description="Gradients are exchanged in buckets; one ends as soon as it holds so many MiB.",
    )


class AdaptiveBatch(
    Model,
    rules=(
        CEL(
            rule="self.min <= self.max",
            message="adaptiveBatch.min is larger than adaptiveBatch.max: lower min or raise max",
        ),
    ),
):
    """The range in which the operator chooses the global batch that learns fastest."""

    least_samples: int = Field(
        alias="min",
        ge=1,
        le=MAX_BATCH,
        description="Least samples of an optimizer step. Training starts with it, and the script's learning rate is the one "
        "for this batch; learningRateScaling says how the rate follows a larger one.",
    )
    most_samples: int = Field(alias="max", ge=1, le=MAX_BATCH, description="Most samples of an optimizer step.")


class Training(
    Model,
    rules=(
        CEL(
            rule="has(self.globalBatchSize) != has(self.adaptiveBatch)",
            message="give exactly one of training.globalBatchSize (a fixed batch) and training.adaptiveBatch (a range: min and max)",
        ),
    ),
):
    """What is trained, independent of the machines."""

    global_batch_size: int | None = Field(
        default=None,
        ge=1,
        le=MAX_BATCH,
        description="Samples of one optimizer step over all workers; the gradient is exactly that of this batch. "
        "Either this or adaptiveBatch.",
    )
    adaptive_batch: AdaptiveBatch | None = Field(
        default=None,
        description="Instead of globalBatchSize: the operator measures the gradient noise scale and chooses the batch by "
        "throughput times what a sample is worth in it. It changes where shares change, with rebalance.boundary Never at "
        "an epoch's end, and only for a gain of 5 % or more.",
    )
    epochs: int = Field(default=1, ge=1, le=1_000_000, description="Passes over the data set.")
    seed: int = Field(
        default=0, ge=0, le=2**53, description="Seeds the order of the samples and every rank's generators."
    )
    rebalance: Rebalance = Field(default_factory=Rebalance, description="When and how readily shares are changed.")
    precision: Precision = Field(
        default=Precision.AUTO,
        description="Number format of the forward pass; Auto takes BF16 where every worker's accelerator has it, else FP32.",
    )
    learning_rate_scaling: Scaling = Field(
        default=Scaling.NONE,
        description="How the learning rate follows a global batch that differs from the one it was chosen for; schedules "
        "advance by what a step is worth.",
    )
    learning_rate_warmup_samples: int | None = Field(
        default=None,
        ge=0,
        le=2**53,
        description="Samples over which a changed learning-rate factor comes into force; without it, 100 base batches.",
    )
    communication: Communication = Field(default_factory=Communication, description="How gradients travel.")

    @property
    def base_batch_samples(self) -> int:
        """The global batch that training starts with, and that the script's learning rate was chosen for."""
        if self.adaptive_batch is not None:
            return self.adaptive_batch.least_samples
        assert self.global_batch_size is not None  # noqa: S101  # read_spec lets exactly one through
        return self.global_batch_size
