"""The running operator: what belongs together, started in order, watched, and stopped as one.

kopf does not watch over tasks that are started beside it, so this does: when any of them ends, everything ends, the
process exits with an error and Kubernetes starts it anew. A dead loop in a living process would be worse than a restart.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import structlog

from heterotrain_operator.cluster_state.parse import (
    key_of,
    parse_job,
    parse_node,
    parse_plan_object,
    parse_pod,
    rfc3339_micro,
)
from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.cluster_state.views import JobKey, JobView, NodeView
from heterotrain_operator.decide.allocation.competition import takes_part
from heterotrain_operator.engine.act import Actor
from heterotrain_operator.engine.allocator import Allocator, set_within
from heterotrain_operator.engine.metrics import OperatorMetrics
from heterotrain_operator.engine.poller import Poller, Prom
from heterotrain_operator.engine.queue import Queue
from heterotrain_operator.engine.reconcile import Reconciler
from heterotrain_operator.engine.resync import list_foreign, relist
from heterotrain_operator.kube.errors import KubeError, NotFound
from heterotrain_operator.kube.lease import Elector, LeaseSettings
from heterotrain_operator.kube.verbs import Kube
from heterotrain_operator.settings import Settings

LIST_RETRY_S = 2.0
STALE_LISTS = 3
"""After this many full lists have been missed, the operator calls itself unhealthy."""

log = structlog.get_logger()


class App:
    """The operator without kopf: fed by events, it can be run and tested without any framework."""

    def __init__(self, kube: Kube, settings: Settings, prom: Prom | None = None) -> None:
        self.kube = kube
        self.settings = settings
        self.metrics = OperatorMetrics()
        self.store = Store()
        self.queue: Queue[JobKey] = Queue(jitter=lambda: random.uniform(0.8, 1.2))  # noqa: S311  # spreads retries
        self.actor = Actor(
            kube,
            self.store,
            self.metrics,
            clock=time.monotonic,
            wall_clock_s=time.time,
            status_interval_s=settings.status_interval_s,
        )
        self.poller = Poller(
            prom,
            self.store,
            self.queue,
            self.metrics,
            settings.prometheus,
            clock=time.monotonic,
            wall_clock_s=time.time,
        )
        self.allocator = Allocator(
            self.store,
            self.queue,
            self.metrics,
            telemetry_of=self.poller.of,
            clock=time.monotonic,
            wall_clock_s=time.time,
        )
        self.reconciler = Reconciler(
            kube,
            self.store,
            self.queue,
            self.actor,
            self.metrics,
            telemetry_of=self.poller.of,
            grant_of=self.allocator.of,
            gather_s=settings.gather_s,
            clock=time.monotonic,
            wall_clock_s=time.time,
        )
        self.elector: Elector | None = None
        if settings.leader_election:
            lease = LeaseSettings(
                namespace=settings.namespace,
                name=settings.lease_name,
                identity=settings.identity,
                duration_s=settings.lease_duration_s,
                renew_s=settings.lease_duration_s / 5,
                deadline_s=settings.lease_duration_s * 0.7,
            )
            self.elector = Elector(kube, lease, wall_clock=lambda: rfc3339_micro(time.time()))
        self.listed_s = float("-inf")
        """When the last full list was complete, on the monotonic clock."""
        self.metrics.listed_age.set_function(lambda: time.monotonic() - self.listed_s)
        self._synced = asyncio.Event()
        self._streaming: set[str] = set()
        self._gap = asyncio.Event()

    # --- what the watch brings -------------------------------------------------------------------------------------

    def _wake(self, key: JobKey) -> None:
        """Have a job looked at; a stand-by only keeps what it sees, and looks at all jobs when it leads."""
        if self.elector is None or self.elector.leads:
            self.queue.add(key)

    def _wake_behind(self, keys: Iterable[JobKey]) -> None:
        """Have jobs looked at when there is time for it."""
        if self.elector is None or self.elector.leads:
            self.queue.add_behind(keys)

    def came(self, kind: str, event_type: str | None) -> None:
        """Note how an object came: ``None`` says by a list of the watch, which it makes at its start and after a gap.

        What was deleted in a gap is told by nobody, so everything is listed anew.
        """
        if event_type is not None:
            self._streaming.add(kind)
        elif kind in self._streaming:
            self._streaming.discard(kind)
            self._gap.set()

    def job_event(self, body: Mapping[str, Any], *, deleted: bool) -> None:
        """Take the newest state of a job."""
        if not deleted and self.store.jobs.knows(key_of(body), body["metadata"]["resourceVersion"]):
            self._wake(key_of(body))  # our own status: what it says may be what the next step waited for
            return
        view, before = parse_job(body), self.store.jobs.get(key_of(body))
        if deleted:
            self.store.jobs.discard(view.key)
        else:
            self.store.jobs.put(view)
        self._wake(view.key)
        if deleted or before is None or _wishes(before) != _wishes(view):
            self.allocator.changed()

    def pod_event(self, body: Mapping[str, Any], *, deleted: bool) -> None:
        """Take the newest state of a worker's pod."""
        metadata = body["metadata"]
        if not deleted and self.store.pods.knows(
            (metadata["namespace"], metadata["name"]), metadata["resourceVersion"]
        ):
            return
        view = parse_pod(body)
        if view is None:
            return
        if deleted:
            self.store.pods.discard((view.key.namespace, view.name))
        else:
            self.store.pods.put(view)
        self._wake(view.key)
        self.allocator.changed()

    def plan_event(self, body: Mapping[str, Any], *, deleted: bool) -> None:
        """Take the newest state of a plan's ConfigMap."""
        view = parse_plan_object(body)
        if view is None or (not deleted and self.store.plans.knows(view.key, view.resource_version)):
            return
        if deleted:
            self.store.plans.discard(view.key)
        else:
            self.store.plans.put(view)
        self._wake(view.key)
        self.allocator.changed()

    def node_event(self, body: Mapping[str, Any], *, deleted: bool) -> None:
        """Take the newest state of a node; heartbeats, which change nothing that we look at, wake nobody."""
        view = parse_node(body)
        before = self.store.nodes.get(view.name)
        if deleted:
            self.store.nodes.discard(view.name)
        else:
            self.store.nodes.put(view)
        if deleted or before is None or _matters(before) != _matters(view):
            for key in {pod.key for pod in self.store.pods.all().values() if pod.node == view.name}:
                self._wake(key)
            self._wake_behind(self.store.jobs.all())
            self.allocator.changed()

    # --- what runs -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Observe, wait for leadership, act; until cancelled.

        Raises:
            ExceptionGroup: a part of the operator ended, which none of them should.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._observe(), name="observe")
                tasks.create_task(self._foreign(), name="foreign")
                await self._synced.wait()
                if self.elector is not None:
                    await self.elector.acquire()
                    tasks.create_task(self.elector.keep(), name="lease")
                self.metrics.leader.set(1)
                log.info("leading", identity=self.settings.identity)
                tasks.create_task(self.allocator.run(), name="allocation")
                # What changed last is what the leader before may not have come to.
                self.queue.add_behind(self.store.newest_first())
                if self.settings.prometheus.url is not None:
                    tasks.create_task(self.poller.run(), name="telemetry")
                for number in range(self.settings.workers):
                    tasks.create_task(self.reconciler.work(), name=f"worker-{number}")
        finally:
            self.metrics.leader.set(0)
            if self.elector is not None:
                with suppress(KubeError, TimeoutError):
                    await self.elector.release()

    async def _observe(self) -> None:
        while True:
            self._gap.clear()
            try:
                known = await relist(self.kube, self.store, self.settings.watch_namespace)
                if not self._synced.is_set():
                    await list_foreign(self.kube, self.store, self.settings.watch_namespace)
            except KubeError as error:
                hint = "install crds/heterotrain.dev_heterotrainjobs.yaml" if isinstance(error, NotFound) else ""
                log.warning("list failed", error=str(error), hint=hint)
                await asyncio.sleep(LIST_RETRY_S)
                continue
            self.listed_s = time.monotonic()
            self.metrics.jobs.set(len(self.store.jobs.all()))
            self.metrics.pods.set(len(self.store.pods.all()))
            self._synced.set()
            self.reconciler.reapply()
            self._wake_behind(known)
            await set_within(self._gap, self.settings.relist_s)

    async def _foreign(self) -> None:
        await self._synced.wait()
        namespace = self.settings.watch_namespace
        await _every(self.settings.foreign_pods_s, lambda: list_foreign(self.kube, self.store, namespace))

    @property
    def synced(self) -> bool:
        """Whether the store has once been equal to the cluster; nothing is decided before."""
        return self._synced.is_set()

    @property
    def healthy(self) -> bool:
        """Whether full lists still come through."""
        return not self.synced or time.monotonic() - self.listed_s < STALE_LISTS * self.settings.relist_s


async def _every(pause_s: float, call: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(pause_s)
        try:
            await call()
        except KubeError as error:
            log.warning("list of foreign pods failed", error=str(error))


def _wishes(job: JobView) -> tuple[object, ...]:
    """Return what the allocation between jobs looks at; the numbers in a status are not among it."""
    return (job.uid, job.generation, takes_part(job))


def _matters(node: NodeView) -> tuple[object, ...]:
    return (node.taints, node.readiness, node.cordoned, node.allocatable, node.labels)
