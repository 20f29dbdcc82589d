"""HTTP servers for the health probes and the operator's own metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest


def _answer(holds: Callable[[], bool], name: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(_: web.Request) -> web.Response:
        ok = holds()
        return web.Response(status=200 if ok else 503, text=f"{name}: {'yes' if ok else 'no'}\n")

    return handle


async def serve(
    *,
    listen: str,
    health_port: int,
    metrics_port: int,
    healthy: Callable[[], bool],
    ready: Callable[[], bool],
    registry: CollectorRegistry,
) -> list[web.AppRunner]:
    """Start both servers and return their runners, which the caller cleans up."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(registry), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    health = web.Application()
    health.router.add_get("/healthz", _answer(healthy, "healthy"))
    health.router.add_get("/readyz", _answer(ready, "ready"))
    exporter = web.Application()
    exporter.router.add_get("/metrics", metrics)
    runners = []
    for app, port in ((health, health_port), (exporter, metrics_port)):
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, listen, port).start()
        runners.append(runner)
    return runners
