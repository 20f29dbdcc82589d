"""One job on the cluster, as an object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from io import StringIO
from typing import Any

from heterotrain_cli.cluster.api import Cluster, LogLine
from heterotrain_cli.cluster.change import scaled, why_ended
from heterotrain_cli.cluster.checkpoint import TIMEOUT_S, take
from heterotrain_cli.cluster.history import Arrays, History, from_prometheus
from heterotrain_cli.cluster.logs import chosen, followed
from heterotrain_cli.cluster.render import description
from heterotrain_cli.cluster.submit import until_ended
from heterotrain_cli.cluster.view import JobSummary, view_of
from heterotrain_cli.errors import InputError
from heterotrain_cli.forecast.cluster import running_job
from heterotrain_cli.forecast.job import job_of
from heterotrain_cli.forecast.report import JobReport, report_of_running
from heterotrain_operator.api.reading import read_spec
from heterotrain_operator.api.status import CheckpointStatus, HeteroTrainJobStatus
from rich.console import Console

from heterotrain_client.manifest import check_seconds, check_whole, told

WIDTH = 110
LEAST_EVERY_S = 0.1
"""Shortest time between two points from Prometheus."""


class JobFailedError(RuntimeError):
    """A job that was waited for has failed; the text is the reason in the job's status."""


