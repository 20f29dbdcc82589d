"""Names of labels, annotations, objects and ports that operator, pods, chart and tests share."""

from __future__ import annotations

from typing import Final

GROUP: Final = "heterotrain.dev"
VERSION: Final = "v1alpha1"
KIND: Final = "HeteroTrainJob"
PLURAL: Final = "heterotrainjobs"
SHORT_NAME: Final = "htj"
FIELD_MANAGER: Final = "heterotrain"

# Labels on everything that belongs to a job.
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "heterotrain"
LABEL_JOB: Final = f"{GROUP}/job"
LABEL_POOL: Final = f"{GROUP}/pool"
LABEL_CAPACITY_TYPE: Final = f"{GROUP}/capacity-type"
LABEL_WORKER_INDEX: Final = f"{GROUP}/worker-index"

CAPACITY_ON_DEMAND: Final = "OnDemand"
CAPACITY_SPOT: Final = "Spot"

# Touching this annotation makes the kubelet refresh the pod's ConfigMap volume at once (0.1-0.25 s instead of 0-80 s).
ANNOTATION_PLAN: Final = f"{GROUP}/plan"

# On a pod: where its ranks listen.
ANNOTATION_PEER_PORT: Final = f"{GROUP}/peer-port"

# On the plan's ConfigMap: members of the plan before whose loss the job's status may not count yet.
ANNOTATION_DEPARTED: Final = f"{GROUP}/departed"

# On a job: another value asks for a checkpoint now; without it nothing is asked for.
ANNOTATION_CHECKPOINT: Final = f"{GROUP}/checkpoint-request"
# On a job: another value asks for new pods of all workers, or for another try of a failed job.
ANNOTATION_RESTART: Final = f"{GROUP}/restart-request"
ANNOTATION_RETRY: Final = f"{GROUP}/retry-request"

PLAN_KEY: Final = "plan.json"
SECRET_KEY: Final = "key"  # noqa: S105  # a name
"""Entry of the job's Secret: ``SECRET_BYTES`` random bytes that all its workers share."""
SECRET_BYTES: Final = 32

# Reserved names inside the pod. A user's template may not use them (refused at admission).
CONTAINER_PLAN_VOLUME: Final = "heterotrain-plan"
CONTAINER_SECRET_VOLUME: Final = "heterotrain-secret"  # noqa: S105  # a name
CONTAINER_SHM_VOLUME: Final = "heterotrain-shm"
METRICS_PORT: Final = 9400
"""Local rank 0 serves metrics and readiness here; local rank r on ``METRICS_PORT + r``."""
METRICS_PORT_NAME_PREFIX: Final = "ht-metrics-"
PEER_PORT: Final = 29400
"""Local rank r listens for its peers on ``PEER_PORT + r``."""
METRICS_PORTS: Final = 16
"""Consecutive ports that a worker's metrics may use: one for each rank."""
PEER_PORTS: Final = 200
"""Consecutive ports for connections between workers: ranks use the first ones, and ``MASTER_PORT`` one from 100 on."""
READY_PATH: Final = "/ready"
METRICS_PATH: Final = "/metrics"


def plan_name(job: str) -> str:
    """Return the name of the job's plan ConfigMap."""
    return f"{job}-plan"


def secret_name(job: str) -> str:
    """Return the name of the job's Secret."""
    return f"{job}-secret"


def network_policy_name(job: str) -> str:
    """Return the name of the job's NetworkPolicy."""
    return f"{job}-workers"


def pod_group_name(job: str) -> str:
    """Return the name of the job's PodGroup, for a scheduler with groups."""
    return f"{job}-workers"


def disruption_budget_name(job: str) -> str:
    """Return the name of the job's PodDisruptionBudget, which covers on-demand workers only."""
    return f"{job}-on-demand"


def worker_name(job: str, index: int) -> str:
    """Return the name of the worker pod with this index."""
    return f"{job}-w{index}"


MOST_SIZES: Final = 16
"""Numbers of members of which a job's status keeps the exchange, the newest ones."""
