"""``spec.training``: data order, batch, numbers and exchange, independent of the machines."""

from __future__ import annotations

from heterotrain_core.contract.choices import Backend, Choice, Compression, OnDivergence, OnNonFinite, Precision
from heterotrain_core.contract.config import ANY_EPOCHS
from heterotrain_core.scaling_rules import Scaling
from pydantic import Field

from heterotrain_operator.api.schema import Model, SpecRule
from heterotrain_operator.api.types import MAX_BATCH


class RebalanceBoundary(Choice):
    """When new shares may take effect. A plan only contains the kinds of ``contract.plan.BoundaryKind``."""

    AUTO = "Auto"
    EPOCH = "Epoch"
    STEPS = "Steps"
    NEVER = "Never"


class Rebalance(
    Model,
    rules=(
        SpecRule(
            cel="self.boundary == 'Steps' ? self.everySteps > 0 : self.everySteps == 0",
            holds=lambda self: (self.boundary is RebalanceBoundary.STEPS) == (self.every_steps > 0),
            message="everySteps belongs to boundary: Steps. Set it to at least 1 there, and leave it out otherwise",
        ),
    ),
):
    """When shares change, and for which gain."""

    boundary: RebalanceBoundary = Field(
        default=RebalanceBoundary.AUTO,
        description="When new shares take effect. Auto: after some ten steps at first, and after some minutes once "
        "shares have settled. Epoch: at the end of an epoch. Steps: every everySteps steps. Never: all workers keep "
        "equal shares.",
    )
    every_steps: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="Steps between two changes of shares. Only with boundary: Steps. Example: 200.",
    )

    @property
    def keeps_even(self) -> bool:
        """Whether all workers keep equal shares."""
        return self.boundary is RebalanceBoundary.NEVER


class Encryption(Choice):
    """A choice of one: a job that asks for TLS is refused in a sentence, and never trained in plain text."""

    NONE = "None"
    TLS = "TLS"


class Communication(
    Model,
    rules=(
        SpecRule(
            cel="self.encryption == 'None'",
            holds=lambda self: self.encryption is Encryption.NONE,
            message="workers do not encrypt their connections: remove training.communication.encryption, and encrypt "
            "the network of the pods, for example by WireGuard in Cilium or Calico",
        ),
    ),
):
    """How workers exchange gradients."""

    backend: Backend = Field(
        default=Backend.AUTO,
        description="Library that exchanges gradients. Auto is NCCL among processes that have a GPU of their own, and "
        "Gloo to all others.",
    )
    encryption: Encryption = Field(
        default=Encryption.NONE,
        description="Connections between workers are authenticated, not encrypted. A job with TLS is refused: encrypt "
        "the network of the pods instead.",
    )
    compression: Compression = Field(
        default=Compression.NONE,
        description="Number format of gradients on the wire. FP16 and BF16 halve the traffic and round the gradients.",
    )


class AdaptiveBatch(
    Model,
    rules=(
        SpecRule(
            cel="self.min <= self.max",
            holds=lambda self: self.least_samples <= self.most_samples,
            message="adaptiveBatch.min is larger than adaptiveBatch.max: lower min or raise max",
        ),
    ),
):
    """The range of an adaptive global batch."""

    least_samples: int = Field(
        alias="min",
        ge=1,
        le=MAX_BATCH,
        description="Smallest global batch, in samples. Training starts with it, and the script's learning rate is the "
        "one for this batch. Example: 512.",
    )
    most_samples: int = Field(
        alias="max", ge=1, le=MAX_BATCH, description="Largest global batch, in samples. Example: 4096."
    )


class Training(Model):
    """Training settings that do not depend on the machines."""

    global_batch_size: int | None = Field(
        default=None,
        ge=1,
        le=MAX_BATCH,
        description="Samples of one optimizer step, over all workers. Set either this or adaptiveBatch. Example: 512.",
    )
    adaptive_batch: AdaptiveBatch | None = Field(
        default=None,
        description="Instead of globalBatchSize: a range in which the operator chooses the batch by throughput and "
        "measured gradient noise. The batch changes with the shares, or at an epoch's end with rebalance.boundary: "
        "Never, and only for a gain of at least 5 %.",
    )
    epochs: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Passes over the data set. Set either this or steps; without both, 1. Example: 20.",
    )
    steps: int | None = Field(
        default=None,
        ge=1,
        le=10**12,
        description="Instead of epochs: optimizer steps of the whole training, which may end within an epoch. Not with "
        "adaptiveBatch, whose steps differ in size. Example: 100000.",
    )
    seed: int = Field(
        default=0,
        ge=0,
        le=2**53,
        description="Seed of the sample order and of the random generators in every process. Example: 42.",
    )
    rebalance: Rebalance = Field(default_factory=Rebalance, description="When the workers' shares of the batch change.")
    precision: Precision = Field(
        default=Precision.AUTO,
        description="Number format of the forward pass. Auto is BF16 if the accelerators of all workers support it, "
        "else FP32.",
    )
    learning_rate_scaling: Scaling = Field(
        default=Scaling.NONE,
        description="How the learning rate follows the global batch. AdaScale uses the measured gradient noise.",
    )
    learning_rate_warmup_samples: int | None = Field(
        default=None,
        ge=0,
        le=2**53,
        description="Samples over which a changed learning-rate factor takes effect. Unset: 100 times the first batch. "
        "Example: 51200.",
    )
    on_non_finite: OnNonFinite = Field(
        default=OnNonFinite.FAIL,
        description="What happens to a step whose loss or gradient is infinite or NaN. Fail ends the workers before "
        "the step changes the weights. Skip leaves the weights as they are and goes on. Ignore applies the step. No "
        "job succeeds with weights that are not finite.",
    )
    on_divergence: OnDivergence = Field(
        default=OnDivergence.FAIL,
        description="What happens when the workers' copies of the training state turn out to differ. Fail ends all "
        "workers, Warn only reports it, Resync sends the state of one worker to all others.",
    )
    communication: Communication = Field(default_factory=Communication, description="How workers exchange gradients.")

    @property
    def passes(self) -> int:
        """Passes over the data set; ``ANY_EPOCHS`` where steps decide."""
        return self.epochs or (1 if self.steps is None else ANY_EPOCHS)

    @property
    def base_batch_samples(self) -> int:
        """The global batch that training starts with, and that the script's learning rate was chosen for.

        It is 1 for a Torchrun script, which chooses its batch itself; ``read_spec`` lets no other job through without.
        """
        if self.adaptive_batch is not None:
            return self.adaptive_batch.least_samples
        return self.global_batch_size if self.global_batch_size is not None else 1