class TrainingJob:
    """A job on the cluster. Nothing is stored but its name and the readings of ``wait``.

    All methods raise ``InputError`` when there is no such job or a change is refused, and ``UnavailableError`` when the
    cluster does not answer.

    Attributes:
        name: of the job; ``namespace`` is that of the client.
    """

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster = cluster
        self._history = History()
        self.name = name

    @property
    def namespace(self) -> str:
        """The job's namespace."""
        return self._cluster.namespace

    def status(self) -> HeteroTrainJobStatus:
        """Return the status, read now."""
        return self._view().status

    def body(self) -> dict[str, Any]:
        """Return the whole object as the API server has it."""
        return self._cluster.job(self.name)

    def events(self) -> list[dict[str, Any]]:
        """Return the job's events, oldest first."""
        return self._cluster.events(self.name)

    def wait(self, *, timeout_s: float | None = None, progress: bool = True) -> HeteroTrainJobStatus:
        """Wait until the job has succeeded, and return its last status.

        Args:
            timeout_s: longest wait in seconds; the job goes on after it.
            progress: show a bar on a terminal or in a notebook, elsewhere a line every ten seconds (standard error).

        Raises:
            JobFailedError: the job has failed.
            UnavailableError: the time has passed.
        """
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s, least=0)
        view = until_ended(
            self._cluster,
            self.name,
            console=Console(stderr=True) if progress else None,
            timeout_s=timeout_s,
            on_view=self._history.add,
        )
        if view.status.state != "Succeeded":
            raise JobFailedError(f"job {self.name}: {view.status.state}. {view.status.reason}")
        return view.status

    def logs(self, *workers: str, follow: bool = False, tail: int | None = None) -> Iterator[LogLine]:
        """Yield log lines, each with ``worker`` and ``text``.

        Args:
            workers: names of pods, or their ends, such as w3; none stands for all.
            follow: also yield new lines, and those of workers that join later, until the job has ended.
            tail: lines from the end of each log; ``None`` for all.
        """
        if tail is not None:
            check_whole("tail", tail, least=0)
        pods = chosen(self._cluster.pods(self.name), () if follow else workers, job=self.name)

        def read(pod: Mapping[str, Any]) -> Iterator[LogLine]:
            return self._cluster.log_lines(pod, follow=follow, tail=tail)

        if follow:
            yield from followed(self._cluster, self.name, workers, read)
            return
        for pod in pods:
            yield from read(pod)

    def metrics(self, *, prometheus: str | None = None, every_s: float = 15.0) -> Arrays:
        """Return metrics over time: arrays of the same length by name, with ``time_s`` in seconds since 1970.

        Without Prometheus these are the readings that ``wait`` has made, and the present one.

        Args:
            prometheus: ``http://HOST:PORT``, or ``NAMESPACE/SERVICE:PORT`` to reach it through the API server, such as
                ``monitoring/prometheus:9090``.
            every_s: seconds between two points from Prometheus.
        """
        check_seconds("every_s", every_s, least=LEAST_EVERY_S)
        view = self._view()
        if prometheus is not None:
            return from_prometheus(self._cluster, prometheus, view, every_s=every_s)
        self._history.add(view)
        return self._history.arrays()

    def forecast(self, *, samples_per_epoch: int | None = None) -> JobReport:
        """Return the forecast with the speeds that the running job has learned; ``.document`` has it as plain values.

        Args:
            samples_per_epoch: size of the data set, for the cost of an epoch.
        """
        if samples_per_epoch is not None:
            check_whole("samples_per_epoch", samples_per_epoch, least=1)
        body = self.body()
        where = f"job {self.name}"
        written = job_of(read_spec(body), name=self.name, namespace=self.namespace, body=body, where=where)
        found = running_job(self._cluster, self.name, body)
        return report_of_running(written, found, batch=None, samples_per_epoch=samples_per_epoch)

    def suspend(self) -> None:
        """Stop the job and free its nodes; checkpoints stay.

        Raises:
            InputError: the job has ended.
        """
        self._unless_ended("suspend")
        self._cluster.patch(self.name, {"spec": {"suspend": True}})

    def resume(self) -> None:
        """Continue a suspended job from its newest checkpoint.

        Raises:
            InputError: the job has ended.
        """
        self._unless_ended("resume")
        self._cluster.patch(self.name, {"spec": {"suspend": False}})

    def checkpoint(self, *, timeout_s: float = TIMEOUT_S) -> CheckpointStatus:
        """Write a checkpoint now, and return it when it is complete.

        Args:
            timeout_s: longest wait in seconds.

        Raises:
            UnavailableError: the time has passed.
        """
        check_seconds("timeout_s", timeout_s, least=0)
        return take(self._cluster, self.name, timeout_s=timeout_s)

    def scale(self, workers: int | None = None, *, pools: Mapping[str, int] | None = None) -> None:
        """Change how many workers the job may have.

        Args:
            workers: over all pools; ``None`` leaves it as it is.
            pools: by pool; those that are not named stay as they are.

        Raises:
            InputError: the job has ended, or has no such pool.
        """
        if workers is None and not pools:
            raise InputError("the number of workers is missing: give workers, or pools")
        if pools is not None and not isinstance(pools, Mapping):
            raise InputError(f'pools is {told(pools)}, but must be a mapping, such as {{"t4": 1}}')
        for pool, count in (pools or {}).items():
            check_whole(f"pool {pool}", count, least=0)
        if workers is not None:
            check_whole("workers", workers, least=1)
        wanted = tuple(f"{pool}={count}" for pool, count in (pools or {}).items())
        self._cluster.change(self.name, lambda body: scaled(body, name=self.name, workers=workers, pools=wanted))

    def delete(self) -> None:
        """Delete the job with its workers; checkpoints in its store stay."""
        self._cluster.delete(self.name)

    def _unless_ended(self, change: str) -> None:
        if ended := why_ended(self.body(), name=self.name, change=change):
            raise InputError(ended)

    def _view(self) -> JobSummary:
        return view_of(self.body())

    def _page(self) -> Console:
        page = Console(record=True, file=StringIO(), width=WIDTH)
        page.print(description(self._view(), self.events()))
        return page

    def __str__(self) -> str:
        """Return what `heterotrain describe` shows."""
        return self._page().export_text()

    def __repr__(self) -> str:
        return f"TrainingJob({self.namespace}/{self.name})"

    def _repr_html_(self) -> str:
        """Return the same for a notebook."""
        form = '<pre style="white-space:pre;overflow-x:auto;line-height:normal">{code}</pre>'
        return self._page().export_html(inline_styles=True, code_format=form)
