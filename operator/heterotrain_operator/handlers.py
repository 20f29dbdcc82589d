"""All kopf handlers. They only pass events on: the ``engine`` decides and acts.

Only ``on.event`` is used: it puts no annotation or finalizer on any object, so nothing hangs without the operator.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import kopf
import structlog
from heterotrain_core.contract import keys

from heterotrain_operator.engine.app import App
from heterotrain_operator.engine.serve import Certificate, serve
from heterotrain_operator.kube.auth import load_configuration

PAGE_SIZE = 100
"""Objects of one answer when a watch begins, as in ``kube.client``."""
log = structlog.get_logger()


def register(registry: kopf.OperatorRegistry, app: App, *, stop: asyncio.Event) -> list[BaseException]:
    """Register an operator with kopf, and set ``stop`` when it ends; return a list for the error that ends it."""
    failures: list[BaseException] = []
    running: list[asyncio.Task[None]] = []
    servers: list[Any] = []

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            failures.append(error)
        stop.set()

    @kopf.on.login(registry=registry)
    async def authenticate(**_: Any) -> kopf.ConnectionInfo:
        return await login(app.settings.kubeconfig)

    @kopf.on.startup(registry=registry)
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings)
        servers.extend(
            await serve(
                listen=app.settings.listen,
                health_port=app.settings.health_port,
                metrics_port=app.settings.metrics_port,
                healthy=lambda: app.healthy,
                ready=lambda: app.synced,
                registry=app.metrics.registry,
                threads=app.threads,
                allows=app.metrics_access.allows if app.settings.metrics_auth else None,
                certificate=Certificate(app.settings.metrics_tls_dir) if app.settings.metrics_tls_dir else None,
            )
        )
        # kopf looks up the resources once, after this handler, and ends when the definition is deleted later.
        await app.wait_until_served()
        task = asyncio.create_task(app.run(), name="app")
        task.add_done_callback(ended)
        running.append(task)

    @kopf.on.cleanup(registry=registry)
    async def finish(**_: Any) -> None:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for server in servers:
            await server.cleanup()

    _follow(registry, app)
    return failures


def _follow(registry: kopf.OperatorRegistry, app: App) -> None:
    """Pass the events of all watched objects on."""
    for kind, resource, stored in (
        ("jobs", (keys.GROUP, keys.VERSION, keys.PLURAL), app.events.job),
        ("pods", ("v1", "pods"), app.events.pod),
        ("plans", ("v1", "configmaps"), app.events.plan),
        ("nodes", ("v1", "nodes"), app.events.node),
    ):
        kopf.on.event(*resource, registry=registry, id=kind)(_noted(app, kind, stored))


def _noted(app: App, kind: str, stored: Callable[..., None]) -> Callable[..., Any]:
    async def on_event(event: kopf.RawEvent, **_: Any) -> None:
        metadata = event["object"]["metadata"]
        # Each watched namespace has a stream of its own, which begins with a list of its own.
        stream = f"{kind} of {metadata['namespace']}" if app.settings.watched and "namespace" in metadata else kind
        app.gaps.note(stream, event["type"], metadata["uid"])
        stored(event["object"], deleted=event["type"] == "DELETED")

    return on_event


class _NoDiffBase(kopf.DiffBaseStorage):
    """Stores nothing: no handler needs diffs, so kopf need not copy the object of every event."""

    def build(self, **_: Any) -> Any:
        return None

    def fetch(self, **_: Any) -> Any:
        return None

    def store(self, **_: Any) -> None:
        pass


def configure(settings: kopf.OperatorSettings) -> None:
    """Configure kopf for clusters with many pods."""
    owned = f"{keys.LABEL_MANAGED_BY}={keys.MANAGED_BY}"
    settings.watching.label_selectors["v1", "pods"] = owned
    settings.watching.label_selectors["v1", "configmaps"] = owned
    settings.watching.chunk_size = PAGE_SIZE
    settings.queueing.idle_timeout = 0.2  # kopf keeps one task per object this long after its last event
    settings.peering.standalone = True  # a Lease elects the leader
    settings.scanning.disabled = True  # needs no rights on namespaces and CRDs
    settings.posting.enabled = False  # the operator publishes its own Events
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = (1, 1, 2, 3, 5, 8, *[10] * 10_000)  # outlasts any outage of the API server
    settings.persistence.finalizer = f"{keys.GROUP}/never-used"
    settings.persistence.diffbase_storage = _NoDiffBase()


async def login(kubeconfig: str | None) -> kopf.ConnectionInfo:
    """Return kopf's connection to the API server, with the credentials of the operator's own client.

    Kopf calls this again after a denial, so rotated tokens are read.

    Raises:
        KubeError: there is neither a service account nor a kubeconfig.
    """
    configuration = await load_configuration(kubeconfig)
    found = configuration.get_api_key_with_prefix("BearerToken")
    token = await found if inspect.isawaitable(found) else found
    scheme, _, bare = (token or "").rpartition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        scheme=scheme or None,
        token=bare or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )
