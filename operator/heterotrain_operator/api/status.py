"""``status`` of a ``HeteroTrainJob``: bounded in size, however large the job is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from heterotrain_operator.api.internal_status import Internal, InternalStatus
from heterotrain_operator.api.schema import MapList, Model
from heterotrain_operator.api.tolerant import read_tolerantly
from heterotrain_operator.api.types import Count, Number, TimestampText

MAX_WORKER_ROWS = 64
MAX_MESSAGE_LENGTH = 1024
MAX_FAILURE_LENGTH = 256


class Condition(Model):
    """One condition of the job."""

    type: str = Field(max_length=316, description="Type of the condition in CamelCase, such as Ready.")
    status: Annotated[str, WithJsonSchema({"type": "string", "enum": ["True", "False", "Unknown"]})] = Field(
        description="Whether the condition holds."
    )
    reason: str = Field(max_length=1024, description="Reason for the status, one CamelCase word for programs.")
    message: str = Field(max_length=32_768, description="Explanation for people.")
    last_transition_time: TimestampText = Field(description="Time of the last change of status.")
    observed_generation: Count = Field(
        default=0, description="metadata.generation of the spec that the condition describes."
    )


class PlanStatus(Model):
    """The newest plan, and the plan in force.

    A plan assigns each worker its share of the batch. Its version is generation.revision.
    """

    desired: str = Field(
        default="0.0",
        max_length=48,
        description="Version (generation.revision) of the newest "
        "plan. The generation grows when workers join or leave, the revision with every plan.",
    )
    applied: str | None = Field(
        default=None, max_length=48, description="Version of the plan that all workers report to be in force."
    )
    members: Count = Field(default=0, description="Members of the newest plan: each gets one share of the batch.")
    layout: str | None = Field(
        default=None,
        max_length=MAX_MESSAGE_LENGTH,
        description="Of planned members: the pools of each member's stages and their units, such as "
        "2 members: [a100: units 0-17 | t4: 18-23] [v100: 0-11 | v100: 12-23]. Of sharded ones, the part of the "
        "training state on each device, such as 1 member: [a100: 80% + t4: 20% of all units].",
    )
    efficiency_ceiling: Number | None = Field(
        default=None, description="Highest efficiency that the measured noise of step times allows, from 0 to 1."
    )
    reason: str = Field(
        default="", max_length=MAX_MESSAGE_LENGTH, description="Why the newest plan differs from the one before."
    )

    @property
    def newest(self) -> tuple[int, int]:
        """Generation and revision of ``desired``; zeros where others have made it unreadable."""
        found = re.fullmatch(r"([0-9]{1,16})\.([0-9]{1,16})", self.desired)
        return (int(found[1]), int(found[2])) if found else (0, 0)


class PredictionStatus(Model):
    """Predicted and measured step time of the plan in force; while a newer plan waits, the last known values."""

    plan: str = Field(max_length=48, description="Version (generation.revision) of the plan.")
    predicted_step_seconds: Number = Field(description="Predicted mean duration of a step, in seconds.")
    measured_step_seconds: Number | None = Field(
        default=None,
        description="Measured mean duration of a step since the plan took effect, in seconds. Steps that try other "
        "shares do not count.",
    )


class CheckpointStatus(Model):
    """The newest durable checkpoint."""

    step: Count = Field(description="Optimizer steps that it contains.")
    time: TimestampText = Field(description="Time at which it became durable.")


class ContinuedStatus(Model):
    """The checkpoint of an earlier job, or in an earlier folder, from which training continued."""

    source: str = Field(max_length=1024, description="Folder or job, as in checkpoint.resumeFrom.")
    step: Count = Field(description="Optimizer steps that it contains.")


class PoolStatus(Model):
    """Workers of one pool."""

    name: str = Field(max_length=63, description="Name of the pool.")
    desired: Count = Field(description="Number of workers that the operator currently wants in the pool.")
    replicas: Count = Field(description="Workers that have a pod.")
    placed: Count = Field(description="Workers that have a node.")
    ready: Count = Field(description="Workers that are ready to train.")
    granted: Count | None = Field(
        default=None,
        description="Workers that the job may have in the pool while jobs compete for its nodes. Absent without "
        "competition.",
    )
    disruptions: Count = Field(
        default=0,
        description="Workers of the pool that were lost through no fault of their own, for example by eviction.",
    )


class WorkerStatus(Model):
    """One worker."""

    name: str = Field(max_length=253, description="Name of the pod.")
    pool: str = Field(max_length=63, description="Name of the pool.")
    state: str = Field(
        max_length=32,
        description="Waiting (for a node), Starting, Ready (not in the plan yet), Training, Leaving, Lost, Failed, "
        "Disrupted, Finished or Left.",
    )
    node: str | None = Field(default=None, max_length=253, description="Name of the node.")
    share_samples: Count | None = Field(
        default=None, description="Samples of each global batch that the worker computes, over all its processes."
    )
    binding: str | None = Field(
        default=None,
        max_length=16,
        description="The limit on the worker's share: Compute, Communication, Memory, Fill (the first and last "
        "micro-batches of a pipeline), or Floor (it has its smallest share and is still too slow).",
    )
    units: str | None = Field(
        default=None,
        max_length=64,
        description="Of planned members: the units of the model that the worker's stage holds, such as 0-17, or the "
        "part that it holds of every unit, such as 20% of all.",
    )
    memory: str | None = Field(
        default=None,
        max_length=32,
        description="What the worker spares since it ran out of memory: SmallerMicroBatches, or ActivationsRecomputed "
        "(units of the model compute their activations again in the backward pass). Absent where memory sufficed.",
    )
    samples_per_second: Number | None = Field(
        default=None, description="Samples per second of the worker's own computation, without the gradient exchange."
    )
    message: str | None = Field(
        default=None, max_length=MAX_MESSAGE_LENGTH, description="What is wrong with the worker, or why it leaves."
    )


class NodeFailures(Model):
    """Failures of the job's workers on one node."""

    name: str = Field(max_length=253, description="Name of the node.")
    failures: Count = Field(description="Failures there while workers on other nodes went on.")
    last_time: TimestampText = Field(description="Time of the newest.")
    reason: str = Field(max_length=MAX_FAILURE_LENGTH, description="The newest, in one sentence.")
    named: bool = Field(default=False, description="Whether a rule of failurePolicy asks to avoid the node.")
    avoided: bool = Field(default=False, description="Whether the job gets no more workers there.")


