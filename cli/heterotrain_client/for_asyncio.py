"""The client for asyncio: each call runs in a thread, so the event loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from heterotrain_cli.cluster.checkpoint import TIMEOUT_S
from heterotrain_cli.cluster.history import Arrays
from heterotrain_cli.cluster.logs import LogLine
from heterotrain_cli.forecast.report import JobReport
from heterotrain_operator.api.status import CheckpointStatus, HeteroTrainJobStatus

from heterotrain_client.client import HeteroTrainClient
from heterotrain_client.job import TrainingJob
from heterotrain_client.manifest import Pools, Script


class AsyncTrainingJob:
    """``TrainingJob`` with methods to await."""

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self.name = job.name

    @property
    def namespace(self) -> str:
        """The job's namespace."""
        return self._job.namespace

    async def body(self) -> dict[str, Any]:
        """Return the whole object as the API server has it."""
        return await asyncio.to_thread(self._job.body)

    async def events(self) -> list[dict[str, Any]]:
        """Return the job's events, oldest first."""
        return await asyncio.to_thread(self._job.events)

    async def status(self) -> HeteroTrainJobStatus:
        """Return the status, read now."""
        return await asyncio.to_thread(self._job.status)

    async def wait(self, *, timeout_s: float | None = None, progress: bool = False) -> HeteroTrainJobStatus:
        """Wait until the job has succeeded, and return its last status; see ``TrainingJob.wait``."""
        return await asyncio.to_thread(self._job.wait, timeout_s=timeout_s, progress=progress)

    async def logs(self, *workers: str, follow: bool = False, tail: int | None = None) -> AsyncIterator[LogLine]:
        """Yield log lines; see ``TrainingJob.logs``."""
        lines = self._job.logs(*workers, follow=follow, tail=tail)
        while (line := await asyncio.to_thread(_next, lines)) is not None:
            yield line

    async def metrics(self, *, prometheus: str | None = None, every_s: float = 15.0) -> Arrays:
        """Return metrics over time; see ``TrainingJob.metrics``."""
        return await asyncio.to_thread(self._job.metrics, prometheus=prometheus, every_s=every_s)

    async def forecast(self, *, samples_per_epoch: int | None = None) -> JobReport:
        """Return the forecast with the learned speeds; see ``TrainingJob.forecast``."""
        return await asyncio.to_thread(self._job.forecast, samples_per_epoch=samples_per_epoch)

    async def suspend(self) -> None:
        """Stop the job and free its nodes; checkpoints stay."""
        await asyncio.to_thread(self._job.suspend)

    async def resume(self) -> None:
        """Continue a suspended job from its newest checkpoint."""
        await asyncio.to_thread(self._job.resume)

    async def checkpoint(self, *, timeout_s: float = TIMEOUT_S) -> CheckpointStatus:
        """Write a checkpoint now, and return it when it is complete; see ``TrainingJob.checkpoint``."""
        return await asyncio.to_thread(self._job.checkpoint, timeout_s=timeout_s)

    async def scale(self, workers: int | None = None, *, pools: Mapping[str, int] | None = None) -> None:
        """Change how many workers the job may have; see ``TrainingJob.scale``."""
        await asyncio.to_thread(self._job.scale, workers, pools=pools)

    async def delete(self) -> None:
        """Delete the job with its workers; checkpoints in its store stay."""
        await asyncio.to_thread(self._job.delete)


class AsyncHeteroTrainClient:
    """``HeteroTrainClient`` with methods to await."""

    def __init__(
        self, *, namespace: str | None = None, context: str | None = None, kubeconfig: str | None = None
    ) -> None:
        """Read the kubeconfig; see ``HeteroTrainClient``."""
        self._client = HeteroTrainClient(namespace=namespace, context=context, kubeconfig=kubeconfig)

    @property
    def namespace(self) -> str:
        """Namespace of the client's jobs."""
        return self._client.namespace

    async def train(self, script: Script, *, pools: Pools, image: str, **more: Any) -> AsyncTrainingJob:
        """Create a job; see ``HeteroTrainClient.train``."""
        made = await asyncio.to_thread(self._client.train, script, pools=pools, image=image, **more)
        return AsyncTrainingJob(made)

    async def submit(self, body: Mapping[str, Any]) -> AsyncTrainingJob:
        """Create a job from its whole object, as in YAML."""
        return AsyncTrainingJob(await asyncio.to_thread(self._client.submit, body))

    async def job(self, name: str) -> AsyncTrainingJob:
        """Return a job that exists."""
        return AsyncTrainingJob(await asyncio.to_thread(self._client.job, name))

    async def jobs(self) -> list[AsyncTrainingJob]:
        """Return all jobs of the namespace."""
        return [AsyncTrainingJob(each) for each in await asyncio.to_thread(self._client.jobs)]


def _next(lines: Iterator[LogLine]) -> LogLine | None:
    return next(lines, None)
