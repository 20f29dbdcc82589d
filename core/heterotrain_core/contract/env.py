"""Names of the environment variables that the operator sets in a worker, and paths that it mounts.

A user's own variables are kept; names that start with ``HETEROTRAIN_`` are refused at admission, but for
``USER_SETTABLE``. Without any of them, ``heterotrain.init()`` trains alone in one process, so that a script can be
tried on a laptop.
"""

from __future__ import annotations

from typing import Final

PREFIX: Final = "HETEROTRAIN_"

JOB_NAME: Final = "HETEROTRAIN_JOB_NAME"
JOB_NAMESPACE: Final = "HETEROTRAIN_JOB_NAMESPACE"
JOB_UID: Final = "HETEROTRAIN_JOB_UID"
WORKER: Final = "HETEROTRAIN_WORKER"
"""Pod name (downward API)."""
WORKER_UID: Final = "HETEROTRAIN_WORKER_UID"
"""Pod uid (downward API): a pod that returns under an old name is another worker."""
WORKER_ADDRESS: Final = "HETEROTRAIN_WORKER_ADDRESS"
"""Pod IP (downward API)."""
PRICES: Final = "HETEROTRAIN_PRICES"
"""JSON of the price of a worker for an hour by pool, as decimal numbers in texts; absent where no pool has a price. It
is for people only, and stays the same for a pod's whole life."""
NUM_PROC_PER_WORKER: Final = "HETEROTRAIN_NUM_PROC_PER_WORKER"
RUNTIME: Final = "HETEROTRAIN_RUNTIME"
"""A value of ``choices.Runtime``; absent means that the script uses this library."""
LOCAL_RANK: Final = "HETEROTRAIN_LOCAL_RANK"
"""Set by the launcher for each rank that it starts; absent means 0."""
SECRET_DIR: Final = "HETEROTRAIN_SECRET_DIR"  # noqa: S105  # a name
"""Folder with the job's mounted secret; the file in it is ``keys.SECRET_KEY``."""
SECRET: Final = "HETEROTRAIN_SECRET"  # noqa: S105  # a name
"""The secret of a job without an operator, as text of at least 16 characters; the same for all ranks."""
PLAN_DIR: Final = "HETEROTRAIN_PLAN_DIR"
"""Folder with the mounted plan; the file in it is ``keys.PLAN_KEY``."""
CONFIG: Final = "HETEROTRAIN_CONFIG"
"""JSON of ``config.TrainingConfig``: what is fixed for a pod's whole life."""
METRICS_PORT: Final = "HETEROTRAIN_METRICS_PORT"
PEER_PORT: Final = "HETEROTRAIN_PEER_PORT"
TERMINATION_PATH: Final = "HETEROTRAIN_TERMINATION_PATH"
"""File that receives the outcome; default ``DEFAULT_TERMINATION_PATH``."""
SAMPLE_LOG_DIR: Final = "HETEROTRAIN_SAMPLE_LOG_DIR"
"""When set (by the user: it is not reserved), each rank appends a JSON line per committed step with its sample ids."""
LOG_FORMAT: Final = "HETEROTRAIN_LOG_FORMAT"
"""``text`` (the default) or ``json``: how the launcher's and the ranks' log lines look (set by the user)."""
TENSORBOARD_DIR: Final = "HETEROTRAIN_TENSORBOARD_DIR"
"""When set (by the user), the lowest rank writes TensorBoard files below this folder."""

USER_SETTABLE: Final = frozenset({SAMPLE_LOG_DIR, LOG_FORMAT, TENSORBOARD_DIR})
"""All others that start with ``PREFIX`` are refused when the job is applied."""

DEFAULT_PLAN_DIR: Final = "/etc/heterotrain/plan"
DEFAULT_SECRET_DIR: Final = "/etc/heterotrain/secret"  # noqa: S105  # a name
DEFAULT_TERMINATION_PATH: Final = "/dev/termination-log"
