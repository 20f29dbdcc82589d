"""Settings of the operator: each is an option of ``heterotrain-operator run`` and an environment variable."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusSettings:
    """How telemetry is read.

    Attributes:
        url: base URL; ``None`` switches telemetry off, shares stay even.
        poll_s: seconds between two reads of one job; about the scrape interval.
        timeout_s: longest wait for an answer.
        auth_dir: folder (a mounted Secret) with the file ``token``, or the files ``username`` and ``password``.
        ca_file: certificate authority of a private Prometheus.
        stale_s: samples older than this count as no data.
    """

    url: str | None = None
    poll_s: float = 1.0
    timeout_s: float = 5.0
    auth_dir: Path | None = None
    ca_file: Path | None = None
    stale_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that a person may want to set.

    Attributes:
        namespace: where the operator runs; its Lease is there.
        identity: name of this replica in the Lease.
        watch_namespace: the only namespace that is watched; ``None`` for all.
        kubeconfig: file to use outside a cluster.
        workers: jobs that are handled at the same time; one core decides and writes for hardly more, others only wait longer.
        relist_s: seconds between two full lists: what repairs a missed event.
        foreign_s: seconds between two lists of foreign pods, which take room on the nodes.
        gather_s: longest time that a ready worker waits for others that start.
        status_interval_s: least seconds between two status writes that only bring new numbers.
        health_port: probes; ``metrics_port``: the operator's own series.
        leader_election: off, every replica acts: only for debugging with a single one.
    """

    namespace: str = "default"
    identity: str = "heterotrain-operator"
    watch_namespace: str | None = None
    kubeconfig: str | None = None
    workers: int = 4
    relist_s: float = 300.0
    foreign_s: float = 30.0
    gather_s: float = 5.0
    status_interval_s: float = 2.0
    health_port: int = 8080
    metrics_port: int = 9090
    listen: str = "0.0.0.0"  # noqa: S104  # probes and scrapes come from outside the pod
    leader_election: bool = True
    lease_name: str = "heterotrain-operator"
    lease_duration_s: float = 10.0
    prometheus: PrometheusSettings = PrometheusSettings()
