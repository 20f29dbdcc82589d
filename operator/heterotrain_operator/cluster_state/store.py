"""The operator's cache of the cluster, fed by watch events, full lists and the answers to its own writes.

These three sources race, so two rules keep the cache correct. An object never goes back to an older
``resourceVersion``: the operator's own write may be stored before the watch delivers an earlier state. A full list
replaces only objects that have not changed since the list began: every change and removal is stamped with a local
sequence number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from heterotrain_operator.cluster_state.node_changes import NodeChanges
from heterotrain_operator.cluster_state.quantity import added
from heterotrain_operator.cluster_state.views import JobKey, JobView, NodeReadiness, NodeView, PlanObject, PodView
from heterotrain_operator.cluster_state.worker_defaults import WorkerDefaults


class _Versioned(Protocol):
    @property
    def resource_version(self) -> str: ...


_View = TypeVar("_View", bound=_Versioned)
_Key = TypeVar("_Key")


class Sequence:
    """Counts the changes of all kinds that share it."""

    def __init__(self) -> None:
        self.last = 0


class ObjectTable(Generic[_Key, _View]):
    """All objects of one kind; the shared sequence orders changes across kinds."""

    def __init__(self, key: Callable[[_View], _Key], sequence: Sequence) -> None:
        self._key = key
        self._views: dict[_Key, _View] = {}
        self._stamps: dict[_Key, int] = {}
        self._sequence = sequence

    def get(self, key: _Key) -> _View | None:
        """Return the object; ``None`` if it is not stored."""
        return self._views.get(key)

    def all(self) -> Mapping[_Key, _View]:
        """Return all objects; the mapping is live, so don't keep it over an ``await``."""
        return self._views

    def is_stored(self, key: _Key, resource_version: str) -> bool:
        """Return whether this state of an object or a newer one is stored: often the echo of the operator's write."""
        known = self._views.get(key)
        return known is not None and not _newer(resource_version, known.resource_version)

    def put(self, view: _View) -> bool:
        """Store a state of an object unless it is outdated; return whether it was stored."""
        key = self._key(view)
        if self.is_stored(key, view.resource_version):
            return False
        self._views[key] = view
        self._stamp(key)
        return True

    def discard(self, key: _Key) -> None:
        """Remove a deleted object."""
        self._views.pop(key, None)
        self._stamp(key)

    def begin_list(self) -> int:
        """Return the ``since`` for ``replace``; call this before the list is requested."""
        return self._sequence.last

    def changed(self, key: _Key) -> int:
        """Return a number that orders objects by their last change; 0 for no change since the first list."""
        return self._stamps.get(key, 0)

    def replace(self, views: Iterable[_View], *, since: int) -> set[_Key]:
        """Replace all objects that have not changed since the list began; return the keys that differed."""
        changed = set()
        listed = set()
        for view in views:
            key = self._key(view)
            listed.add(key)
            if self._stamps.get(key, 0) <= since:
                known = self._views.get(key)
                if known is None or known.resource_version != view.resource_version:
                    self._views[key] = view
                    changed.add(key)
        for key in [key for key in self._views if key not in listed and self._stamps.get(key, 0) <= since]:
            del self._views[key]
            changed.add(key)
        self._stamps = {key: stamp for key, stamp in self._stamps.items() if key in self._views or stamp > since}
        return changed

    def _stamp(self, key: _Key) -> None:
        self._sequence.last += 1
        self._stamps[key] = self._sequence.last


