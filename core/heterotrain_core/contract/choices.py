"""Choices of the job's spec that operator and trainer share, spelled as in the API (CamelCase)."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Choice(StrEnum):
    """An enum whose values are read in any case: a training script may write ``precision="bf16"``."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str):
            return None
        return next((member for member in cls if member.value.lower() == value.lower()), None)


class Runtime(Choice):
    """Which program in the pods makes a training job of the workers."""

    HETEROTRAIN = "HeteroTrain"
    """The script uses this library: shares by speed, and survivors go on after a loss."""
    TORCHRUN = "Torchrun"
    """Any script for torchrun: a fixed world of equal ranks, restarted by the launcher when the membership changes."""


class Precision(Choice):
    """Number format of the forward pass."""

    AUTO = "Auto"
    """BF16 if every rank of the formation computes faster in it, else FP32."""
    FP32 = "FP32"
    BF16 = "BF16"
    FP16 = "FP16"


class Backend(Choice):
    """The library that exchanges gradients."""

    AUTO = "Auto"
    """NCCL among ranks that have a GPU of their own, and Gloo to all others."""
    GLOO = "Gloo"
    NCCL = "NCCL"


class Parallelism(Choice):
    """How members are formed."""

    DATA = "Data"
    """Each rank is a member and holds the whole model."""
    SHARDED = "Sharded"
    """The ranks of a worker are one member, and each holds a part of every tensor."""
    SHARDED_ACROSS_WORKERS = "ShardedAcrossWorkers"
    """The ranks of one or several workers are one member; the parts suit memory and speed of each."""
    PIPELINE = "Pipeline"
    """A member has stages on several workers, each with some of the model's units."""
    AUTO = "Auto"
    """The layout with the highest predicted rate."""


class Compression(Choice):
    """Number format of gradients on the wire."""

    NONE = "None"
    FP16 = "FP16"
    BF16 = "BF16"


class OnNonFinite(Choice):
    """What happens to a step whose loss or gradient is not finite (infinite or NaN), on all ranks alike."""

    FAIL = "Fail"
    """The workers fail before the step changes the weights."""
    SKIP = "Skip"
    """The step takes its samples and leaves the weights as they are."""
    IGNORE = "Ignore"
    """The step is applied, as plain PyTorch does."""


class OnDivergence(Choice):
    """What happens when the ranks' copies of the training state turn out to differ."""

    FAIL = "Fail"
    """All workers fail."""
    WARN = "Warn"
    """Training goes on; a warning and a metric report it."""
    RESYNC = "Resync"
    """One rank sends its state to the others, and training goes on."""


class Objective(Choice):
    """The quantity that a job maximises."""

    THROUGHPUT = "Throughput"
    """Samples per second."""
    GOODPUT = "Goodput"
    """Samples per second at the best batch, weighted by how much each sample contributes there."""
    COST = "Cost"
    """Goodput per price: the cheapest samples."""
    DEADLINE = "Deadline"
    """Done in time at the lowest price (without prices: with the fewest workers).

    Samples per second where the deadline is out of reach, or while the remaining work is not known.
    """
