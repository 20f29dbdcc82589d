"""Number and places of workers: ``spec.elasticPolicy`` and ``spec.workerPools``."""

from __future__ import annotations

from typing import Annotated

from heterotrain_core.contract import keys
from heterotrain_core.contract.choices import Choice
from pydantic import Field

from heterotrain_operator.api.schema import Model, SpecRule
from heterotrain_operator.api.template import PodTemplatePatch
from heterotrain_operator.api.types import MAX_BATCH, MAX_NUM_PROC_PER_WORKER, MAX_WORKERS, LabelValue, Quantity


class CapacityType(Choice):
    """Whether the cloud may take a pool's nodes away at any time."""

    ON_DEMAND = keys.CAPACITY_ON_DEMAND
    SPOT = keys.CAPACITY_SPOT


class ElasticPolicy(
    Model,
    rules=(
        SpecRule(
            cel="!has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            holds=lambda self: self.max_replicas is None or self.min_replicas <= self.max_replicas,
            message="minReplicas is larger than maxReplicas: lower minReplicas or raise maxReplicas",
        ),
    ),
):
    """Limits on the number of workers, and when a silent worker is given up."""

    min_replicas: int = Field(
        default=1,
        ge=1,
        le=MAX_WORKERS,
        description="Minimum number of workers. Training pauses while fewer are ready. The processes of a worker count "
        "as one. Example: 2.",
    )
    max_replicas: int | None = Field(
        default=None,
        ge=1,
        le=MAX_WORKERS,
        description="Maximum number of workers. Unset: the sum of the pools' maxReplicas. kubectl scale and "
        "autoscalers set this field; a HorizontalPodAutoscaler needs it set. Example: 8.",
    )
    peer_timeout_seconds: int = Field(
        default=3,
        ge=1,
        le=300,
        description="Seconds without an answer from a worker's host until the others continue without it. A hanging "
        "process on a reachable host gets four times as long. Raise it on unreliable networks. Example: 3.",
    )


class Toleration(Model):
    """A toleration as in a pod."""

    key: str | None = Field(
        default=None,
        max_length=316,
        description="Key of the taint. Empty with operator Exists: all taints. Example: nvidia.com/gpu.",
    )
    operator: Annotated[str, Field(max_length=16)] | None = Field(
        default=None, description="Equal (default) compares the value, Exists does not. Example: Exists."
    )
    value: str | None = Field(default=None, max_length=63, description="Value of the taint. Example: present.")
    effect: Annotated[str, Field(max_length=32)] | None = Field(
        default=None,
        description="Effect of the taint: NoSchedule, PreferNoSchedule or NoExecute. Empty: all. Example: NoSchedule.",
    )
    toleration_seconds: int | None = Field(
        default=None, description="Seconds for which a NoExecute taint is tolerated. Unset: forever. Example: 60."
    )


class Resources(Model):
    """Requests and limits of the training container."""

    limits: dict[str, Quantity] = Field(
        default_factory=dict,
        max_length=32,
        description="Limits of the training container. Example: {nvidia.com/gpu: 4}.",
    )
    requests: dict[str, Quantity] = Field(
        default_factory=dict,
        max_length=32,
        description="Requests of the training container. A missing entry is the limit. Example: {cpu: 8}.",
    )


class WorkerPool(
    Model,
    rules=(
        SpecRule(
            cel="self.minReplicas <= self.maxReplicas",
            holds=lambda self: self.min_replicas <= self.max_replicas,
            message="the pool's minReplicas is larger than its maxReplicas: lower minReplicas or raise maxReplicas",
        ),
    ),
):
    """A set of similar nodes, and how many workers may run there."""

    name: str = Field(
        min_length=1,
        max_length=40,
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        description="Name of the pool, unique in the job. Example: a100.",
    )
    min_replicas: int = Field(
        default=0,
        ge=0,
        le=MAX_WORKERS,
        description="Workers that must have a node in this pool before training starts. Example: 0.",
    )
    max_replicas: int = Field(
        default=1,
        ge=0,
        le=MAX_WORKERS,
        description="Maximum number of workers in this pool. 0 empties the pool. Example: 4.",
    )
    capacity_type: CapacityType = Field(
        default=CapacityType.ON_DEMAND,
        description="Spot for nodes that the cloud may take away at any time, else OnDemand.",
    )
    price_per_hour: str | None = Field(
        default=None,
        max_length=32,
        pattern=r"^[0-9]+(\.[0-9]+)?$",
        description="Price of one worker for an hour, a decimal number in quotes. Use one currency for all pools; none "
        'is assumed. Example: "3.67".',
    )
    node_selector: dict[str, LabelValue] = Field(
        default_factory=dict,
        max_length=32,
        description="Labels of the pool's nodes, in addition to the template's nodeSelector. Example: {gpu: a100}.",
    )
    tolerations: tuple[Toleration, ...] = Field(
        default=(),
        max_length=32,
        description="Tolerations of the pool's workers, in addition to the template's. Example: [{key: nvidia.com/gpu, "
        "operator: Exists}].",
    )
    resources: Resources = Field(
        default_factory=Resources,
        description="Resources of the training container. An entry here replaces the template's.",
    )
    template: PodTemplatePatch | None = Field(
        default=None,
        description="What is different in this pool's pods, merged into spec.template: image, environment, volumes, "
        "runtime class, affinity or scheduler. So one job mixes GPUs of several makers and CPUs.",
    )
    micro_batch_size: int | None = Field(
        default=None,
        ge=1,
        le=MAX_BATCH,
        description="Maximum samples that a rank of this pool processes at once; a larger share is accumulated over "
        "several micro-batches. Halved when memory does not suffice. Unset: the whole share is tried first. "
        "Example: 32.",
    )
    num_proc_per_worker: int | None = Field(
        default=None,
        ge=1,
        le=MAX_NUM_PROC_PER_WORKER,
        description="Training processes in one worker. Unset: the number of accelerators that a worker requests, else "
        "1. Example: 4.",
    )
