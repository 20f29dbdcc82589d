"""``HeteroTrainJob`` as users write it: ``heterotrain.dev/v1alpha1``.

The CRD in ``crds/`` is generated from these models (``api/crd.py``), so the descriptions here are what ``kubectl explain``
prints, and the limits are what the API server enforces. A field that nothing implements is not here.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from heterotrain_core.contract import env, keys
from pydantic import AwareDatetime, Field, WithJsonSchema

from heterotrain_operator.api.schema import CEL, MapList, Model

MAX_POOLS = 32
MAX_WORKERS = 1000
MAX_RANKS_PER_WORKER = 16
MAX_BATCH = 10_000_000
MAX_NAME_LENGTH = 48
"""Room for ``-w999`` and ``-on-demand`` below the 63 characters of a label or host name."""

MANAGED_BY_US = f"{keys.GROUP}/operator"
MANAGED_BY_MULTIKUEUE = "kueue.x-k8s.io/multikueue"

Quantity = Annotated[
    int | str,
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "pattern": r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[mkMGTPE]|[eE][-+]?[0-9]+)?$",
        }
    ),
]
"""A Kubernetes quantity; a negative one is refused by the pattern."""

Moment = Annotated[AwareDatetime, WithJsonSchema({"type": "string", "format": "date-time"})]
"""A time in RFC 3339."""

LabelValue = Annotated[str, Field(max_length=63)]
EnvName = Annotated[str, Field(min_length=1, max_length=256)]


class CapacityType(StrEnum):
    """How long a pool's nodes may be expected to stay."""

    ON_DEMAND = keys.CAPACITY_ON_DEMAND
    SPOT = keys.CAPACITY_SPOT


class RebalanceBoundary(StrEnum):
    """When new shares take effect."""

    EPOCH = "epoch"
    STEPS = "steps"
    NEVER = "never"