class HeteroTrainJobStatus(Model):
    """Observed state of a training job."""

    observed_generation: Count = Field(
        default=0, description="metadata.generation of the spec that this status describes."
    )
    state: str = Field(
        default="",
        max_length=32,
        description="Summary in one word: Invalid, Suspended, Pending, Starting, Running, Degraded, Resizing, "
        "Restarting, Succeeded or Failed.",
    )
    reason: str = Field(default="", max_length=MAX_MESSAGE_LENGTH, description="Why the job is in this state.")
    replicas: Count = Field(default=0, description="Workers that have a pod.")
    selector: str = Field(
        default="",
        max_length=512,
        description="Label selector of the job's workers, in text form. The scale subresource and autoscalers read it.",
    )
    ready_replicas: Count = Field(default=0, description="Workers that are ready to train.")
    desired_replicas: Count = Field(default=0, description="Number of workers that the operator currently wants.")
    updated_replicas: Count = Field(
        default=0, description="Workers whose pods were made from the present template and pools."
    )
    ready: str = Field(default="0/0", max_length=16, description="readyReplicas/desiredReplicas, for the table.")
    pools: tuple[PoolStatus, ...] = Field(
        default=(), max_length=64, description="Workers by pool.", json_schema_extra=MapList("name")
    )
    price_per_hour: str | None = Field(
        default=None,
        max_length=32,
        description="Sum of the pools' pricePerHour over all workers that have a node, in the currency of those "
        "prices.",
    )
    cost: str | None = Field(
        default=None,
        max_length=32,
        description="Sum of the pools' pricePerHour over the time in which workers had nodes, in the currency of those "
        "prices. Updated about once a minute.",
    )
    cost_per_step: str | None = Field(
        default=None,
        max_length=32,
        description="Cost of one optimizer step at the present pricePerHour and stepSeconds.",
    )
    restarts: Count = Field(
        default=0, description="Workers that failed by their own fault. They count against backoffLimit."
    )
    disruptions: Count = Field(
        default=0,
        description="Workers that were lost through no fault of their own, for example by eviction. They never count "
        "as failures.",
    )
    last_failure: str | None = Field(
        default=None, max_length=MAX_MESSAGE_LENGTH, description="The newest worker failure, in one sentence."
    )
    last_failure_time: TimestampText | None = Field(default=None, description="Time of the newest worker failure.")
    nodes_with_failures: tuple[NodeFailures, ...] = Field(
        default=(),
        max_length=32,
        description="Nodes on which workers failed within a day, and whether the job avoids them; see "
        "spec.failurePolicy.",
        json_schema_extra=MapList("name"),
    )
    start_time: TimestampText | None = Field(default=None, description="Time at which the job started or was resumed.")
    training_since: TimestampText | None = Field(
        default=None, description="Time at which training began after the last start or resume."
    )
    completion_time: TimestampText | None = Field(default=None, description="Time at which the job ended.")
    plan: PlanStatus = Field(
        default_factory=PlanStatus,
        description="The newest plan and the plan in force. A plan assigns each worker its share of the batch.",
    )
    epoch: Count | None = Field(
        default=None,
        description="Number of completed epochs, which is the index of the epoch in progress, counted from 0. At the "
        "end it equals spec.training.epochs, where that is set.",
    )
    step: Count | None = Field(default=None, description="Number of completed optimizer steps.")
    samples: Count | None = Field(default=None, description="Number of samples in all completed steps.")
    loss: Number | None = Field(default=None, description="Newest training loss.")
    metrics: dict[str, Number] = Field(
        default_factory=dict,
        max_length=16,
        description="Newest values that the training script reports, by name; at most 16.",
    )
    samples_per_second: Number | None = Field(default=None, description="Measured throughput of the job.")
    step_seconds: Number | None = Field(
        default=None, description="Measured mean time from one step to the next, in seconds."
    )
    prediction: PredictionStatus | None = Field(
        default=None, description="Predicted and measured step time of the plan in force."
    )
    global_batch_size: Count | None = Field(default=None, description="Samples of one optimizer step at present.")
    batch_reason: str | None = Field(
        default=None,
        max_length=MAX_MESSAGE_LENGTH,
        description="With adaptiveBatch: why the batch has its size.",
    )
    noise_scale_samples: Number | None = Field(
        default=None,
        description="Gradient noise scale, in samples. A global batch much larger than this brings little progress per "
        "sample.",
    )
    efficiency: Number | None = Field(
        default=None,
        description="Measured throughput over the sum of the workers' own samplesPerSecond. 1 means that no worker "
        "waits.",
    )
    progress: str | None = Field(
        default=None, max_length=16, description="progressPercentage with a percent sign, for the table."
    )
    progress_percentage: int | None = Field(
        default=None,
        ge=0,
        le=100,
        description="Completed part of all samples of all epochs, or of spec.training.steps, in percent.",
    )
    estimated_remaining_seconds: Count | None = Field(
        default=None, ge=0, description="Estimated time to the end of training at the present throughput, in seconds."
    )
    last_checkpoint: CheckpointStatus | None = Field(default=None, description="The newest durable checkpoint.")
    continued_from: ContinuedStatus | None = Field(
        default=None,
        description="What another job had reached when this one continued from its checkpoint. By "
        "telemetry, so not without a Prometheus; the workers' logs have the step in any case.",
    )
    workers: tuple[WorkerStatus, ...] = Field(
        default=(),
        max_length=MAX_WORKER_ROWS,
        description="Workers. In a larger job 64 of them, those that are not ready first.",
        json_schema_extra=MapList("name"),
    )
    conditions: tuple[Condition, ...] = Field(
        default=(),
        max_length=32,
        description="Conditions of the job. Ready, Reconciling and Stalled summarize them for Helm, Flux and Argo CD.",
        json_schema_extra=MapList("type"),
    )
    internal: Internal = Field(
        default_factory=InternalStatus,
        description="Private to the operator: values that it keeps for its next start. The contents may change in any "
        "version. Do not read or edit them.",
    )


def as_body(status: HeteroTrainJobStatus) -> dict[str, Any]:
    """Return the status as a JSON object; unknown values are absent."""
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def read_status(body: Mapping[str, Any]) -> HeteroTrainJobStatus:
    """Return the job's status; values of another version that this one cannot read are left out."""
    return read_tolerantly(HeteroTrainJobStatus, body.get("status") or {})
