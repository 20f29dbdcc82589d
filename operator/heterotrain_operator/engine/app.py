"""The operator's parts: connected, started in order, supervised, and stopped together.

kopf does not supervise tasks next to its own, so a task group does: when any task ends, all of them end, the process
exits with an error and Kubernetes restarts it. A dead loop in a live process would be worse than a restart.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

import structlog
from heterotrain_core.contract import keys

from heterotrain_operator.cluster_state.parse import (
    key_of,
    parse_job,
    parse_node,
    parse_plan_object,
    parse_pod,
    rfc3339_micro,
)
from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.cluster_state.unanswered import unanswered
from heterotrain_operator.cluster_state.views import JobKey, JobView, NodeView
from heterotrain_operator.cluster_state.worker_defaults import worker_defaults
from heterotrain_operator.decide.allocation.competition import takes_part
from heterotrain_operator.decide.node_interest import changes_decisions, wants_one_of
from heterotrain_operator.engine.act import Actor
from heterotrain_operator.engine.admitted import AdmittedPods
from heterotrain_operator.engine.allocator import Allocator, wait_at_most
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.engine.layout_planner import LayoutPlanner
from heterotrain_operator.engine.learner import Learner
from heterotrain_operator.engine.loop_delay import watch_delay
from heterotrain_operator.engine.metrics import OperatorMetrics
from heterotrain_operator.engine.plugins import ResourceReader
from heterotrain_operator.engine.poller import Poller, Prom
from heterotrain_operator.engine.publisher import Publisher
from heterotrain_operator.engine.queue import Queue
from heterotrain_operator.engine.reconcile import JobInputSources, Reconciler
from heterotrain_operator.engine.responsiveness import keep_responsive
from heterotrain_operator.engine.resync import list_foreign, relist
from heterotrain_operator.engine.serve import METRICS_PATH
from heterotrain_operator.engine.speed_keeper import SpeedKeeper
from heterotrain_operator.engine.status_writer import StatusWriter
from heterotrain_operator.engine.watch_gaps import WatchGaps
from heterotrain_operator.kube.errors import KubeError, NotFound
from heterotrain_operator.kube.lease import Elector, LeaseSettings
from heterotrain_operator.kube.resources import JOBS
from heterotrain_operator.kube.reviews import MetricsAccess
from heterotrain_operator.kube.verbs import Kube
from heterotrain_operator.settings import Settings, announcements, egress_rules, namespace_weights
from heterotrain_operator.threads import Threads

LIST_RETRY_S = 2.0
RELEASE_S = 5.0
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
        self.metrics = OperatorMetrics()
        self.store = Store(clocks.wall, worker_defaults(settings.worker_defaults))
        self.queue: Queue[JobKey] = Queue(
            jitter=lambda: random.uniform(0.8, 1.2),  # noqa: S311  # spreads retries
            waited=self.metrics.note_queued,
            monotonic=clocks.monotonic,
        )
        self.publisher = Publisher(kube, clocks=clocks)
        self.statuses = StatusWriter(
            kube, self.store, self.metrics, clocks=clocks, interval_s=settings.status_interval_s
        )
        self.actor = Actor(
            kube,
            self.store,
            self.metrics,
            self.publisher,
            statuses=self.statuses,
            clocks=clocks,
            network_policy=settings.network_policy,
            egress=egress_rules(settings.egress),
        )
        self.threads = threads
        self.learner = Learner(self.store, self.queue, self.metrics, clocks=clocks, threads=threads)
        self.poller = Poller(
            prom,
            self.store,
            self.queue,
            self.metrics,
            settings.prometheus,
            learner=self.learner,
            clocks=clocks,
            threads=threads,
        )
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
        self.speeds = SpeedKeeper(kube, self.store, self.publisher, self.poller, self.learner, clocks=clocks)
        sources = JobInputSources(
            telemetry_of=self.poller.telemetry_of,
            learner=self.learner,
            speeds=self.speeds,
            grant_of=self.allocator.grant_of,
            layouts=LayoutPlanner(self.queue.add_unless_failing, threads),
            gather_s=settings.gather_s,
            admitted=admitted,
        )
        self.devices = ResourceReader(kube, self.store, threads)
        self.reconciler = Reconciler(
            kube,
            self.store,
            self.queue,
            self.actor,
            self.metrics,
            sources=sources,
            statuses=self.statuses,
            more_requests=self.devices.requests_of,
            clocks=clocks,
        )
        self.metrics_access = MetricsAccess(kube, path=METRICS_PATH, monotonic=clocks.monotonic)
        self.elector: Elector | None = None
        if settings.leader_election:
            lease = _lease(settings)
            self.elector = Elector(kube, lease, wall_clock=lambda: rfc3339_micro(clocks.wall()), clock=clocks.monotonic)
            self.elector.notes = lambda: {keys.ANNOTATION_NODE_LOSSES: self.store.nodes.losses()}
        self._clocks = clocks
        self._announcements = announcements(settings.node_announcements)
        self._listed_s = float("-inf")
        """When the last full list was complete, on the monotonic clock."""
        self.metrics.listed_age.set_function(lambda: clocks.monotonic() - self._listed_s)
        self.metrics.clock_skew.set_function(clocks.skew_s)
        self._synced = asyncio.Event()
        self.gaps = WatchGaps()

    # --- watch events ------------------------------------------------------------------------------------------------

    def _enqueue(self, key: JobKey, *, urgent: bool = False) -> None:
        """Queue a job; a stand-by only fills its store, and queues all jobs when it starts to lead."""
        if self.elector is None or self.elector.leads:
            (self.queue.add_urgent if urgent else self.queue.add)(key)

    def _enqueue_later(self, keys: Iterable[JobKey]) -> None:
        """Queue jobs with low priority."""
        if self.elector is None or self.elector.leads:
            self.queue.add_low_priority(keys)

    def _enqueue_unanswered(self) -> None:
        """Queue jobs first that wait for an answer to a change which no event reported."""
        for key in unanswered(self.store):
            self._enqueue(key, urgent=True)

    def job_event(self, body: Mapping[str, Any], *, deleted: bool) -> None:
        """Store the newest state of a job."""
        key, version = key_of(body), body["metadata"]["resourceVersion"]
        if not deleted and self.store.jobs.is_stored(key, version):
            # An echo of the status that was just written: unless it brought numbers only, the next step waits for it.
            if not self.reconciler.wrote_numbers(key, version):
                self._enqueue(key)
            return
        before = self.store.jobs.get(key_of(body))
        view = parse_job(body, before, self.store.defaults)
        if deleted or (before is not None and before.uid != view.uid):
            self.store.plans.discard(view.key)
        if deleted:
            self.store.jobs.discard(view.key)
        else:
            self.store.jobs.put(view)
        self._enqueue(view.key, urgent=before is not None and (deleted or before.generation != view.generation))
        if deleted or before is None or _demand(before) != _demand(view):
            self.allocator.changed()

    def pod_event(self, body: Mapping[str, Any], *, deleted: bool) -> None:
        """Store the newest state of a worker's pod."""
        metadata = body["metadata"]
        if not deleted and self.store.pods.is_stored(
            (metadata["namespace"], metadata["name"]), metadata["resourceVersion"]
        ):
            return
        view = parse_pod(body)
        if view is None:
            return
        before = self.store.pods.get((view.key.namespace, view.name))
        if deleted:
            self.store.pods.discard((view.key.namespace, view.name))
            if self.elector is None or self.elector.leads:
                self.reconciler.note_gone(view)
        else:
            self.store.pods.put(view)
        self._enqueue(view.key, urgent=before is not None and before.can_train and (deleted or not view.can_train))
        self.allocator.changed()

    def plan_event(self, body: Mapping[str, Any], *, deleted: bool) -> None:
        """Store the newest state of a plan's ConfigMap, if a job controls it; others could fill the memory."""
        view = parse_plan_object(body)
        if view is None or (not deleted and self.store.plans.is_stored(view.key, view.resource_version)):
            return
        if view.key not in self.store.jobs.all():
            return
        if deleted or not self.store.controls_plan(view):
            self.store.plans.discard(view.key)
        else:
            self.store.plans.put(view)
        self._enqueue(view.key)
        self.allocator.changed()

    def node_event(self, body: Mapping[str, Any], *, deleted: bool) -> None:
        """Store the newest state of a node; heartbeats change no relevant field and queue no job."""
        view = parse_node(body, self._announcements)
        before = self.store.nodes.get(view.name)
        if deleted:
            self.store.nodes.discard(view.name)
        else:
            self.store.nodes.put(view)
        stored = self.store.nodes.get(view.name) or view  # with its hold, if it flaps
        if deleted or before is None or changes_decisions(before, stored, self.store.jobs.all().values()):
            self._nodes_changed([each for each in (before, stored) if each is not None])
        self.metrics.held_nodes.set(len(self.store.nodes.held))

    def _nodes_changed(self, nodes: Collection[NodeView]) -> None:
        """Look at jobs with workers on these nodes, and then at those that miss workers which these nodes may take.

        Args:
            nodes: the nodes before and after the change.
        """
        for key in {key for node in nodes for key in self.store.pods.jobs_on(node.name)}:
            self._enqueue(key, urgent=True)
        placed = self.store.pods.placed
        self._enqueue_later(
            key for key, job in self.store.jobs.all().items() if wants_one_of(job, nodes, placed=placed(key))
        )
        self.allocator.changed()

    def _inherit(self, notes: Mapping[str, str]) -> None:
        """Leave the nodes out that the leader before this one left out because they flap."""
        if names := self.store.nodes.inherit(notes.get(keys.ANNOTATION_NODE_LOSSES, "")):
            log.info("nodes are not used, as before", nodes=sorted(names))
        self.metrics.held_nodes.set(len(self.store.nodes.held))

    async def _release_nodes(self) -> None:
        if names := self.store.nodes.release():
            log.info("nodes are used again", nodes=sorted(names))
            self._nodes_changed([node for name in names if (node := self.store.nodes.get(name)) is not None])
        self.metrics.held_nodes.set(len(self.store.nodes.held))

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
                tasks.create_task(_every(RELEASE_S, self._release_nodes), name="held-nodes")
                await self._synced.wait()
                if self.elector is not None:
                    await self.elector.acquire()
                    self._inherit(self.elector.inherited)
                    tasks.create_task(self.elector.keep(), name="lease")
                self.metrics.leader.set(1)
                log.info("leading", identity=self.settings.identity)
                tasks.create_task(self.allocator.run(), name="allocation")
                tasks.create_task(self.learner.run(), name="learner")
                tasks.create_task(self.publisher.run(), name="events")
                # The previous leader may not have handled the latest changes.
                self.queue.add_low_priority(self.store.newest_first())
                self._enqueue_unanswered()
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
            self._enqueue_later(known)
            self._enqueue_unanswered()
            await wait_at_most(self.gaps.found, self.settings.relist_s)

    async def _list_foreign_pods(self) -> None:
        await self._synced.wait()
        await _every(self.settings.foreign_pods_s, self._look_at_others)

    async def _look_at_others(self) -> None:
        await list_foreign(self.kube, self.store, self.settings.watched)
        if names := await self.devices.refresh():
            self._nodes_changed([node for name in names if (node := self.store.nodes.get(name)) is not None])

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


async def _every(pause_s: float, call: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(pause_s)
        try:
            await call()
        except KubeError as error:
            log.warning("listing other pods failed", error=str(error))


def _demand(job: JobView) -> tuple[object, ...]:
    """Return what the allocation between jobs depends on; numbers in a status are not part of it."""
    return (job.uid, job.generation, takes_part(job))


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
