"""The identity of this process, read once from its environment.

There are three ways to run: *operated* (the operator has set ``HETEROTRAIN_*``), *torchrun* (``RANK`` and
``WORLD_SIZE`` are set: fixed even shares, and torchrun restarts everything after a failure), and *alone* (neither: one
process on a laptop).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from heterotrain_core.contract import env, keys
from heterotrain_core.contract.config import TrainingConfig, UnknownSettingError, decode_config

from heterotrain.errors import UsageError, VersionMismatch

_log = logging.getLogger(__name__)

LEAST_SECRET_CHARACTERS = 16
MOST_PRICE = 1e12
"""Of one worker for an hour, in any currency."""
BY_TORCHRUN = "start the script with torchrun, which sets them all, or unset RANK and WORLD_SIZE to train alone"


class Mode(StrEnum):
    """How this process was started."""

    OPERATED = "operated"
    TORCHRUN = "torchrun"
    ALONE = "alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """This rank's names, addresses and paths.

    Attributes:
        mode: how the process was started.
        job_name: name of the job; part of the name of its checkpoint folder, with namespace and uid.
        local_world_size: ranks of this worker; under torchrun those on this host.
        rank: fixed rank under torchrun; ``None`` where the plan decides it.
        world_size: fixed world size under torchrun, else ``None``.
        metrics_port: port for metrics and readiness, local rank already added; ``None`` for no such endpoint.
        peer_port: port for peers, local rank already added; ``None`` without peers.
        plan_dir: folder with the mounted plan; ``None`` without an operator.
        termination_path: file for the outcome; ``None`` for no file.
        sample_log_dir: folder for the log of committed samples; ``None`` for no log.
        secret: authenticates the job's ranks to each other; empty if this process has none.
        prices_per_hour: of a worker by pool, in the job's currency; empty where none is known.
        tensorboard_dir: folder for TensorBoard files from the environment; ``None`` leaves the choice to the script.
    """

    mode: Mode
    job_name: str = "local"
    namespace: str = "default"
    job_uid: str = "local"
    worker: str = "local"
    worker_uid: str = "local"
    address: str = "127.0.0.1"
    local_rank: int = 0
    num_proc_per_worker: int = 1
    local_world_size: int = 1
    rank: int | None = None
    world_size: int | None = None
    metrics_port: int | None = None
    peer_port: int | None = None
    plan_dir: str | None = None
    termination_path: str | None = None
    sample_log_dir: str | None = None
    tensorboard_dir: str | None = None
    secret: bytes = field(default=b"", repr=False)
    prices_per_hour: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """Return ``worker/local rank``, for log messages."""
        return f"{self.worker}/{self.local_rank}"

    @property
    def tags(self) -> dict[str, str | int]:
        """Return the fields that identify this process in each of its log lines."""
        who: dict[str, str | int] = {"worker": self.worker, "local_rank": self.local_rank}
        return who | {"job": self.job_name, "namespace": self.namespace} if self.mode is Mode.OPERATED else who


def read_identity(environ: Mapping[str, str] = os.environ) -> Identity:
    """Return the identity of this process.

    Raises:
        UsageError: a variable is missing or is not a number.
    """
    return replace(
        _from_environment(environ),
        sample_log_dir=environ.get(env.SAMPLE_LOG_DIR),
        tensorboard_dir=environ.get(env.TENSORBOARD_DIR),
    )


def _from_environment(environ: Mapping[str, str]) -> Identity:
    if env.JOB_UID in environ:
        local_rank = _number(environ, env.LOCAL_RANK, 0)
        return Identity(
            mode=Mode.OPERATED,
            job_name=environ.get(env.JOB_NAME, "job"),
            namespace=environ.get(env.JOB_NAMESPACE, "default"),
            job_uid=environ[env.JOB_UID],
            worker=_text(environ, env.WORKER),
            worker_uid=_text(environ, env.WORKER_UID),
            address=_text(environ, env.WORKER_ADDRESS),
            local_rank=local_rank,
            num_proc_per_worker=_number(environ, env.NUM_PROC_PER_WORKER, 1),
            local_world_size=_number(environ, env.NUM_PROC_PER_WORKER, 1),
            metrics_port=_number(environ, env.METRICS_PORT, keys.METRICS_PORT) + local_rank,
            peer_port=_number(environ, env.PEER_PORT, keys.PEER_PORT) + local_rank,
            plan_dir=environ.get(env.PLAN_DIR, env.DEFAULT_PLAN_DIR),
            termination_path=environ.get(env.TERMINATION_PATH, env.DEFAULT_TERMINATION_PATH),
            secret=_mounted_secret(environ),
            prices_per_hour=_prices(environ.get(env.PRICES, "{}")),
        )
    if "RANK" in environ and "WORLD_SIZE" in environ:
        rank, local_rank = _number(environ, "RANK", 0), _number(environ, "LOCAL_RANK", 0)
        world_size = _number(environ, "WORLD_SIZE", 1)
        if not 0 <= rank < world_size:
            raise UsageError(f"RANK must be at least 0 and below WORLD_SIZE, not {rank} of {world_size}: {BY_TORCHRUN}")
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environ.get(name):
                raise UsageError(f"RANK and WORLD_SIZE are set but {name} is not: {BY_TORCHRUN}")
        return Identity(
            mode=Mode.TORCHRUN,
            worker=f"rank-{rank}",
            worker_uid=f"rank-{rank}",
            local_rank=local_rank,
            local_world_size=_number(environ, "LOCAL_WORLD_SIZE", 1),
            rank=rank,
            world_size=world_size,
            metrics_port=_optional_port(environ, local_rank),
            secret=_given_secret(environ),
        )
    return Identity(mode=Mode.ALONE, metrics_port=_optional_port(environ, 0))


def read_config(environ: Mapping[str, str] = os.environ) -> TrainingConfig | None:
    """Return the operator's training configuration, or ``None`` when there is none.

    Raises:
        VersionMismatch: it has settings that this version does not know.
        UsageError: the variable does not hold a valid configuration.
    """
    text = environ.get(env.CONFIG)
    if text is None:
        return None
    try:
        return decode_config(text)
    except UnknownSettingError as error:
        raise VersionMismatch(str(error)) from error
    except ValueError as error:
        raise UsageError(f"{env.CONFIG} cannot be read: {error}") from error


def _mounted_secret(environ: Mapping[str, str]) -> bytes:
    """Return the secret that the operator mounts; empty, with a warning, where it mounts none.

    Raises:
        UsageError: it is mounted but not readable.
    """
    folder = environ.get(env.SECRET_DIR)
    if folder is None:
        _log.warning(
            "this worker has no secret, because an older operator started it: its ranks take every process that "
            "reaches their ports for one of their own. Upgrade the operator, then suspend and resume the job."
        )
        return b""
    try:
        found = (Path(folder) / keys.SECRET_KEY).read_bytes()
    except OSError as error:
        raise UsageError(f"the job's secret cannot be read ({error}): run the script in a worker pod") from error
    if len(found) < keys.SECRET_BYTES:
        raise UsageError(f"the job's secret has {len(found)} bytes instead of {keys.SECRET_BYTES}: delete its Secret")
    return found


def _given_secret(environ: Mapping[str, str]) -> bytes:
    """Return the secret that a user gives to ranks started by torchrun, as a key; empty if there is none.

    Raises:
        UsageError: it is too short.
    """
    text = environ.get(env.SECRET, "")
    if text and len(text) < LEAST_SECRET_CHARACTERS:
        raise UsageError(f"{env.SECRET} needs at least {LEAST_SECRET_CHARACTERS} characters, best random ones")
    return hashlib.sha256(f"heterotrain {text}".encode()).digest() if text else b""


def _prices(text: str) -> dict[str, float]:
    """Return prices by pool; unreadable ones are left out, because nothing but a line of the log needs them."""
    try:
        raw = json.loads(text)
        found = {str(pool): float(price) for pool, price in raw.items()}
    except (ValueError, TypeError, AttributeError):
        return {}
    return {pool: price for pool, price in found.items() if 0 <= price <= MOST_PRICE}


def _text(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise UsageError(f"{env.JOB_UID} is set but {name} is not: run the script in a worker pod, or unset both")
    return value


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    value = environ.get(name, "")
    if not value:
        return default
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"{name} must be a whole number, not {value!r}") from None


def _optional_port(environ: Mapping[str, str], local_rank: int) -> int | None:
    return _number(environ, env.METRICS_PORT, 0) + local_rank if environ.get(env.METRICS_PORT) else None
