"""Where workers may run and how many: ``spec.workerPools`` and ``spec.elasticPolicy``."""

from __future__ import annotations

from typing import Annotated

from heterotrain_core.contract import keys
from heterotrain_core.contract.choices import Choice
from pydantic import Field

from heterotrain_operator.api.schema import CEL, Model
from heterotrain_operator.api.types import MAX_NUM_PROC_PER_WORKER, MAX_WORKERS, LabelValue, Quantity


class CapacityType(Choice):
    """How long a pool's nodes may be expected to stay."""

    ON_DEMAND = keys.CAPACITY_ON_DEMAND
    SPOT = keys.CAPACITY_SPOT


class ElasticPolicy(
    Model,
    rules=(
        CEL(
            rule="!has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            message="minReplicas is larger than maxReplicas: lower minReplicas or raise maxReplicas",
        ),
    ),
):
    """How many workers in all, and when one is given up."""

    min_replicas: int = Field(default=1, ge=1, le=MAX_WORKERS, description="Workers below which training waits.")
    max_replicas: int | None = Field(
        default=None, ge=1, le=MAX_WORKERS, description="Most workers; without it, the sum of the pools' maxReplicas."
    )
    peer_timeout_seconds: int = Field(
        default=3,
        ge=1,
        le=300,
        description="Silence of a worker's host after which the others go on without it; a process that hangs on a host that "
        "answers is given four times as long. Raise it where the network stalls now and then.",
    )


class Toleration(Model):
    """A Kubernetes toleration."""

    key: str | None = Field(
        default=None, max_length=316, description="Taint key; empty matches all with operator Exists."
    )
    operator: Annotated[str, Field(max_length=16)] | None = Field(
        default=None, description="Equal (default) or Exists."
    )
    value: str | None = Field(default=None, max_length=63, description="Taint value.")
    effect: Annotated[str, Field(max_length=32)] | None = Field(
        default=None, description="NoSchedule, PreferNoSchedule or NoExecute; empty matches all."
    )
    toleration_seconds: int | None = Field(default=None, description="How long a NoExecute taint is tolerated.")


class Resources(Model):
    """Requests and limits of the training container."""

    limits: dict[str, Quantity] = Field(
        default_factory=dict, max_length=32, description="Most that a worker may use, e.g. nvidia.com/gpu: 4."
    )
    requests: dict[str, Quantity] = Field(
        default_factory=dict,
        max_length=32,
        description="What the scheduler sets aside; a missing entry takes the limit.",
    )


class WorkerPool(
    Model,
    rules=(
        CEL(
            rule="self.minReplicas <= self.maxReplicas",
            message="the pool's minReplicas is larger than its maxReplicas: lower minReplicas or raise maxReplicas",
        ),
    ),
):
    """A set of nodes with one kind of accelerator, and how many workers may run there."""

    name: str = Field(
        min_length=1,
        max_length=40,
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        description="Name of the pool, unique in the job.",
    )
    min_replicas: int = Field(
        default=0, ge=0, le=MAX_WORKERS, description="Workers that have to run in this pool before training starts."
    )
    max_replicas: int = Field(default=1, ge=1, le=MAX_WORKERS, description="Most workers in this pool.")
    capacity_type: CapacityType = Field(
        default=CapacityType.ON_DEMAND,
        description="OnDemand, or Spot for nodes that the cloud may take away at any time.",
    )
    price_per_hour: str | None = Field(
        default=None,
        max_length=32,
        pattern=r"^[0-9]+(\.[0-9]+)?$",
        description="Price of one worker for an hour, a decimal number in quotes; status.pricePerHour adds them up.",
    )
    node_selector: dict[str, LabelValue] = Field(
        default_factory=dict,
        max_length=32,
        description="Labels of the pool's nodes; added to the template's own nodeSelector.",
    )
    tolerations: tuple[Toleration, ...] = Field(
        default=(),
        max_length=32,
        description="Taints of the pool's nodes that workers tolerate; added to the template's own.",
    )
    resources: Resources = Field(
        default_factory=Resources,
        description="Resources of the training container; an entry here wins over the template's.",
    )
    num_proc_per_worker: int | None = Field(
        default=None,
        ge=1,
        le=MAX_NUM_PROC_PER_WORKER,
        description="Processes that train in one pod; without it, the number of accelerators that a worker requests, else 1.",
    )