class PodKind(ObjectTable[tuple[str, str], PodView]):
    """Pods, also found by their job and by their node, with running sums of what they request on each node."""

    def __init__(self, sequence: Sequence, changes: NodeChanges) -> None:
        super().__init__(lambda pod: (pod.key.namespace, pod.name), sequence)
        self._changes = changes
        self._of_job: dict[JobKey, dict[str, PodView]] = {}
        self._on_node: dict[str, Counter[JobKey]] = {}
        self._placed: Counter[JobKey] = Counter()
        self._used: dict[str, Counter[str]] = {}

    @property
    def used(self) -> Mapping[str, Mapping[str, float]]:
        """By node, the sum of the requests of running worker pods."""
        return self._used

    def of_job(self, key: JobKey) -> tuple[PodView, ...]:
        """Return the job's pods by worker index."""
        return tuple(sorted(self._of_job.get(key, {}).values(), key=lambda pod: pod.index))

    def jobs_on(self, node: str) -> Collection[JobKey]:
        """Return the jobs with pods on this node."""
        return self._on_node.get(node, {}).keys()

    def placed(self, key: JobKey) -> int:
        """Return how many pods of the job have a node and have not ended."""
        return self._placed[key]

    def put(self, view: PodView) -> bool:
        """Store a state of a pod; see ``ObjectTable.put``."""
        known = self.get((view.key.namespace, view.name))
        taken = super().put(view)
        if taken:
            if known is not None:
                self._unlink(known)
            self._link(view)
        return taken

    def discard(self, key: tuple[str, str]) -> None:
        """Remove a deleted pod."""
        if known := self.get(key):
            self._unlink(known)
        super().discard(key)

    def replace(self, views: Iterable[PodView], *, since: int) -> set[tuple[str, str]]:
        """Replace pods by a list; see ``ObjectTable.replace``."""
        before = dict(self.all())
        changed = super().replace(views, since=since)
        for key in changed:
            if (known := before.get(key)) is not None:
                self._unlink(known)
            if (pod := self.get(key)) is not None:
                self._link(pod)
        # Running sums of fractions drift, so each list begins them anew.
        running, self._used = self._used, self._sums()
        self._changes.note(node for node in {*running, *self._used} if running.get(node) != self._used.get(node))
        return changed

    def _sums(self) -> dict[str, Counter[str]]:
        found: dict[str, Counter[str]] = {}
        for pod in self.all().values():
            if pod.node and not pod.phase_ended:
                sums = found.setdefault(pod.node, Counter())
                for name, amount in pod.requests.items():
                    sums[name] = sums.get(name, 0) + amount  # type: ignore[assignment]  # typed for whole numbers
        return found

    def _link(self, pod: PodView) -> None:
        self._of_job.setdefault(pod.key, {})[pod.name] = pod
        if pod.node and not pod.phase_ended:
            self._changes.note((pod.node,))
            self._used.setdefault(pod.node, Counter()).update(pod.requests)
            self._placed[pod.key] += 1
        if pod.node:
            self._on_node.setdefault(pod.node, Counter())[pod.key] += 1

    def _unlink(self, pod: PodView) -> None:
        pods = self._of_job.get(pod.key, {})
        pods.pop(pod.name, None)
        if not pods:
            self._of_job.pop(pod.key, None)
        if pod.node and not pod.phase_ended:
            self._changes.note((pod.node,))
            self._used.setdefault(pod.node, Counter()).subtract(pod.requests)
            _less_one(self._placed, pod.key)
        if pod.node:
            jobs = self._on_node[pod.node]
            _less_one(jobs, pod.key)
            if not jobs:
                del self._on_node[pod.node]


class NodeKind(ObjectTable[str, NodeView]):
    """Nodes, with the devices that plugins count on them."""

    def __init__(self, sequence: Sequence, changes: NodeChanges) -> None:
        super().__init__(lambda node: node.name, sequence)
        self._changes = changes
        self._devices: Mapping[str, Mapping[str, float]] = {}

    def put(self, view: NodeView) -> bool:
        """Store a state of a node; see ``ObjectTable.put``."""
        if self.is_stored(view.name, view.resource_version):
            return False
        self._changes.note((view.name,))
        return super().put(self._with_devices(view))

    def discard(self, key: str) -> None:
        """Remove a deleted node; one of the same name may come back."""
        self._changes.note((key,))
        super().discard(key)

    def replace(self, views: Iterable[NodeView], *, since: int) -> set[str]:
        """Replace nodes by a list; see ``ObjectTable.replace``."""
        changed = super().replace(views, since=since)
        for name in changed:
            if (known := self.get(name)) is not None:
                self._views[name] = self._with_devices(known)
        self._changes.note(changed)
        return changed

    def set_devices(self, found: Mapping[str, Mapping[str, float]]) -> tuple[str, ...]:
        """Replace the devices of all nodes; return the nodes whose devices changed.

        Args:
            found: by node, the number of devices of each kind by resource, as a plugin counts them.
        """
        before, self._devices = self._devices, found
        names = tuple(name for name in {*before, *found} if before.get(name) != found.get(name) and name in self._views)
        for name in names:
            known = self._views[name]
            old = before.get(name, {})
            own = {resource: amount for resource, amount in known.allocatable.items() if resource not in old}
            self._views[name] = replace(known, allocatable={**own, **found.get(name, {})})
        self._changes.note(names)
        return names

    def offers(self, resource: str) -> bool:
        """Return whether the kubelet of some node counts this resource."""
        return any(
            resource in node.allocatable and resource not in self._devices.get(name, ())
            for name, node in self._views.items()
        )

    def _with_devices(self, view: NodeView) -> NodeView:
        devices = self._devices.get(view.name)
        return replace(view, allocatable={**view.allocatable, **devices}) if devices else view


