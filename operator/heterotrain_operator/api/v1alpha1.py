"""``HeteroTrainJob`` as users write it: ``heterotrain.dev/v1alpha1``.

The CRD in ``crds/`` is generated from these models (``api/crd.py``): the descriptions are the text of ``kubectl
explain``, and the API server enforces the limits and rules. Every field here is implemented.
"""

from __future__ import annotations

import re
from typing import Annotated

from heterotrain_core import uris
from heterotrain_core.contract import keys
from heterotrain_core.contract.choices import Choice, Objective, Parallelism, Runtime
from pydantic import Field, WithJsonSchema

from heterotrain_operator.api.failures import FailurePolicy
from heterotrain_operator.api.network import NETWORK_RULES, Network
from heterotrain_operator.api.parallelism import ParallelismSpec
from heterotrain_operator.api.pod_group import PodGroup
from heterotrain_operator.api.pools import ElasticPolicy, WorkerPool
from heterotrain_operator.api.schema import MapList, Model, SpecRule
from heterotrain_operator.api.template import PodTemplate
from heterotrain_operator.api.training import (
    Training,
)
from heterotrain_operator.api.types import MAX_BATCH, MAX_NAME_LENGTH, MAX_POOLS, MAX_RANKS, Timestamp

NAME_RULE = SpecRule(
    admits=lambda name: len(name) <= MAX_NAME_LENGTH and re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name) is not None,
    cel=f"size(self.metadata.name) <= {MAX_NAME_LENGTH} && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
    message="metadata.name has to start with a letter, contain only a-z, 0-9 and '-', end with a letter or digit, "
    f"and have at most {MAX_NAME_LENGTH} characters",
)

MANAGED_BY_US = f"{keys.GROUP}/operator"
MANAGED_BY_MULTIKUEUE = "kueue.x-k8s.io/multikueue"


class CleanPodPolicy(Choice):
    """Which pods are deleted when the job ends."""

    NONE = "None"
    RUNNING = "Running"
    ALL = "All"


class Checkpoint(
    Model,
    rules=(
        SpecRule(
            cel=f"!self.uri.matches('{uris.PASSWORD}') && !self.uri.matches('{uris.QUERY}')",
            holds=lambda self: not uris.has_credentials(self.uri),
            message="uri must have no password and no query (?name=value), which many people could read: remove it, "
            "and give the workers the credentials by a Secret in spec.template (envFrom)",
        ),
        SpecRule(
            cel=f"!has(self.resumeFrom) || (!self.resumeFrom.matches('{uris.PASSWORD}') && "
            f"!self.resumeFrom.matches('{uris.QUERY}'))",
            holds=lambda self: self.resume_from is None or not uris.has_credentials(self.resume_from),
            message="resumeFrom must have no password and no query (?name=value), which many people could read: remove "
            "it",
        ),
    ),
):
    """Where and how often checkpoints are written, and which are kept."""

    uri: str = Field(
        min_length=1,
        max_length=1024,
        pattern=r"^[a-z][a-z0-9+.-]*://.+$",
        description="Folder for checkpoints: file:// on a volume that all workers mount, or any fsspec URI whose "
        "Python package (s3fs, gcsfs) is in the image. Example: s3://bucket/digits.",
    )
    interval_seconds: int = Field(
        default=600, ge=1, le=604_800, description="Seconds between two periodic checkpoints. Example: 600."
    )
    max_to_keep: int = Field(
        default=3, ge=1, le=1000, description="Number of checkpoints to keep; older ones are deleted. Example: 3."
    )
    resume_from: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        pattern=r"^([a-z][a-z0-9+.-]*://.+|[a-z0-9]([-.a-z0-9]*[a-z0-9])?)$",
        description="Where to continue while the job has no checkpoint of its own: the folder of an earlier job, or a "
        "job's name. A name stands for the newest folder of such a job of this namespace below uri. The job's own name "
        "makes it continue after it was deleted and created again. Example: digits.",
    )


_TRAINING_FIXED = (
    "?globalBatchSize",
    "?adaptiveBatch.?min",
    "?adaptiveBatch.?max",
    "?epochs.orValue(1)",
    "?steps",
    "seed",
    "precision",
    "learningRateScaling",
    "?learningRateWarmupSamples",
    "communication",
)


# A missing batch breaks a rule of its own; it must not be an error here as well.
_LEAST_BATCH = f"self.training.?globalBatchSize.orValue(self.training.?adaptiveBatch.?min.orValue({MAX_BATCH}))"