class Precision(StrEnum):
    """Number format of forward and backward."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class LearningRateScaling(StrEnum):
    """How the learning rate follows a changed global batch."""

    NONE = "none"
    LINEAR = "linear"
    SQRT = "sqrt"
    ADASCALE = "adascale"


class Backend(StrEnum):
    """What carries the gradients."""

    AUTO = "auto"
    GLOO = "gloo"
    NCCL = "nccl"


class Compression(StrEnum):
    """Number format of gradients on the wire."""

    NONE = "none"
    FP16 = "fp16"
    BF16 = "bf16"


class Objective(StrEnum):
    """What a job wants most where jobs compete for nodes."""

    THROUGHPUT = "throughput"
    GOODPUT = "goodput"
    COST = "cost"
    DEADLINE = "deadline"


class CleanPodPolicy(StrEnum):
    """What happens to pods when the job ends."""

    NONE = "None"
    RUNNING = "Running"
    ALL = "All"


class Rebalance(
    Model,
    rules=(
        CEL(
            rule="self.boundary == 'steps' ? self.everySteps > 0 : self.everySteps == 0",
            message="everySteps belongs to boundary: steps and has to be at least 1 there; leave it out for other boundaries",
        ),
    ),
):
    """When and how readily shares are changed."""

    boundary: RebalanceBoundary = Field(
        default=RebalanceBoundary.EPOCH,
        description="Where new shares take effect: at an epoch's end, every everySteps steps, or never (even shares, the baseline).",
    )
    every_steps: int = Field(
        default=0, ge=0, le=1_000_000, description="Steps between boundaries; only with boundary: steps."
    )
    min_gain: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Shares change only for a predicted step that is shorter by this fraction at least, and by more than chance "
        "could promise while speeds are known badly.",
    )


class Communication(Model):
    """How gradients travel."""

    backend: Backend = Field(
        default=Backend.AUTO, description="auto takes NCCL where every rank has a GPU of its own, else gloo."
    )
    compression: Compression = Field(
        default=Compression.NONE,
        description="Number format of gradients on the wire; anything but none loses accuracy.",
    )
    bucket_mib: int = Field(
        default=25,
        alias="bucketMiB",
        ge=1,
        le=1024,
        description="Size in MiB of the buckets in which gradients are exchanged.",
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
        "throughput times what a sample is worth in it. It changes where shares change, with rebalance.boundary never at "
        "an epoch's end, and only for a gain of 5 % or more.",
    )
    epochs: int = Field(default=1, ge=1, le=1_000_000, description="Passes over the data set.")
    seed: int = Field(
        default=0, ge=0, le=2**53, description="Seeds the order of the samples and every rank's generators."
    )
    rebalance: Rebalance = Field(default_factory=Rebalance, description="When and how readily shares are changed.")
    precision: Precision = Field(
        default=Precision.AUTO,
        description="Number format of the forward pass; auto takes bf16 where every worker's accelerator has it, else fp32.",
    )
    learning_rate_scaling: LearningRateScaling = Field(
        default=LearningRateScaling.NONE,
        description="How the learning rate follows a global batch that differs from the one it was chosen for; schedules "
        "advance by what a step is worth.",
    )
    learning_rate_warm_up_samples: int | None = Field(
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
        description="on-demand, or spot for nodes that the cloud may take away at any time.",
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
    ranks_per_worker: int | None = Field(
        default=None,
        ge=1,
        le=MAX_RANKS_PER_WORKER,
        description="Processes that train in one pod; without it, the number of accelerators that a worker requests, else 1.",
    )


class Checkpoint(Model):
    """Where and how often state is saved."""

    uri: str = Field(
        min_length=1,
        max_length=1024,
        pattern=r"^[a-z][a-z0-9+.-]*://.+$",
        description="Where checkpoints go: file:///checkpoints (mount a volume there), or any URI of fsspec, such as "
        "s3://bucket/path or gs://bucket/path, whose Python package (s3fs, gcsfs) is in the image.",
    )
    every_minutes: float = Field(default=10, ge=0.01, le=10_080, description="Minutes between durable checkpoints.")
    keep: int = Field(default=3, ge=1, le=1000, description="Newest checkpoints that are kept.")
    keep_hours: float | None = Field(
        default=None,
        ge=0.01,
        le=1_000_000,
        description="Hours after which one of them is no longer kept, unless it is the newest; by default their number alone "
        "counts.",
    )


class EnvVar(
    Model,
    preserve=True,
    rules=(
        CEL(
            rule=f"!self.name.startsWith('{env.PREFIX}') || self.name in {sorted(env.USER_SETTABLE)}",
            message=f"names that start with {env.PREFIX} belong to the operator: give the variable another name",
        ),
    ),
):
    """An environment variable."""

    name: EnvName = Field(description="Name of the variable.")


class Container(Model, preserve=True):
    """A container; everything that Kubernetes knows is allowed."""

    name: str = Field(min_length=1, max_length=63, description="Name of the container.")
    env: tuple[EnvVar, ...] = Field(
        default=(), max_length=200, description="Environment; the operator adds its own variables."
    )


class Volume(
    Model,
    preserve=True,
    rules=(
        CEL(
            rule=f"!(self.name in {sorted([keys.CONTAINER_PLAN_VOLUME, keys.CONTAINER_SHM_VOLUME])})",
            message=f"the volume names {keys.CONTAINER_PLAN_VOLUME} and {keys.CONTAINER_SHM_VOLUME} belong to the operator: "
            "give the volume another name",
        ),
    ),
):
    """A volume; everything that Kubernetes knows is allowed."""

    name: str = Field(min_length=1, max_length=63, description="Name of the volume.")


class PodSpec(Model, preserve=True):
    """A pod's specification; everything that Kubernetes knows is allowed and kept."""

    containers: tuple[Container, ...] = Field(
        min_length=1,
        max_length=10,
        description="Containers; the first one trains, unless the annotation kubectl.kubernetes.io/default-container names another.",
    )
    init_containers: tuple[Container, ...] = Field(default=(), max_length=10, description="Containers that run before.")
    volumes: tuple[Volume, ...] = Field(
        default=(),
        max_length=64,
        description="Volumes; the operator adds the plan and, unless one is mounted there, /dev/shm.",
    )


class TemplateMetadata(Model):
    """Labels and annotations that every worker carries besides the operator's own."""

    labels: dict[str, LabelValue] = Field(default_factory=dict, max_length=64, description="Labels.")
    annotations: dict[str, Annotated[str, Field(max_length=65_536)]] = Field(
        default_factory=dict, max_length=64, description="Annotations."
    )


class PodTemplate(Model):
    """What every worker's pod is made from."""

    metadata: TemplateMetadata = Field(
        default_factory=TemplateMetadata, description="Labels and annotations of the pods."
    )
    spec: PodSpec = Field(
        description="The pod. A change reaches workers that start after it; suspend and resume to renew all."
    )


_TRAINING_FIXED = (
    "?globalBatchSize",
    "?adaptiveBatch.?min",
    "?adaptiveBatch.?max",
    "epochs",
    "seed",
    "precision",
    "learningRateScaling",
    "?learningRateWarmUpSamples",
    "communication",
)


# A batch that is missing is refused by a rule of its own; here it must not be an error as well.
_LEAST_BATCH = f"self.training.?globalBatchSize.orValue(self.training.?adaptiveBatch.?min.orValue({MAX_BATCH}))"


