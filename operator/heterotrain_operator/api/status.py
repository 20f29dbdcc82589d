"""What the operator reports: ``status`` of a ``HeteroTrainJob``, bounded in size however large the job is."""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WithJsonSchema, WrapValidator

from heterotrain_operator.api.schema import PRESERVE, MapList, Model
from heterotrain_operator.api.types import TimestampText

MAX_WORKER_ROWS = 64
MAX_MESSAGE_LENGTH = 1024


class Condition(Model):
    """One aspect of the job's state."""

    type: str = Field(max_length=316, description="Name of the aspect.")
    status: Annotated[str, WithJsonSchema({"type": "string", "enum": ["True", "False", "Unknown"]})] = Field(
        description="Whether it holds."
    )
    reason: str = Field(max_length=1024, description="Why, as one CamelCase word.")
    message: str = Field(max_length=32_768, description="Why, for people.")
    last_transition_time: TimestampText = Field(description="When status last changed.")
    observed_generation: int = Field(default=0, ge=0, description="Generation of the spec that this was said of.")


class PlanStatus(Model):
    """The newest plan, and the one in force."""

    desired: str = Field(
        default="0.0", max_length=48, description="generation.revision of the newest plan, for tables."
    )
    desired_generation: int = Field(
        default=0, description="Generation of the newest plan; grows with every change of membership."
    )
    desired_revision: int = Field(default=0, description="Revision of the newest plan; grows with every other change.")
    applied: str | None = Field(
        default=None,
        max_length=48,
        description="generation.revision that every member has in force, by their own telemetry.",
    )
    applied_generation: int | None = Field(default=None, description="Generation that every member has in force.")
    applied_revision: int | None = Field(default=None, description="Revision whose shares every member uses.")
    members: int = Field(default=0, description="Ranks in the newest plan.")
    global_batch_size: int | None = Field(default=None, description="Samples of one optimizer step in the newest plan.")
    predicted_step_seconds: float | None = Field(
        default=None, description="Seconds of a step that the newest plan predicts."
    )
    predicted_efficiency: float | None = Field(default=None, description="Efficiency that the newest plan predicts.")
    efficiency_ceiling: float | None = Field(
        default=None, description="Best efficiency that the measured variances allow."
    )
    reason: str = Field(
        default="", max_length=MAX_MESSAGE_LENGTH, description="Why the newest plan differs from the one before."
    )


class PredictionStatus(Model):
    """How well the plan in force predicts; while a newer plan waits for its boundary, the last that was known."""

    plan: str = Field(max_length=48, description="generation.revision of the plan.")
    predicted_step_seconds: float = Field(description="Mean seconds of a step at its shares, as predicted.")
    measured_step_seconds: float | None = Field(
        default=None, description="The same as measured since it took effect, steps of a probe not included."
    )
    measured_over_predicted: float | None = Field(
        default=None, description="1.05: steps take 5 % longer than predicted."
    )


class CheckpointStatus(Model):
    """The newest durable checkpoint."""

    step: int = Field(description="Committed steps in it.")
    time: TimestampText = Field(description="When it became durable.")


class PoolStatus(Model):
    """Workers of one pool."""

    name: str = Field(max_length=63, description="Name of the pool.")
    desired: int = Field(description="Workers that the operator wants here now.")
    replicas: int = Field(description="Workers that have a pod.")
    placed: int = Field(description="Workers that have a node.")
    ready: int = Field(description="Workers that are ready to train.")
    granted: int | None = Field(
        default=None,
        description="Workers that the allocation gives the job here; absent while nobody else wants the nodes.",
    )
    disruptions: int = Field(default=0, description="Workers lost here through no fault of their own.")


class WorkerStatus(Model):
    """One worker; big jobs list the most remarkable ones."""

    name: str = Field(max_length=253, description="Pod name.")
    pool: str = Field(max_length=63, description="Pool.")
    state: str = Field(
        max_length=32,
        description="Waiting (for a node), Starting, Ready (not in the plan yet), Training, Leaving, Lost, Failed, Finished or Left.",
    )
    node: str | None = Field(default=None, max_length=253, description="Node.")
    share_samples: int | None = Field(
        default=None, description="Samples of each global batch, over all ranks of the worker."
    )
    binding: str | None = Field(
        default=None,
        max_length=16,
        description="What keeps it from helping more, by the plan: compute, communication, memory, or floor (its least share).",
    )
    samples_per_second: float | None = Field(
        default=None, description="Samples per second of its own computation, exchange excluded."
    )
    message: str | None = Field(default=None, max_length=MAX_MESSAGE_LENGTH, description="What is wrong with it.")


class PoolSpeed(Model):
    """Time model of a rank: ``a(b) = q b + s`` before backward and ``P(b) = k b + m`` in backward, for ``b`` samples.

    Attributes:
        samples: share near which it was measured.
        per_sample_seconds: q.
        fixed_seconds: s.
        backward_per_sample_seconds: k.
        backward_fixed_seconds: m.
        update_seconds: seconds of the optimizer, once a step.
    """

    samples: int = Field(ge=1)
    per_sample_seconds: float = Field(ge=0)
    fixed_seconds: float = Field(ge=0)
    backward_per_sample_seconds: float = Field(ge=0)
    backward_fixed_seconds: float = Field(ge=0)
    update_seconds: float = Field(default=0.0, ge=0)


class InternalPool(Model):
    """What a new operator needs to know of a pool that has no worker.

    Attributes:
        name: of the pool.
        speed: of its median rank, as last known.
        exhausted_since: since when the pool has given no node to workers that were granted there.
        exhausted_tries: how many times in a row it gave none; each time it is left alone for twice as long.
    """

    name: str
    speed: PoolSpeed | None = None
    exhausted_since: str | None = None
    exhausted_tries: int = Field(default=0, ge=0)


