"""The operator's parts: connected, started in order, supervised, and stopped together.

kopf does not supervise tasks next to its own, so a task group does: when any task ends, all of them end, the process
exits with an error and Kubernetes restarts it. A dead loop in a live process would be worse than a restart.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import structlog

from heterotrain_operator.cluster_state.parse import (
    rfc3339_micro,
)
from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.cluster_state.views import JobKey
from heterotrain_operator.cluster_state.worker_defaults import worker_defaults
from heterotrain_operator.engine.act import Actor
from heterotrain_operator.engine.admitted import AdmittedPods
from heterotrain_operator.engine.allocator import Allocator, wait_at_most
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.engine.layout_planner import LayoutPlanner
from heterotrain_operator.engine.learner import Learner
from heterotrain_operator.engine.metrics import OperatorMetrics
from heterotrain_operator.engine.plugins import ResourceReader
from heterotrain_operator.engine.poller import Poller, Prom
from heterotrain_operator.engine.publisher import Publisher
from heterotrain_operator.engine.queue import Queue
from heterotrain_operator.engine.reconcile import JobInputSources, Reconciler
from heterotrain_operator.engine.responsiveness import keep_responsive, watch_delay
from heterotrain_operator.engine.resync import list_foreign, relist
from heterotrain_operator.engine.serve import METRICS_PATH
from heterotrain_operator.engine.speed_keeper import SpeedKeeper
from heterotrain_operator.engine.status_writer import StatusWriter
from heterotrain_operator.engine.watch_events import WatchEvents, WatchGaps
from heterotrain_operator.kube.errors import KubeError, NotFound
from heterotrain_operator.kube.lease import Elector, LeaseSettings
from heterotrain_operator.kube.resources import JOBS
from heterotrain_operator.kube.reviews import MetricsAccess
from heterotrain_operator.kube.verbs import Kube
from heterotrain_operator.settings import Settings, announcements, egress_rules, namespace_weights
from heterotrain_operator.threads import Threads

LIST_RETRY_S = 2.0
"""Pause between two looks for nodes that may be used again."""
STUCK_S = 900.0
"""A pass that takes longer hangs: each of its calls has a time limit of its own."""
STALE_LISTS = 3
"""The operator reports itself unhealthy after this many missed full lists."""

CLOCKS = Clocks()

log = structlog.get_logger()


class App:
    """The operator without kopf: events come in by method calls, so that tests need no framework."""

    def __init__(
        self, kube: Kube, settings: Settings, prom: Prom | None = None, *, threads: Threads, clocks: Clocks = CLOCKS
    ) -> None:
        self.kube = kube
        self.settings = settings
        self.threads = threads
        self._clocks = clocks
        self._announcements = announcements(settings.node_announcements)
        self.metrics = OperatorMetrics()
        self.store = Store(worker_defaults(settings.worker_defaults))
        self.queue: Queue[JobKey] = Queue(
            jitter=lambda: random.uniform(0.8, 1.2),  # noqa: S311  # spreads retries
            waited=self.metrics.note_queued,
            monotonic=clocks.monotonic,
        )
        self._make_writers()
        self._make_learner(prom)
        self._make_deciders()
        self.metrics_access = MetricsAccess(kube, path=METRICS_PATH, monotonic=clocks.monotonic)
        self.elector: Elector | None = None
        if settings.leader_election:
            now = lambda: rfc3339_micro(clocks.wall())  # noqa: E731  # a clock
            self.elector = Elector(kube, _lease(settings), wall_clock=now, clock=clocks.monotonic)
        self.events = WatchEvents(
            self.store,
            self.queue,
            self.metrics,
            allocator=self.allocator,
            reconciler=self.reconciler,
            announcements=self._announcements,
            leads=lambda: self.elector is None or self.elector.leads,
        )
        self._listed_s = float("-inf")
        """When the last full list was complete, on the monotonic clock."""
        self.metrics.listed_age.set_function(lambda: clocks.monotonic() - self._listed_s)
        self.metrics.clock_skew.set_function(clocks.skew_s)
        self._synced = asyncio.Event()
        self.gaps = WatchGaps()

    def _make_writers(self) -> None:
        """Make what writes to the API server."""
        settings, clocks = self.settings, self._clocks
        self.publisher = Publisher(self.kube, clocks=clocks)
        self.statuses = StatusWriter(
            self.kube, self.store, self.metrics, clocks=clocks, interval_s=settings.status_interval_s
        )
        self.actor = Actor(
            self.kube,
            self.store,
            self.metrics,
            self.publisher,
            statuses=self.statuses,
            clocks=clocks,
            network_policy=settings.network_policy,
            egress=egress_rules(settings.egress),
        )

    def _make_learner(self, prom: Prom | None) -> None:
        """Make what reads telemetry and learns from it."""
        clocks, threads = self._clocks, self.threads
        self.learner = Learner(self.store, self.queue, self.metrics, clocks=clocks, threads=threads)
        self.poller = Poller(
            prom,
            self.store,
            self.queue,
            self.metrics,
            self.settings.prometheus,
            learner=self.learner,
            clocks=clocks,
            threads=threads,
        )
        self.speeds = SpeedKeeper(self.kube, self.store, self.publisher, self.poller, self.learner, clocks=clocks)

    def _make_deciders(self) -> None:
        """Make what decides: the allocation between jobs, and the passes over each."""
        settings, clocks, threads = self.settings, self._clocks, self.threads
        admitted = AdmittedPods()
        self.allocator = Allocator(
            self.store,
            self.queue,
            self.metrics,
            telemetry_of=self.poller.telemetry_of,
            learner=self.learner,
            clocks=clocks,
            threads=threads,
            namespace_weights=namespace_weights(settings.namespace_weights),
            admitted=admitted,
            pods_of=lambda key: self.reconciler.pods_of(key),  # noqa: PLW0108  # it is created later
        )
        sources = JobInputSources(
            telemetry_of=self.poller.telemetry_of,
            learner=self.learner,
            speeds=self.speeds,
            grant_of=self.allocator.grant_of,
            layouts=LayoutPlanner(self.queue.add_unless_failing, threads),
            gather_s=settings.gather_s,
            admitted=admitted,
        )
        self.devices = ResourceReader(self.kube, self.store, threads)
        self.reconciler = Reconciler(
            self.kube,
            self.store,
            self.queue,
            self.actor,
            self.metrics,
            sources=sources,
            statuses=self.statuses,
            more_requests=self.devices.requests_of,
            clocks=clocks,
        )

    # --- tasks -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Fill the store, wait for leadership, reconcile; until cancelled.

        Raises:
            ExceptionGroup: a task ended, although all should run until cancelled.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._observe(), name="observe")
                tasks.create_task(keep_responsive(), name="responsiveness")
                tasks.create_task(watch_delay(self.metrics.loop_delay_seconds.observe), name="loop-delay")
                tasks.create_task(self._list_foreign_pods(), name="foreign-pods")
                await self._synced.wait()
                if self.elector is not None:
                    await self.elector.acquire()
                    tasks.create_task(self.elector.keep(), name="lease")
                self.metrics.leader.set(1)
                log.info("leading", identity=self.settings.identity)
                tasks.create_task(self.allocator.run(), name="allocation")
                tasks.create_task(self.learner.run(), name="learner")
                tasks.create_task(self.publisher.run(), name="events")
                # The previous leader may not have handled the latest changes.
                self.queue.add_low_priority(self.store.newest_first())
                self.events.enqueue_unanswered()
                if self.settings.prometheus.url is not None:
                    tasks.create_task(self.poller.run(), name="telemetry")
                    tasks.create_task(self.speeds.run(), name="speeds")
                for number in range(self.settings.workers):
                    tasks.create_task(self.reconciler.work(self.queue.get), name=f"worker-{number}")
                    tasks.create_task(self.reconciler.work(self.queue.get_urgent), name=f"urgent-worker-{number}")
        finally:
            self.metrics.leader.set(0)
            if self.elector is not None:
                with suppress(KubeError, TimeoutError):
                    await self.elector.release()

    async def wait_until_served(self) -> None:
        """Wait until the API server serves jobs: a watch that starts earlier would never see one."""
        while True:
            try:
                for namespace in self.settings.watched or (None,):
                    async for _ in self.kube.list(JOBS, namespace):
                        break
            except KubeError as error:
                hint = "install crds/heterotrain.dev_heterotrainjobs.yaml" if isinstance(error, NotFound) else ""
                log.warning("waiting for the API of jobs", error=str(error), hint=hint)
                await asyncio.sleep(LIST_RETRY_S)
            else:
                return

    async def _observe(self) -> None:
        while True:
            self.gaps.found.clear()
            try:
                known = await relist(self.kube, self.store, self.settings.watched, announcements=self._announcements)
                if not self._synced.is_set():
                    await list_foreign(self.kube, self.store, self.settings.watched)
            except KubeError as error:
                hint = "install crds/heterotrain.dev_heterotrainjobs.yaml" if isinstance(error, NotFound) else ""
                log.warning("list failed", error=str(error), hint=hint)
                await asyncio.sleep(LIST_RETRY_S)
                continue
            self._listed_s = self._clocks.monotonic()
            self.metrics.jobs.set(len(self.store.jobs.all()))
            self.metrics.pods.set(len(self.store.pods.all()))
            self._synced.set()
            self.reconciler.reapply()
            self.events.enqueue_later(known)
            self.events.enqueue_unanswered()
            await wait_at_most(self.gaps.found, self.settings.relist_s)

    async def _list_foreign_pods(self) -> None:
        await self._synced.wait()
        while True:
            await asyncio.sleep(self.settings.foreign_pods_s)
            try:
                await self._look_at_others()
            except KubeError as error:
                log.warning("listing other pods failed", error=str(error))

    async def _look_at_others(self) -> None:
        await list_foreign(self.kube, self.store, self.settings.watched)
        if names := await self.devices.refresh():
            self.events.nodes_changed([node for name in names if (node := self.store.nodes.get(name)) is not None])

    @property
    def synced(self) -> bool:
        """Whether the store has been filled; nothing is decided before."""
        return self._synced.is_set()

    @property
    def healthy(self) -> bool:
        """Whether full lists still succeed, and neither a pass over a job nor another task hangs."""
        listed = self._clocks.monotonic() - self._listed_s < STALE_LISTS * self.settings.relist_s
        longest_s = max(
            self.reconciler.longest_pass_s,
            *(each.busy.seconds for each in (self.poller, self.learner, self.allocator)),
        )
        return not self.synced or (listed and longest_s < STUCK_S)


def _lease(settings: Settings) -> LeaseSettings:
    duration_s = settings.lease_duration_s
    return LeaseSettings(
        namespace=settings.namespace,
        name=settings.lease_name,
        identity=settings.identity,
        duration_s=duration_s,
        renew_s=duration_s / 5,
        deadline_s=duration_s * 0.9,
    )