class HeteroTrainJobSpec(
    Model,
    rules=(
        CEL(
            rule="self.workerPools.map(p, p.maxReplicas).sum() >= self.elasticPolicy.minReplicas",
            message="elasticPolicy.minReplicas is larger than the sum of the pools' maxReplicas: lower it or let pools grow",
        ),
        CEL(
            rule="!has(self.elasticPolicy.maxReplicas) || "
            "self.workerPools.map(p, p.minReplicas).sum() <= self.elasticPolicy.maxReplicas",
            message="the sum of the pools' minReplicas is larger than elasticPolicy.maxReplicas: lower one or raise the other",
        ),
        CEL(
            rule=f"{_LEAST_BATCH} >= (has(self.elasticPolicy.maxReplicas) ? self.elasticPolicy.maxReplicas : "
            "self.workerPools.map(p, p.maxReplicas * (has(p.ranksPerWorker) ? p.ranksPerWorker : 1)).sum())",
            message="training.globalBatchSize (or adaptiveBatch.min) gives some workers no sample: make it at least the largest "
            "number of ranks, or lower maxReplicas",
        ),
        CEL(
            rule="self.objective != 'cost' || self.workerPools.all(p, has(p.pricePerHour))",
            message="objective: cost compares prices: give every pool its pricePerHour, or choose another objective",
        ),
        CEL(
            rule="(self.objective == 'deadline') == has(self.deadline)",
            message="deadline belongs to objective: deadline and is required there: give both or neither",
        ),
        CEL(
            rule="self.objective != 'deadline' || self.workerPools.all(p, has(p.pricePerHour)) || "
            "!self.workerPools.exists(p, has(p.pricePerHour))",
            message="objective: deadline compares prices: give every pool its pricePerHour, or none of them",
        ),
        CEL(
            rule="oldSelf.suspend || ("
            + " && ".join(f"self.training.{name} == oldSelf.training.{name}" for name in _TRAINING_FIXED)
            + ")",
            message="training can't change while the job runs (rebalance can): set suspend: true first, then change it, then resume",
        ),
        CEL(
            rule="self.managedBy == oldSelf.managedBy",
            message="managedBy can't change after creation: delete the job and create it anew",
        ),
    ),
):
    """What the user wants."""

    suspend: bool = Field(
        default=False,
        description="true removes all workers and frees their nodes; the checkpoint stays, and false goes on from it.",
    )
    managed_by: Annotated[
        str,
        WithJsonSchema({"type": "string", "enum": [MANAGED_BY_US, MANAGED_BY_MULTIKUEUE], "default": MANAGED_BY_US}),
    ] = Field(
        default=MANAGED_BY_US, description="Who runs the job; the operator leaves jobs alone that are not its own."
    )
    training: Training = Field(description="What is trained, independent of the machines.")
    elastic_policy: ElasticPolicy = Field(default_factory=ElasticPolicy, description="How many workers in all.")
    worker_pools: tuple[WorkerPool, ...] = Field(
        min_length=1,
        max_length=MAX_POOLS,
        description="Where workers may run, the preferred pools first.",
        json_schema_extra=MapList("name"),
    )
    objective: Objective = Field(
        default=Objective.THROUGHPUT,
        description="What counts where jobs compete for nodes: samples per second, goodput (samples per second at what each "
        "is worth, with adaptiveBatch), cost: goodput per price, so the fewest and cheapest workers that minReplicas allows, "
        "or deadline: done in time at the least price (of the fewest workers where no pool has one), and as soon as can be "
        "where that is out of reach.",
    )
    deadline: Moment | None = Field(
        default=None,
        description="With objective: deadline, the time by which training shall be done, such as 2027-01-31T18:00:00Z; it may "
        "be moved while the job runs. The condition DeadlineAtRisk says whether it is in reach and by how much it is not.",
    )
    checkpoint: Checkpoint | None = Field(
        default=None,
        description="Where and how often state is saved; without it a job that loses all workers starts again.",
    )
    backoff_limit: int = Field(
        default=6,
        ge=0,
        le=1000,
        description="Failures of workers by their own fault before the job fails; disruptions never count.",
    )
    active_deadline_seconds: int | None = Field(
        default=None, ge=1, le=2**31, description="Seconds after start (or resume) in which the job has to finish."
    )
    pre_running_deadline_seconds: int | None = Field(
        default=None, ge=1, le=2**31, description="Seconds after start (or resume) in which training has to begin."
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None,
        ge=0,
        le=2**31,
        description="Seconds after its end when the job is deleted; without it, it is kept.",
    )
    clean_pod_policy: CleanPodPolicy = Field(
        default=CleanPodPolicy.RUNNING,
        description="Pods that are deleted when the job ends: those that still Run, All, or None.",
    )
    template: PodTemplate = Field(description="What every worker's pod is made from.")
