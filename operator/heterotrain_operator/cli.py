"""``heterotrain-operator``: run the operator, or check an installation."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import click
import kopf
import structlog

from heterotrain_operator.engine.app import App
from heterotrain_operator.handlers import register
from heterotrain_operator.kube.auth import load_configuration
from heterotrain_operator.kube.client import KubeClient
from heterotrain_operator.kube.errors import KubeError
from heterotrain_operator.kube.resources import JOBS, LEASES, NODES
from heterotrain_operator.logs import set_up_logs
from heterotrain_operator.prom.client import PromClient
from heterotrain_operator.settings import PrometheusSettings, Settings

PREFIX = "HETEROTRAIN_OPERATOR"
API_RETRY_S = 2.0
_Command = TypeVar("_Command", bound=Callable[..., Any])
log = structlog.get_logger()


@click.group(context_settings={"show_default": True})
def main() -> None:
    """Operator of HeteroTrainJobs."""


def _option(name: str, **kwargs: Any) -> Callable[[_Command], _Command]:
    variable = f"{PREFIX}_{name.partition('/')[0].upper().replace('-', '_')}"
    return click.option(f"--{name}", envvar=variable, show_envvar=True, **kwargs)


@main.command()
@_option("namespace", default="default", help="Where the operator runs; its Lease is there.")
@_option("identity", default="heterotrain-operator", help="Name of this replica in the Lease.")
@_option(
    "lease-name", default=Settings().lease_name, help="Lease that decides which replica acts: one for each release."
)
@_option("watch-namespace", default="", help="The only namespace to watch; empty for all.")
@_option("kubeconfig", default="", help="Kubeconfig to use outside a cluster; else KUBECONFIG or ~/.kube/config.")
@_option("workers", default=4, type=click.IntRange(1, 64), help="Jobs that are handled at the same time.")
@_option("relist-seconds", default=300.0, help="Seconds between two full lists.")
@_option("gather-seconds", default=5.0, help="Longest time that a ready worker waits for others that start.")
@_option("status-seconds", default=2.0, help="Least seconds between two status writes that only bring new numbers.")
@_option("health-port", default=8080, help="Port of the probes.")
@_option("metrics-port", default=9090, help="Port of the operator's own metrics.")
@_option("listen", default="0.0.0.0", help="Address to listen on.")  # noqa: S104  # probes and scrapes come from outside the pod
@_option("leader-election/--no-leader-election", default=True, help="Act only while holding the Lease.")
@_option("lease-seconds", default=10.0, help="Seconds after which a silent leader is replaced.")
@_option("prometheus-url", default="", help="Where telemetry is read; empty for even shares without telemetry.")
@_option("prometheus-poll-seconds", default=1.0, type=click.FloatRange(0.1), help="Seconds between two reads of a job.")
@_option("prometheus-auth-dir", default="", help="Folder with the file token, or the files username and password.")
@_option("prometheus-ca-file", default="", help="Certificate authority of a private Prometheus.")
@_option("log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"]))
@_option("log-format", default="json", type=click.Choice(["json", "text"]))
def run(**options: Any) -> None:
    """Run the operator until SIGTERM; exits with 1 when a part of it ended, so that it is started anew."""
    set_up_logs(options["log_level"], readable=options["log_format"] == "text")
    try:
        failures = asyncio.run(_run(_settings(options)))
    except KubeError as error:
        raise click.ClickException(str(error)) from error
    for failure in failures:
        log.error("the operator ended", error=_said(failure), exc_info=failure if _is_bug(failure) else None)
    sys.exit(1 if failures else 0)


@main.command()
@_option("namespace", default="default", help="Where the operator runs.")
@_option("lease-name", default=Settings().lease_name, help="The operator's Lease.")
@_option("watch-namespace", default="", help="The namespace that is watched; empty for all.")
@_option("kubeconfig", default="", help="Kubeconfig to use outside a cluster.")
@_option("prometheus-url", default="", help="Where telemetry is read.")
@_option("metrics-url", default="", help="The operator's own metrics.")
def check(**options: Any) -> None:
    """Check that the API is served, an operator leads, and Prometheus answers."""
    logging.basicConfig(level="WARNING")
    problems = asyncio.run(_problems(options))
    for problem in problems:
        click.echo(f"✗ {problem}")
    if problems:
        sys.exit(1)
    click.echo("✓ the API is served, an operator leads, Prometheus answers")


def _settings(options: dict[str, Any]) -> Settings:
    return Settings(
        namespace=options["namespace"],
        identity=options["identity"],
        watch_namespace=options["watch_namespace"] or None,
        kubeconfig=options["kubeconfig"] or None,
        workers=options["workers"],
        relist_s=options["relist_seconds"],
        gather_s=options["gather_seconds"],
        status_interval_s=options["status_seconds"],
        health_port=options["health_port"],
        metrics_port=options["metrics_port"],
        listen=options["listen"],
        leader_election=options["leader_election"],
        lease_name=options["lease_name"],
        lease_duration_s=options["lease_seconds"],
        prometheus=PrometheusSettings(
            url=options["prometheus_url"].rstrip("/") or None,
            poll_s=options["prometheus_poll_seconds"],
            auth_dir=Path(options["prometheus_auth_dir"]) if options["prometheus_auth_dir"] else None,
            ca_file=Path(options["prometheus_ca_file"]) if options["prometheus_ca_file"] else None,
        ),
    )


async def _run(settings: Settings) -> list[BaseException]:
    kube = KubeClient(await load_configuration(settings.kubeconfig))
    await _reachable(kube)
    wanted = settings.prometheus
    prom = None
    if wanted.url is not None:
        prom = PromClient(wanted.url, timeout_s=wanted.timeout_s, auth_dir=wanted.auth_dir, ca_file=wanted.ca_file)
    # kopf asks for its user's name, and the user of a pod has none.
    os.environ.setdefault("USER", "heterotrain-operator")
    stop = asyncio.Event()
    registry = kopf.OperatorRegistry()
    failures = register(registry, App(kube, settings, prom), stop=stop)
    try:
        await kopf.operator(
            registry=registry,
            standalone=True,
            clusterwide=settings.watch_namespace is None,
            namespaces=[settings.watch_namespace] if settings.watch_namespace else [],
            stop_flag=stop,
        )
    finally:
        await kube.close()
        if prom is not None:
            await prom.close()
    return failures


async def _reachable(kube: KubeClient) -> None:
    """Wait until the API server answers and lets us read: it may be starting, and our rights may come a moment later."""
    while True:
        try:
            async for _ in kube.list(NODES):
                break
        except KubeError as error:
            log.warning("waiting for the API server", error=str(error))
            await asyncio.sleep(API_RETRY_S)
        else:
            return


async def _problems(options: dict[str, Any]) -> list[str]:
    problems = []
    try:
        kube = KubeClient(await load_configuration(options["kubeconfig"] or None))
        try:
            async for _ in kube.list(JOBS, options["watch_namespace"] or None):
                break
            lease = await kube.get(LEASES, options["namespace"], options["lease_name"])
            if not lease["spec"].get("holderIdentity"):
                problems.append("no operator holds the Lease: look at the operator's log")
        finally:
            await kube.close()
    except KubeError as error:
        problems.append(f"the API server says: {error}")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        asked = ((options["metrics_url"], "heterotrain_operator_leader"), (options["prometheus_url"], "success"))
        for url, wanted in asked:
            if not url:
                continue
            full = url if wanted != "success" else f"{url.rstrip('/')}/api/v1/query?query=1"
            try:
                async with session.get(full) as response:
                    if wanted not in await response.text():
                        problems.append(f"{full} answers HTTP {response.status} without {wanted!r}")
            except (aiohttp.ClientError, TimeoutError) as error:
                problems.append(f"{full} can't be reached: {error}")
    return problems


def _is_bug(failure: BaseException) -> bool:
    from heterotrain_operator.kube.lease import LeadershipLost  # noqa: PLC0415  # only needed at the end

    leaves = failure.exceptions if isinstance(failure, BaseExceptionGroup) else (failure,)
    return any(not isinstance(leaf, LeadershipLost | KubeError) for leaf in leaves)


def _said(failure: BaseException) -> str:
    leaves = failure.exceptions if isinstance(failure, BaseExceptionGroup) else (failure,)
    return "; ".join(str(leaf) or type(leaf).__name__ for leaf in leaves)


if __name__ == "__main__":
    main()
