"""``HeteroTrainJob`` as users write it: ``heterotrain.dev/v1alpha1``.

The CRD in ``crds/`` is generated from these models (``api/crd.py``), so the descriptions here are what ``kubectl explain``
prints, and the limits are what the API server enforces. A field that nothing implements is not here.
"""

from __future__ import annotations

from typing import Annotated

from heterotrain_core.allocate.problem import Objective
from heterotrain_core.contract import keys
from heterotrain_core.contract.choices import Choice
from pydantic import Field, WithJsonSchema

from heterotrain_operator.api.pools import ElasticPolicy, WorkerPool
from heterotrain_operator.api.schema import CEL, MapList, Model
from heterotrain_operator.api.template import PodTemplate
from heterotrain_operator.api.training import (
    Training,
)
from heterotrain_operator.api.types import (
    MAX_BATCH,
    MAX_POOLS,
    Timestamp,
)

MANAGED_BY_US = f"{keys.GROUP}/operator"
MANAGED_BY_MULTIKUEUE = "kueue.x-k8s.io/multikueue"


class CleanPodPolicy(Choice):
    """What happens to pods when the job ends."""

    NONE = "None"
    RUNNING = "Running"
    ALL = "All"


class Checkpoint(Model):
    """Where and how often state is saved."""

    uri: str = Field(
        min_length=1,
        max_length=1024,
        pattern=r"^[a-z][a-z0-9+.-]*://.+$",
        description="Where checkpoints go: file:///checkpoints (mount a volume there), or any URI of fsspec, such as "
        "s3://bucket/path or gs://bucket/path, whose Python package (s3fs, gcsfs) is in the image.",
    )
    interval_seconds: int = Field(
        default=600,
        ge=1,
        le=604_800,
        description="Seconds between two periodic checkpoints. Example: 600.",
    )
    max_to_keep: int = Field(
        default=3, ge=1, le=1000, description="Number of checkpoints to keep; older ones are deleted. Example: 3."
    )
    max_age_seconds: int | None = Field(
        default=None,
        ge=1,
        le=3_600_000_000,
        description="Checkpoints older than this many seconds are deleted, except the newest. Unset: age does not matter. "
        "Example: 86400.",
    )


_TRAINING_FIXED = (
    "?globalBatchSize",
    "?adaptiveBatch.?min",
    "?adaptiveBatch.?max",
    "epochs",
    "seed",
    "precision",
    "learningRateScaling",
    "?learningRateWarmupSamples",
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
            "self.workerPools.map(p, p.maxReplicas * (has(p.numProcPerWorker) ? p.numProcPerWorker : 1)).sum())",
            message="training.globalBatchSize (or adaptiveBatch.min) gives some workers no sample: make it at least the largest "
            "number of ranks, or lower maxReplicas",
        ),
        CEL(
            rule="self.objective != 'Cost' || self.workerPools.all(p, has(p.pricePerHour))",
            message="objective: Cost compares prices: give every pool its pricePerHour, or choose another objective",
        ),
        CEL(
            rule="(self.objective == 'Deadline') == has(self.deadline)",
            message="deadline belongs to objective: Deadline and is required there: give both or neither",
        ),
        CEL(
            rule="self.objective != 'Deadline' || self.workerPools.all(p, has(p.pricePerHour)) || "
            "!self.workerPools.exists(p, has(p.pricePerHour))",
            message="objective: Deadline compares prices: give every pool its pricePerHour, or none of them",
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
    deadline: Timestamp | None = Field(
        default=None,
        description="With objective: Deadline, the time by which training shall be done, such as 2027-01-31T18:00:00Z; it may "
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
