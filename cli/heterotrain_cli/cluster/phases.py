"""Phases of each worker's steps, from Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from heterotrain_core.contract import metrics as names

from heterotrain_cli.cluster.api import Cluster
from heterotrain_cli.cluster.prometheus import series_of

WINDOW: Final = "1m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Parts of a worker's step over the last minute, each from 0 to 1; the mean of its ranks.

    All workers commit a step together, so the least synchronisation of any worker is taken to be the exchange itself,
    and what another one needs beyond that to be waiting for slower workers.

    Attributes:
        load, compute, update: for data, for forward and backward, and for the optimizer.
        exchange: of gradients, as far as the worker's own computation does not hide it.
        wait: for slower workers.
    """

    load: float
    compute: float
    exchange: float
    wait: float
    update: float


def phases_of(cluster: Cluster, where: str, uid: str) -> dict[str, Phases]:
    """Return the phases of each worker by the name of its pod; workers without a step in the last minute are left out.

    Args:
        cluster: through whose API server a service is reached.
        where: ``http://HOST:PORT``, or ``NAMESPACE/SERVICE:PORT`` of a service in the cluster.
        uid: of the job.

    Raises:
        InputError: the address has neither form.
        UnavailableError: there is no answer that can be read.
    """
    series = f'{names.PHASE_SECONDS}{{{names.LABEL_JOB_UID}="{uid}"}}'
    by = f"{names.LABEL_WORKER}, {names.LABEL_PHASE}"
    found: dict[str, dict[str, float]] = {}
    query = f"sum by ({by}) (rate({series}[{WINDOW}]))"
    for labels, points in series_of(cluster, where, query, [names.LABEL_WORKER, names.LABEL_PHASE]):
        found.setdefault(labels[names.LABEL_WORKER], {})[labels[names.LABEL_PHASE]] = points[0][1]
    return split(found)


def split(seconds: Mapping[str, Mapping[str, float]]) -> dict[str, Phases]:
    """Return the parts of the step from the seconds of each phase, by worker."""
    parts = {
        worker: {phase: value / of[names.PHASE_STEP] for phase, value in of.items()}
        for worker, of in seconds.items()
        if of.get(names.PHASE_STEP, 0.0) > 0
    }
    least = min((of.get(names.PHASE_SYNC, 0.0) for of in parts.values()), default=0.0)
    return {
        worker: Phases(
            load=of.get(names.PHASE_LOAD, 0.0),
            compute=of.get(names.PHASE_FORWARD, 0.0) + of.get(names.PHASE_BACKWARD, 0.0),
            exchange=least,
            wait=of.get(names.PHASE_SYNC, 0.0) - least,
            update=of.get(names.PHASE_UPDATE, 0.0),
        )
        for worker, of in parts.items()
    }