def _most_ranks(spec: HeteroTrainJobSpec) -> int:
    """Return the largest number of ranks for which the batch has to suffice."""
    ranks = sum(pool.max_replicas * (pool.num_proc_per_worker or 1) for pool in spec.worker_pools)
    return spec.elastic_policy.max_replicas or ranks


_PROCESSES = "(has(p.numProcPerWorker) ? p.numProcPerWorker : 1)"


def _largest_plan(spec: HeteroTrainJobSpec) -> int:
    """Return the most ranks that a plan may name; workers whose number of processes is not given count as one."""
    processes = [pool.num_proc_per_worker or 1 for pool in spec.worker_pools]
    ranks = sum(pool.max_replicas * number for pool, number in zip(spec.worker_pools, processes, strict=True))
    workers = spec.elastic_policy.max_replicas
    return ranks if workers is None else min(ranks, workers * max(processes))


def _by_torchrun(spec: HeteroTrainJobSpec) -> bool:
    return spec.runtime is Runtime.TORCHRUN


_ONLY_TORCHRUN = "self.runtime != 'Torchrun' || "
_RUNTIME_RULES = (
    SpecRule(
        cel="self.runtime == 'Torchrun' || has(self.training.globalBatchSize) != has(self.training.adaptiveBatch)",
        holds=lambda self: (
            _by_torchrun(self) or (self.training.global_batch_size is None) != (self.training.adaptive_batch is None)
        ),
        message="training: give exactly one of globalBatchSize (a fixed batch) and adaptiveBatch (a range: min and "
        "max)",
    ),
    SpecRule(
        cel="!has(self.training.epochs) || !has(self.training.steps)",
        holds=lambda self: self.training.epochs is None or self.training.steps is None,
        message="training: epochs and steps both say when the training ends: remove one of them",
    ),
    SpecRule(
        cel="!has(self.training.steps) || !has(self.training.adaptiveBatch)",
        holds=lambda self: self.training.steps is None or self.training.adaptive_batch is None,
        message="training.steps needs steps of one size: give training.globalBatchSize instead of adaptiveBatch, or "
        "epochs instead of steps",
    ),
    SpecRule(
        cel=f"self.managedBy != '{MANAGED_BY_MULTIKUEUE}'",
        holds=lambda self: self.managed_by != MANAGED_BY_MULTIKUEUE,
        message="managedBy: MultiKueue does not know HeteroTrainJobs, so that nobody would start the job: remove "
        "managedBy",
    ),
    SpecRule(
        cel=f"{_ONLY_TORCHRUN}!has(self.training.steps)",
        holds=lambda self: not _by_torchrun(self) or self.training.steps is None,
        message="with runtime: Torchrun the script counts its steps itself: remove training.steps",
    ),
    SpecRule(
        cel=f"{_ONLY_TORCHRUN}!has(self.training.globalBatchSize) && !has(self.training.adaptiveBatch)",
        holds=lambda self: (
            not _by_torchrun(self) or (self.training.global_batch_size is None and self.training.adaptive_batch is None)
        ),
        message="with runtime: Torchrun the script chooses its own batch: remove training.globalBatchSize and "
        "training.adaptiveBatch",
    ),
    SpecRule(
        cel=f"{_ONLY_TORCHRUN}!has(self.checkpoint)",
        holds=lambda self: not _by_torchrun(self) or self.checkpoint is None,
        message="with runtime: Torchrun the script writes and reads its own checkpoints: remove checkpoint",
    ),
    SpecRule(
        cel=f"{_ONLY_TORCHRUN}self.parallelism.mode == 'Data'",
        holds=lambda self: not _by_torchrun(self) or self.parallelism.mode is Parallelism.DATA,
        message="with runtime: Torchrun the script divides its model itself: remove parallelism",
    ),
    SpecRule(
        cel=f"{_ONLY_TORCHRUN}self.objective != 'Deadline'",
        holds=lambda self: not _by_torchrun(self) or self.objective is not Objective.DEADLINE,
        message="with runtime: Torchrun no progress is reported: choose another objective than Deadline, and limit the "
        "time with activeDeadlineSeconds",
    ),
    SpecRule(
        cel="oldSelf.suspend || self.runtime == oldSelf.runtime",
        message="runtime is immutable while the job runs: set suspend: true, change runtime, then set suspend: false",
    ),
)
"""The batch of a job, and what is meaningless for a script that does not use this library."""


def _priced(spec: HeteroTrainJobSpec) -> set[bool]:
    return {pool.price_per_hour is not None for pool in spec.worker_pools}


