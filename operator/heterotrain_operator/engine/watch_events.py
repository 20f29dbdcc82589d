"""Stores what watches report, queues the jobs that it concerns, and notices watches that were interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import structlog

from heterotrain_operator.cluster_state.parse import key_of, parse_job, parse_node, parse_plan_object, parse_pod
from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.cluster_state.views import JobKey, JobView, NodeView
from heterotrain_operator.decide.allocation.competition import takes_part
from heterotrain_operator.decide.node_interest import changes_decisions, wants_one_of
from heterotrain_operator.engine.allocator import Allocator
from heterotrain_operator.engine.metrics import OperatorMetrics
from heterotrain_operator.engine.queue import Queue
from heterotrain_operator.engine.reconcile import Reconciler

log = structlog.get_logger()


class WatchEvents:
    """The newest state of each object, as events and full lists bring it."""

    def __init__(
        self,
        store: Store,
        queue: Queue[JobKey],
        metrics: OperatorMetrics,
        *,
        allocator: Allocator,
        reconciler: Reconciler,
        announcements: Collection[str],
        leads: Callable[[], bool],
    ) -> None:
        """Connect the parts.

        Args:
            store: has the newest states.
            queue: of jobs.
            metrics: of the operator.
            allocator: shares nodes between jobs.
            reconciler: looks at jobs, and has written their newest states.
            announcements: taints and conditions that announce a node's end.
            leads: returns whether this replica leads.
        """
        self._store, self._queue, self._metrics = store, queue, metrics
        self._allocator, self._reconciler = allocator, reconciler
        self._announcements = announcements
        self._leads = leads

    def _enqueue(self, key: JobKey, *, urgent: bool = False) -> None:
        """Queue a job; a stand-by only fills its store, and queues all jobs when it starts to lead."""
        if self._leads():
            (self._queue.add_urgent if urgent else self._queue.add)(key)

    def enqueue_later(self, keys: Iterable[JobKey]) -> None:
        """Queue jobs with low priority."""
        if self._leads():
            self._queue.add_low_priority(keys)

    def enqueue_unanswered(self) -> None:
        """Queue jobs first that wait for an answer to a change which no event reported."""
        for key in self._store.unanswered():
            self._enqueue(key, urgent=True)

    def job(self, body: Mapping[str, Any], *, deleted: bool) -> None:
        """Store the newest state of a job."""
        key, version = key_of(body), body["metadata"]["resourceVersion"]
        if not deleted and self._store.jobs.is_stored(key, version):
            # An echo of the status that was just written: unless it brought numbers only, the next step waits for it.
            if not self._reconciler.wrote_numbers(key, version):
                self._enqueue(key)
            return
        before = self._store.jobs.get(key)
        view = parse_job(body, before, self._store.defaults)
        if deleted or (before is not None and before.uid != view.uid):
            self._store.plans.discard(view.key)
        if deleted:
            self._store.jobs.discard(view.key)
        else:
            self._store.jobs.put(view)
        self._enqueue(view.key, urgent=before is not None and (deleted or before.generation != view.generation))
        if deleted or before is None or _demand(before) != _demand(view):
            self._allocator.changed()

    def pod(self, body: Mapping[str, Any], *, deleted: bool) -> None:
        """Store the newest state of a worker's pod."""
        metadata = body["metadata"]
        if not deleted and self._store.pods.is_stored(
            (metadata["namespace"], metadata["name"]), metadata["resourceVersion"]
        ):
            return
        view = parse_pod(body)
        if view is None:
            return
        before = self._store.pods.get((view.key.namespace, view.name))
        if deleted:
            self._store.pods.discard((view.key.namespace, view.name))
            if self._leads():
                self._reconciler.note_gone(view)
        else:
            self._store.pods.put(view)
        self._enqueue(view.key, urgent=before is not None and before.can_train and (deleted or not view.can_train))
        self._allocator.changed()

    def plan(self, body: Mapping[str, Any], *, deleted: bool) -> None:
        """Store the newest state of a plan's ConfigMap, if a job controls it; others could fill the memory."""
        view = parse_plan_object(body)
        if view is None or (not deleted and self._store.plans.is_stored(view.key, view.resource_version)):
            return
        if view.key not in self._store.jobs.all():
            return
        if deleted or not self._store.controls_plan(view):
            self._store.plans.discard(view.key)
        else:
            self._store.plans.put(view)
        self._enqueue(view.key)
        self._allocator.changed()

    def node(self, body: Mapping[str, Any], *, deleted: bool) -> None:
        """Store the newest state of a node; heartbeats change no relevant field and queue no job."""
        view = parse_node(body, self._announcements)
        before = self._store.nodes.get(view.name)
        if deleted:
            self._store.nodes.discard(view.name)
        else:
            self._store.nodes.put(view)
        stored = self._store.nodes.get(view.name) or view  # with its devices
        if deleted or before is None or changes_decisions(before, stored, self._store.jobs.all().values()):
            self.nodes_changed([each for each in (before, stored) if each is not None])

    def nodes_changed(self, nodes: Collection[NodeView]) -> None:
        """Look at jobs with workers on these nodes, and then at those that miss workers which these nodes may take.

        Args:
            nodes: the nodes before and after the change.
        """
        for key in {key for node in nodes for key in self._store.pods.jobs_on(node.name)}:
            self._enqueue(key, urgent=True)
        placed = self._store.pods.placed
        self.enqueue_later(
            key for key, job in self._store.jobs.all().items() if wants_one_of(job, nodes, placed=placed(key))
        )
        self._allocator.changed()


def _demand(job: JobView) -> tuple[object, ...]:
    """Return what the allocation between jobs depends on; numbers in a status are not part of it."""
    return (job.uid, job.generation, takes_part(job))


class WatchGaps:
    """Gaps of the watches of all kinds: no event reports what is deleted during one.

    Attributes:
        found: set by a gap; then everything is to be listed again.
    """

    def __init__(self) -> None:
        self.found = asyncio.Event()
        self._streaming: set[str] = set()
        self._listed: dict[str, set[str]] = {}
        """By kind, the uids of the objects in the list with which its watch started."""

    def note(self, kind: str, event_type: str | None, uid: str) -> None:
        """Note an event of a kind; type ``None`` comes from the list with which a watch starts.

        A second such list means that the watch was interrupted: it names an object a second time, or follows other
        events. An empty second list causes no event; objects that are gone are then noticed by the next regular list,
        or when a write finds them missing.
        """
        if event_type is not None:
            self._streaming.add(kind)
            return
        listed = self._listed.setdefault(kind, set())
        if kind in self._streaming or uid in listed:
            self._streaming.discard(kind)
            listed.clear()
            self.found.set()
        listed.add(uid)
