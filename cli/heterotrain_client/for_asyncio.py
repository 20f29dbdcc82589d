"""The client for asyncio: each call runs in a thread, so the event loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from heterotrain_cli.cluster.api import LogLine
from heterotrain_operator.api.status import HeteroTrainJobStatus

from heterotrain_client.client import HeteroTrainClient
from heterotrain_client.job import TrainingJob
from heterotrain_client.manifest import Pools, Script

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _awaited(
    method: Callable[Concatenate[TrainingJob, _P], _T],
) -> Callable[Concatenate[AsyncTrainingJob, _P], Coroutine[Any, Any, _T]]:
    """Return a method of a job as one to await, with its arguments and its documentation."""

    @wraps(method)
    async def call(self: AsyncTrainingJob, /, *args: _P.args, **named: _P.kwargs) -> _T:
        return await asyncio.to_thread(method, self._job, *args, **named)

    return call


class AsyncTrainingJob:
    """``TrainingJob`` with methods to await."""

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self.name = job.name

    @property
    def namespace(self) -> str:
        """The job's namespace."""
        return self._job.namespace

    body = _awaited(TrainingJob.body)
    events = _awaited(TrainingJob.events)
    status = _awaited(TrainingJob.status)
    metrics = _awaited(TrainingJob.metrics)
    forecast = _awaited(TrainingJob.forecast)
    suspend = _awaited(TrainingJob.suspend)
    resume = _awaited(TrainingJob.resume)
    checkpoint = _awaited(TrainingJob.checkpoint)
    scale = _awaited(TrainingJob.scale)
    delete = _awaited(TrainingJob.delete)

    async def wait(self, *, timeout_s: float | None = None, progress: bool = False) -> HeteroTrainJobStatus:
        """Wait until the job has succeeded, and return its last status; see ``TrainingJob.wait``."""
        return await asyncio.to_thread(self._job.wait, timeout_s=timeout_s, progress=progress)

    async def logs(self, *workers: str, follow: bool = False, tail: int | None = None) -> AsyncIterator[LogLine]:
        """Yield log lines; see ``TrainingJob.logs``."""
        lines = self._job.logs(*workers, follow=follow, tail=tail)
        while (line := await asyncio.to_thread(next, lines, None)) is not None:
            yield line


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