class HeteroTrainJobSpec(
    Model,
    rules=(
        *_RUNTIME_RULES,
        *NETWORK_RULES,
        SpecRule(
            cel="self.workerPools.map(p, p.maxReplicas).sum() >= self.elasticPolicy.minReplicas",
            holds=lambda self: sum(pool.max_replicas for pool in self.worker_pools) >= self.elastic_policy.min_replicas,
            message="elasticPolicy.minReplicas is larger than the sum of the pools' maxReplicas: lower it, or raise a "
            "pool's maxReplicas",
        ),
        SpecRule(
            cel="!has(self.elasticPolicy.maxReplicas) || "
            "self.workerPools.map(p, p.minReplicas).sum() <= self.elasticPolicy.maxReplicas",
            holds=lambda self: (
                self.elastic_policy.max_replicas is None
                or sum(pool.min_replicas for pool in self.worker_pools) <= self.elastic_policy.max_replicas
            ),
            message="the sum of the pools' minReplicas is larger than elasticPolicy.maxReplicas: lower one or raise "
            "the other",
        ),
        SpecRule(
            cel=f"{_LEAST_BATCH} >= (has(self.elasticPolicy.maxReplicas) ? self.elasticPolicy.maxReplicas : "
            "self.workerPools.map(p, p.maxReplicas * (has(p.numProcPerWorker) ? p.numProcPerWorker : 1)).sum())",
            holds=lambda self: _by_torchrun(self) or self.training.base_batch_samples >= _most_ranks(self),
            message="the batch is too small for the maximum number of processes: raise training.globalBatchSize (or "
            "adaptiveBatch.min), or lower maxReplicas",
        ),
        SpecRule(
            cel=f"self.workerPools.map(p, p.maxReplicas * {_PROCESSES}).sum() <= {MAX_RANKS} || "
            "(has(self.elasticPolicy.maxReplicas) && self.elasticPolicy.maxReplicas * "
            f"self.workerPools.map(p, {_PROCESSES}).max() <= {MAX_RANKS})",
            holds=lambda self: _largest_plan(self) <= MAX_RANKS,
            message=f"more than {MAX_RANKS} processes do not fit into a plan: lower elasticPolicy.maxReplicas, the "
            "pools' maxReplicas or numProcPerWorker",
        ),
        SpecRule(
            cel="self.objective != 'Cost' || self.workerPools.all(p, has(p.pricePerHour))",
            holds=lambda self: self.objective is not Objective.COST or _priced(self) == {True},
            message="objective: Cost compares prices: give every pool its pricePerHour, or choose another objective",
        ),
        SpecRule(
            cel="!has(self.maxCost) || self.workerPools.all(p, has(p.pricePerHour))",
            holds=lambda self: self.max_cost is None or _priced(self) == {True},
            message="maxCost adds up prices: give every pool its pricePerHour, or remove maxCost",
        ),
        SpecRule(
            cel="(self.objective == 'Deadline') == has(self.deadline)",
            holds=lambda self: (self.objective is Objective.DEADLINE) == (self.deadline is not None),
            message="deadline and objective: Deadline belong together: give both or neither",
        ),
        SpecRule(
            cel="self.objective != 'Deadline' || self.workerPools.all(p, has(p.pricePerHour)) || "
            "!self.workerPools.exists(p, has(p.pricePerHour))",
            holds=lambda self: self.objective is not Objective.DEADLINE or len(_priced(self)) == 1,
            message="objective: Deadline compares prices: give every pool its pricePerHour, or none of them",
        ),
        SpecRule(
            cel="oldSelf.suspend || ("
            + " && ".join(f"self.training.{name} == oldSelf.training.{name}" for name in _TRAINING_FIXED)
            + ")",
            message="training (except rebalance) is immutable while the job runs: set suspend: true, change training, "
            "then set suspend: false",
        ),
        SpecRule(
            cel="oldSelf.suspend || self.parallelism == oldSelf.parallelism",
            message="parallelism is immutable while the job runs: set suspend: true, change parallelism, then set "
            "suspend: false",
        ),
        SpecRule(
            cel="self.parallelism.mode in ['Data', 'Sharded'] || !has(self.training.adaptiveBatch)",
            holds=lambda self: not self.parallelism.is_planned or self.training.adaptive_batch is None,
            message="parallelism.mode ShardedAcrossWorkers, Pipeline and Auto are planned for a fixed batch: give "
            "training.globalBatchSize instead of adaptiveBatch, or choose another mode",
        ),
        SpecRule(
            cel="oldSelf.suspend || has(self.podGroup) == has(oldSelf.podGroup) && "
            "(!has(self.podGroup) || self.podGroup == oldSelf.podGroup)",
            message="podGroup is immutable while the job runs: set suspend: true, change podGroup, then set suspend: "
            "false",
        ),
        SpecRule(
            cel="self.managedBy == oldSelf.managedBy",
            message="managedBy is immutable: delete the job and create it again",
        ),
    ),
):
    """Desired state of a training job."""

    suspend: bool = Field(
        default=False,
        description="true deletes all workers and frees their nodes; checkpoints stay. false resumes from the newest "
        "checkpoint.",
    )
    managed_by: Annotated[
        str,
        WithJsonSchema({"type": "string", "enum": [MANAGED_BY_US, MANAGED_BY_MULTIKUEUE], "default": MANAGED_BY_US}),
    ] = Field(
        default=MANAGED_BY_US,
        description="Controller of the job. The operator ignores a job with another value than its own.",
    )
    runtime: Runtime = Field(
        default=Runtime.HETEROTRAIN,
        description="HeteroTrain: the script uses this library. Torchrun: heterotrain-run starts an unchanged script "
        "for torchrun with RANK, WORLD_SIZE, MASTER_ADDR and so on. All workers then get equal work, and the script "
        "starts again when workers come or go. The fields of training have no effect on it.",
    )
    training: Training = Field(
        default_factory=Training, description="Training settings that do not depend on the machines."
    )
    parallelism: ParallelismSpec = Field(
        default_factory=ParallelismSpec,
        description="How the model is divided among the processes. Default: not at all.",
    )
    elastic_policy: ElasticPolicy = Field(
        default_factory=ElasticPolicy, description="Limits on the number of workers over all pools."
    )
    worker_pools: tuple[WorkerPool, ...] = Field(
        min_length=1,
        max_length=MAX_POOLS,
        description="Sets of nodes on which workers may run, the preferred one first.",
        json_schema_extra=MapList("name"),
    )
    objective: Objective = Field(
        default=Objective.THROUGHPUT,
        description="What counts if jobs compete for nodes. Throughput: samples per second. Goodput: samples per "
        "second, weighted by their use in an adaptive batch. Cost: goodput per price. Deadline: done in time at the "
        "lowest price.",
    )
    deadline: Timestamp | None = Field(
        default=None,
        description="Time by which training should be done. Only with objective: Deadline. It may change while the job "
        "runs; the condition DeadlineAtRisk reports the forecast. Example: 2027-01-31T18:00:00Z.",
    )
    checkpoint: Checkpoint | None = Field(
        default=None,
        description="Where and how often checkpoints are written. Without it, a job that loses all workers starts "
        "again from the beginning.",
    )
    backoff_limit: int = Field(
        default=6,
        ge=0,
        le=1000,
        description="Worker failures after which the job fails. Workers that fail within 30 seconds count once; "
        "disruptions such as evictions do not count. Example: 6.",
    )
    failure_policy: FailurePolicy = Field(
        default_factory=FailurePolicy,
        description="What the end of a worker means: rules by exit code, condition or reason.",
    )
    active_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        le=2**31,
        description="Seconds after start or resume in which the job has to finish, or it fails. Example: 86400.",
    )
    pre_running_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        le=2**31,
        description="Seconds after start or resume in which training has to begin, or the job fails. Example: 1800.",
    )
    max_cost: str | None = Field(
        default=None,
        max_length=32,
        pattern=r"^(0*[1-9][0-9]*([.][0-9]+)?|0+[.][0-9]*[1-9][0-9]*)$",
        description="Most that the job may cost (status.cost), a decimal number in quotes, in the currency of "
        "pricePerHour, which each pool then needs. At that amount the job fails; its workers leave with a checkpoint. "
        'Example: "250".',
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None,
        ge=0,
        le=2**31,
        description="Seconds after which a finished job is deleted. Unset: never. Example: 604800.",
    )
    clean_pod_policy: CleanPodPolicy = Field(
        default=CleanPodPolicy.RUNNING,
        description="Which pods are deleted at the end of the job: those still Running, All, or None.",
    )
    network: Network = Field(default_factory=Network, description="Ports of the workers.")
    pod_group: PodGroup | None = Field(
        default=None,
        description="Makes the job's pods a PodGroup, so that a scheduler places the minimum of workers together or "
        "not at all. Unset: the operator alone sees to the minimum.",
    )
    template: PodTemplate = Field(description="Template of the workers' pods.")