class Store:
    """Jobs, their pods and plans, the nodes, and the requests of foreign pods on each node."""

    def __init__(self, defaults: WorkerDefaults | None = None) -> None:
        self.defaults = defaults or WorkerDefaults()
        """What the template of each job gets besides."""
        sequence = Sequence()
        self.jobs: ObjectTable[JobKey, JobView] = ObjectTable(lambda job: job.key, sequence)
        self.node_changes = NodeChanges()
        self.pods = PodKind(sequence, self.node_changes)
        self.nodes = NodeKind(sequence, self.node_changes)
        self.plans: ObjectTable[JobKey, PlanObject] = ObjectTable(lambda plan: plan.key, sequence)
        self._foreign_requests: Mapping[str, Mapping[str, float]] = {}
        self._foreign_devices: Mapping[str, Mapping[str, float]] = {}
        self._used: Mapping[str, Mapping[str, float]] = {}
        self._used_at = 0
        """Changes of nodes that are part of ``_used``."""

    @property
    def foreign_requests(self) -> Mapping[str, Mapping[str, float]]:
        """By node, the requests of foreign pods; from a slow list, because the watch delivers workers only."""
        return self._foreign_requests

    @foreign_requests.setter
    def foreign_requests(self, found: Mapping[str, Mapping[str, float]]) -> None:
        before, self._foreign_requests = self._foreign_requests, found
        self.node_changes.note(node for node in {*before, *found} if before.get(node) != found.get(node))

    @property
    def foreign_devices(self) -> Mapping[str, Mapping[str, float]]:
        """By node, the devices that foreign pods hold beyond their requests."""
        return self._foreign_devices

    @foreign_devices.setter
    def foreign_devices(self, found: Mapping[str, Mapping[str, float]]) -> None:
        before, self._foreign_devices = self._foreign_devices, found
        self.node_changes.note(node for node in {*before, *found} if before.get(node) != found.get(node))

    def controls_plan(self, plan: PlanObject) -> bool:
        """Return whether a stored job controls this ConfigMap; no other plan is stored."""
        job = self.jobs.get(plan.key)
        return job is not None and job.uid == plan.owner_uid

    def newest_first(self) -> list[JobKey]:
        """Return all jobs, ordered by the last change of the job, its pods or its plan, newest first."""
        last = {key: max(self.jobs.changed(key), self.plans.changed(key)) for key in self.jobs.all()}
        for name, pod in self.pods.all().items():
            if pod.key in last:
                last[pod.key] = max(last[pod.key], self.pods.changed(name))
        return sorted(last, key=lambda key: -last[key])

    def unanswered(self) -> list[JobKey]:
        """Return jobs whose spec has changed since their status was written, and those with workers on ending nodes.

        No operator has answered them after a time without a leader, or without watch events. A new job is not among
        them: nothing trains yet. A node ends that is gone, not ready, or whose end is announced.
        """
        jobs, nodes = self.jobs.all(), self.nodes.all()
        changed = [key for key, job in jobs.items() if 0 < job.status.observed_generation < job.generation]
        placed = [pod for pod in self.pods.all().values() if pod.node and not pod.phase_ended]
        ending = {
            pod.key
            for pod in placed
            if (node := nodes.get(pod.node)) is None or node.announced or node.readiness is not NodeReadiness.TRUE
        }
        return list(dict.fromkeys([*changed, *sorted(ending & jobs.keys())]))

    def used(self) -> Mapping[str, Mapping[str, float]]:
        """Return by node the sum of the requests of all running pods; the result is never mutated."""
        changed = self.node_changes.since(self._used_at)
        if changed:
            parts = (self.pods.used, self._foreign_requests, self._foreign_devices)
            newer = {node: added(part.get(node, {}) for part in parts) for node in changed}
            self._used = {**self._used, **newer}
            self._used_at = self.node_changes.count
        return self._used


def _less_one(counts: Counter[JobKey], key: JobKey) -> None:
    """Lower a count by one, without a key for 0."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def _newer(new: str, old: str) -> bool:
    if new.isdecimal() and old.isdecimal():
        return int(new) > int(old)
    return new != old
