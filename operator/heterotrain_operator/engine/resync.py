"""Fill the store from full lists: before the first decision, and regularly after it in case an event was missed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import structlog
from heterotrain_core.contract import keys

from heterotrain_operator.cluster_state.parse import (
    key_of,
    owner_key,
    parse_job,
    parse_node,
    parse_plan_object,
    parse_pod,
)
from heterotrain_operator.cluster_state.quantity import added, pod_requests
from heterotrain_operator.cluster_state.store import ObjectTable, Store
from heterotrain_operator.cluster_state.views import JobKey
from heterotrain_operator.engine.responsiveness import Turns
from heterotrain_operator.kube.resources import CONFIG_MAPS, JOBS, NODES, PODS, Resource
from heterotrain_operator.kube.verbs import Body, Kube

OWNED = f"{keys.LABEL_MANAGED_BY}={keys.MANAGED_BY}"
"""Selects the operator's objects."""
_FOREIGN = (f"{keys.LABEL_MANAGED_BY}!={keys.MANAGED_BY}", f"{OWNED},!{keys.LABEL_JOB}")
"""Select all pods that are no workers, also those that carry the operator's name without being of a job."""

_View = TypeVar("_View")
log = structlog.get_logger()
_RUNNING = "status.phase!=Succeeded,status.phase!=Failed"


async def relist(
    kube: Kube, store: Store, namespaces: Sequence[str] = (), *, announcements: Sequence[str] = ()
) -> set[JobKey]:
    """Replace the store's contents by full lists.

    Args:
        kube: the API server.
        store: what is replaced.
        namespaces: those to watch; empty for all.
        announcements: what announces a node's end, in addition to what is known.

    Returns:
        The jobs from before and after, so that deleted ones are noticed, too.

    Raises:
        KubeError: a list failed; kinds that were listed until then are replaced.
    """

    async def refill(
        kind: ObjectTable[Any, Any],
        key: Callable[[Body], Any],
        parse: Callable[[Body], Any],
        bodies: Callable[[], AsyncIterator[Body]],
        keep: Callable[[Any], bool] = lambda _: True,
    ) -> None:
        since, views, turns = kind.begin_list(), [], Turns()
        async for body in bodies():
            view = kind.get(key(body))
            # Nearly all objects are known: parsing them again would delay every job.
            if view is None or view.resource_version != body["metadata"]["resourceVersion"]:
                view = _parsed(parse, body)
            if view is not None and keep(view):
                views.append(view)
            await turns.give()
        kind.replace(views, since=since)

    async def of_all(resource: Resource, labels: str) -> AsyncIterator[Body]:
        for namespace in namespaces or (None,):
            async for body in kube.list(resource, namespace, labels=labels):
                yield body

    def of(resource: Resource, labels: str = "") -> Callable[[], AsyncIterator[Body]]:
        return lambda: of_all(resource, labels)

    async def refill_jobs_then_plans() -> None:
        await refill(store.jobs, key_of, partial(parse_job, defaults=store.defaults), of(JOBS))
        await refill(store.plans, owner_key, parse_plan_object, of(CONFIG_MAPS, OWNED), keep=store.controls_plan)

    before = set(store.jobs.all())
    # A new leader's first decision waits for these lists, so they are read at the same time.
    answers = await asyncio.gather(
        refill(store.nodes, _name, partial(parse_node, announcements=announcements), lambda: kube.list(NODES)),
        refill_jobs_then_plans(),
        refill(store.pods, key_of, parse_pod, of(PODS, OWNED)),
        return_exceptions=True,
    )
    for answer in answers:
        if answer is not None:
            raise answer
    return before | set(store.jobs.all())


async def list_foreign(kube: Kube, store: Store, namespaces: Sequence[str] = ()) -> None:
    """Sum the requests of foreign pods on each node: they use capacity, but the watch delivers only workers.

    Workers in namespaces that are not watched belong to another operator and count as foreign, too.

    Raises:
        KubeError: the list failed; the previous sums stay.
    """
    sums: dict[str, dict[str, float]] = {}
    turns = Turns()
    # An operator for all namespaces owns every worker, so the API server can leave out these many pods.
    for selector in ("",) if namespaces else _FOREIGN:
        async for body in kube.list(PODS, labels=selector, fields=_RUNNING):
            node, metadata = body["spec"].get("nodeName"), body["metadata"]
            owned = (metadata.get("labels") or {}).get(keys.LABEL_MANAGED_BY) == keys.MANAGED_BY and owner_key(body)
            if node and not (owned and (not namespaces or metadata["namespace"] in namespaces)):
                sums[node] = added([sums.get(node, {}), pod_requests(body["spec"])])
            await turns.give()
    store.foreign_requests = sums


def _name(body: Body) -> str:
    name: str = body["metadata"]["name"]
    return name


def _parsed(parse: Callable[[Body], _View | None], body: Body) -> _View | None:
    """Return an object's view; ``None`` for an unreadable object, which must not stop all others."""
    try:
        return parse(body)
    except Exception:
        metadata = body["metadata"]
        log.exception("object can't be read", name=metadata["name"], namespace=metadata.get("namespace", ""))
        return None