class InternalStatus(Model):
    """Values that the operator persists for itself, written together with the counts that they belong to.

    Attributes:
        accounted_workers: uids of ended workers that ``restarts`` and ``disruptions`` already contain.
        pools: by name.
    """

    accounted_workers: tuple[str, ...] = ()
    pools: tuple[InternalPool, ...] = ()

    def pool(self, name: str) -> InternalPool:
        """Return what is known of a pool."""
        return next((pool for pool in self.pools if pool.name == name), InternalPool(name=name))


def _readable(value: Any, read: ValidatorFunctionWrapHandler) -> InternalStatus:
    """Return the persisted values; those of another version, which this one cannot read, count as none."""
    try:
        return cast("InternalStatus", read(value))
    except ValidationError:
        return InternalStatus()


# Without a schema of its own: nothing in it is part of the API.
Internal = Annotated[
    InternalStatus,
    WrapValidator(_readable),
    WithJsonSchema({"type": "object", PRESERVE: True}),
]


class HeteroTrainJobStatus(Model):
    """What the operator reports."""

    observed_generation: int = Field(default=0, description="Generation of the spec that this status was made from.")
    state: str = Field(
        default="",
        max_length=32,
        description="One word for people: Invalid, Suspended, Pending, Starting, Running, Degraded, Resizing, Restarting, Succeeded or Failed.",
    )
    reason: str = Field(
        default="", max_length=MAX_MESSAGE_LENGTH, description="Why the job is in this state, in one sentence."
    )
    replicas: int = Field(default=0, description="Workers that have a pod.")
    selector: str = Field(
        default="",
        max_length=512,
        description="Label selector of the job's workers, in text form. The scale subresource and autoscalers read it.",
    )
    ready_replicas: int = Field(default=0, description="Workers that are ready to train.")
    desired_replicas: int = Field(default=0, description="Workers that the operator wants now.")
    ready: str = Field(default="0/0", max_length=16, description="readyReplicas/desiredReplicas, for tables.")
    pools: tuple[PoolStatus, ...] = Field(
        default=(), max_length=64, description="Workers of each pool.", json_schema_extra=MapList("name")
    )
    price_per_hour: str | None = Field(
        default=None, max_length=32, description="Price of the workers that have a node, for an hour."
    )
    restarts: int = Field(default=0, description="Workers that failed by their own fault; counts against backoffLimit.")
    disruptions: int = Field(
        default=0, description="Workers lost through no fault of their own; never counted as failures."
    )
    last_failure: str | None = Field(
        default=None, max_length=MAX_MESSAGE_LENGTH, description="The newest failure in one sentence."
    )
    last_failure_time: TimestampText | None = Field(default=None, description="When it was noticed.")
    start_time: TimestampText | None = Field(default=None, description="When the job started or was resumed.")
    training_since: TimestampText | None = Field(
        default=None, description="When the first plan with members was made after the start."
    )
    completion_time: TimestampText | None = Field(default=None, description="When the job ended.")
    plan: PlanStatus = Field(default_factory=PlanStatus, description="The newest plan, and the one in force.")
    epoch: int | None = Field(default=None, description="Epoch in progress, the first is 0.")
    step: int | None = Field(default=None, description="Committed steps.")
    samples: int | None = Field(default=None, description="Samples committed since the job began.")
    loss: float | None = Field(default=None, description="Newest loss.")
    metrics: dict[str, float] = Field(
        default_factory=dict, max_length=16, description="What else the script reports by name."
    )
    samples_per_second: float | None = Field(default=None, description="Measured throughput of the job.")
    step_seconds: float | None = Field(default=None, description="Measured mean seconds from step to step.")
    prediction: PredictionStatus | None = Field(
        default=None, description="Predicted against measured step time of the plan in force."
    )
    global_batch_size: int | None = Field(default=None, description="Samples of one optimizer step that are in force.")
    batch_reason: str | None = Field(
        default=None,
        max_length=MAX_MESSAGE_LENGTH,
        description="With adaptiveBatch: why the batch is no larger and no smaller, by the newest decision.",
    )
    noise_scale_samples: float | None = Field(
        default=None,
        description="Gradient noise scale: the batch at which noise and signal weigh the same; larger batches teach little more.",
    )
    efficiency: float | None = Field(
        default=None, description="Measured throughput over the sum of what each worker reaches alone."
    )
    progress: str | None = Field(
        default=None, max_length=16, description="Part of all samples that is committed, for tables."
    )
    progress_percentage: int | None = Field(
        default=None, ge=0, le=100, description="Part of all samples that is committed."
    )
    estimated_remaining_seconds: int | None = Field(
        default=None, ge=0, description="Time left at the present throughput."
    )
    last_checkpoint: CheckpointStatus | None = Field(default=None, description="The newest durable checkpoint.")
    workers: tuple[WorkerStatus, ...] = Field(
        default=(), max_length=MAX_WORKER_ROWS, description="Workers, at most 64.", json_schema_extra=MapList("name")
    )
    conditions: tuple[Condition, ...] = Field(
        default=(),
        max_length=32,
        description="Aspects of the state, each with its reason.",
        json_schema_extra=MapList("type"),
    )
    internal: Internal = Field(
        default_factory=InternalStatus,
        description="Private to the operator: counts and measurements that survive its restart. The contents may change in "
        "any version; do not read or edit them.",
    )


def as_body(status: HeteroTrainJobStatus) -> dict[str, Any]:
    """Return the status as the API server takes it; what is not known is absent."""
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)
