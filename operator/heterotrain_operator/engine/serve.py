"""HTTP servers for the health probes and the operator's own metrics."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from heterotrain_operator.threads import Threads

METRICS_PATH = "/metrics"
_BEARER = "Bearer "
_Handler = Callable[[web.Request], Awaitable[web.Response]]


def _answer(holds: Callable[[], bool], name: str) -> _Handler:
    async def handle(_: web.Request) -> web.Response:
        ok = holds()
        return web.Response(status=200 if ok else 503, text=f"{name}: {'yes' if ok else 'no'}\n")

    return handle


class Certificate:
    """The certificate of the metrics, from a mounted Secret; a renewed one serves the next connection."""

    def __init__(self, folder: Path) -> None:
        """Load ``tls.crt`` and ``tls.key``.

        Raises:
            OSError: a file is missing or is no certificate or key.
        """
        self._files = folder / "tls.crt", folder / "tls.key"
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._loaded = self._changed()
        self.context.load_cert_chain(*self._files)

    def renew(self) -> None:
        """Load the files again where they have changed; keep the present ones while they cannot be read."""
        try:
            changed = self._changed()
            if changed != self._loaded:
                self.context.load_cert_chain(*self._files)
                self._loaded = changed
        except OSError:  # ssl's errors are among them: the two files are replaced one after the other
            return

    def _changed(self) -> tuple[int, ...]:
        return tuple(file.stat().st_mtime_ns for file in self._files)


def _metrics(
    registry: CollectorRegistry,
    threads: Threads,
    allows: Callable[[str], Awaitable[bool]] | None,
    certificate: Certificate | None,
) -> _Handler:
    async def handle(request: web.Request) -> web.Response:
        if certificate is not None:
            certificate.renew()
        if allows is not None:
            given = request.headers.get("Authorization", "")
            if not given.startswith(_BEARER):
                return web.Response(
                    status=401, headers={"WWW-Authenticate": "Bearer"}, text="a bearer token is needed\n"
                )
            if not await allows(given.removeprefix(_BEARER).strip()):
                return web.Response(status=403, text="this token may not get /metrics\n")
        # For a thousand jobs, the text takes a tenth of a second.
        return web.Response(
            body=await threads.run(generate_latest, registry),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    return handle


async def serve(
    *,
    listen: str,
    health_port: int,
    metrics_port: int,
    healthy: Callable[[], bool],
    ready: Callable[[], bool],
    registry: CollectorRegistry,
    threads: Threads,
    allows: Callable[[str], Awaitable[bool]] | None = None,
    certificate: Certificate | None = None,
) -> list[web.AppRunner]:
    """Start both servers and return their runners, which the caller cleans up.

    Args:
        listen: address to listen on; empty for all addresses.
        health_port: port of the probes.
        metrics_port: port of the metrics.
        healthy: whether the process works.
        ready: whether it has read the cluster.
        registry: the metrics.
        threads: write the metrics' text.
        allows: whether a bearer token may read the metrics; ``None`` lets all clients read them.
        certificate: for TLS; ``None`` serves metrics without.
    """
    health = web.Application()
    health.router.add_get("/healthz", _answer(healthy, "healthy"))
    health.router.add_get("/readyz", _answer(ready, "ready"))
    exporter = web.Application()
    exporter.router.add_get(METRICS_PATH, _metrics(registry, threads, allows, certificate))
    runners = []
    tls = certificate.context if certificate is not None else None
    for app, port, context in ((health, health_port, None), (exporter, metrics_port, tls)):
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, listen or None, port, ssl_context=context).start()
        runners.append(runner)
    return runners
