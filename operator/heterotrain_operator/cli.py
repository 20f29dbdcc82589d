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
from heterotrain_core.version import __version__

from heterotrain_operator.cluster_state.worker_defaults import worker_defaults
from heterotrain_operator.engine.app import App
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.handlers import register
from heterotrain_operator.kube.auth import load_configuration
from heterotrain_operator.kube.client import KubeClient, use_small_tls_buffers
from heterotrain_operator.kube.errors import KubeError
from heterotrain_operator.kube.lease import LeadershipLost
from heterotrain_operator.kube.resources import JOBS, LEASES, NODES
from heterotrain_operator.logs import set_up_logs
from heterotrain_operator.prom.client import PromClient
from heterotrain_operator.prom.errors import PromError
from heterotrain_operator.settings import (
    ENVIRONMENT_PREFIX,
    CommandLineOption,
    Settings,
    announcements,
    egress_rules,
    namespace_weights,
    namespaces,
    setting_options,
    settings_from,
)
from heterotrain_operator.threads import Threads

API_RETRY_S = 2.0
_Command = TypeVar("_Command", bound=Callable[..., Any])
log = structlog.get_logger()


@click.group(
    "heterotrain-operator",
    context_settings={"show_default": True, "help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="heterotrain-operator")
def main() -> None:
    """Operator for HeteroTrainJobs."""


def _option(name: str, **attributes: Any) -> Callable[[_Command], _Command]:
    variable = f"{ENVIRONMENT_PREFIX}_{name.upper().replace('-', '_')}"
    switch = f"--{name}/--no-{name}" if isinstance(attributes.get("default"), bool) else f"--{name}"
    return click.option(switch, envvar=variable, show_envvar=True, **attributes)


def _settings_options(*names: str) -> Callable[[_Command], _Command]:
    """Return a decorator that adds options for these settings, or for all of them without names."""

    def decorate(command: _Command) -> _Command:
        for option in reversed(list(setting_options())):
            if not names or option.name in names:
                command = _option(option.name, default=option.default, type=_click_type(option), help=option.help)(
                    command
                )
        return command

    return decorate


def _click_type(option: CommandLineOption) -> Any:
    if option.at_least is not None:
        range_of = click.IntRange if option.kind is int else click.FloatRange
        return range_of(option.at_least, option.at_most)
    return str if option.kind is Path else option.kind


@main.command()
@_settings_options()
@_option("log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"]), help="Least level.")
@_option("log-format", default="json", type=click.Choice(["json", "text"]), help="JSON lines, or text for a terminal.")
def run(**options: Any) -> None:
    """Run the operator until SIGTERM.

    Exits with 1 when a part of it fails, so that Kubernetes restarts it.
    """
    try:
        namespace_weights(options["namespace_weights"])
        announcements(options["node_announcements"])
        worker_defaults(options["worker_defaults"])
        egress_rules(options["egress"])
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    set_up_logs(options["log_level"], readable=options["log_format"] == "text")
    try:
        failures = asyncio.run(_run(settings_from(options)))
    except KubeError as error:
        raise click.ClickException(str(error)) from error
    for failure in failures:
        log.error("the operator ended", error=_message(failure), exc_info=failure if _is_bug(failure) else None)
    sys.exit(1 if failures else 0)


@main.command()
@_settings_options(
    "namespace", "lease-name", "watch-namespaces", "kubeconfig",
    "prometheus-url", "prometheus-timeout-seconds", "prometheus-auth-dir", "prometheus-ca-file",
)  # fmt: skip
@_option("metrics-url", default="", help="URL of the operator's own metrics.")
def check(**options: Any) -> None:
    """Check an installation: the API is served, an operator leads, and Prometheus answers."""
    logging.basicConfig(level="WARNING")
    problems = asyncio.run(_problems(options))
    for problem in problems:
        click.echo(f"✗ {problem}")
    if problems:
        sys.exit(1)
    click.echo("✓ the API is served, an operator leads, Prometheus answers")


async def _run(settings: Settings) -> list[BaseException]:
    use_small_tls_buffers()
    kube = KubeClient(await load_configuration(settings.kubeconfig))
    await _reachable(kube)
    source, threads = settings.prometheus, Threads.few()
    prom = None
    if source.url is not None:
        prom = PromClient(
            source.url, threads=threads, timeout_s=source.timeout_s, auth_dir=source.auth_dir, ca_file=source.ca_file
        )
    # kopf looks up the name of its user, which has none in a pod.
    os.environ.setdefault("USER", "heterotrain-operator")
    stop = asyncio.Event()
    registry = kopf.OperatorRegistry()
    failures = register(registry, App(kube, settings, prom, threads=threads, clocks=Clocks.by(kube.clock)), stop=stop)
    try:
        await kopf.operator(
            registry=registry,
            standalone=True,
            clusterwide=not settings.watched,
            namespaces=list(settings.watched),
            stop_flag=stop,
        )
    finally:
        await kube.close()
        if prom is not None:
            await prom.close()
    return failures


async def _reachable(kube: KubeClient) -> None:
    """Wait until the API server answers and grants read access: both may come moments after the operator's start."""
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
    problems = await _api_problems(options)
    if options["metrics_url"]:
        problems += await _metrics_problems(options["metrics_url"])
    if options["prometheus_url"]:
        problems += await _prometheus_problems(options)
    return problems


async def _api_problems(options: dict[str, Any]) -> list[str]:
    try:
        kube = KubeClient(await load_configuration(options["kubeconfig"] or None))
        try:
            for namespace in namespaces(options["watch_namespaces"]) or (None,):
                async for _ in kube.list(JOBS, namespace):
                    break
            lease = await kube.get(LEASES, options["namespace"], options["lease_name"])
            held = bool(lease["spec"].get("holderIdentity"))
        finally:
            await kube.close()
    except KubeError as error:
        return [f"the API server answers: {error}"]
    return [] if held else ["no operator holds the Lease: read the operator's log"]


async def _metrics_problems(url: str) -> list[str]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        try:
            async with session.get(url) as response:
                if "heterotrain_operator_leader" in await response.text():
                    return []
                return [f"{url} answers HTTP {response.status} without the metrics of an operator"]
        except (aiohttp.ClientError, TimeoutError) as error:
            return [f"{url} can't be reached: {error}"]


async def _prometheus_problems(options: dict[str, Any]) -> list[str]:
    """Return what keeps the operator from reading Prometheus, with its own client and credentials."""
    url, auth_dir, ca_file = (options[f"prometheus_{name}"] for name in ("url", "auth_dir", "ca_file"))
    if not url.startswith(("http://", "https://")):
        return [f"the URL of Prometheus, {url}, has no scheme: write http://{url} or https://{url}"]
    try:
        client = PromClient(
            url,
            threads=Threads.few(),
            timeout_s=options["prometheus_timeout_seconds"],
            auth_dir=Path(auth_dir) if auth_dir else None,
            ca_file=Path(ca_file) if ca_file else None,
        )
    except OSError as error:
        return [f"the certificate authority {ca_file} can't be read: {error}"]
    try:
        await client.query("vector(1)")
    except PromError as error:
        return [f"{url}: {error}"]
    finally:
        await client.close()
    return []


def _is_bug(failure: BaseException) -> bool:
    leaves = failure.exceptions if isinstance(failure, BaseExceptionGroup) else (failure,)
    return any(not isinstance(leaf, LeadershipLost | KubeError) for leaf in leaves)


def _message(failure: BaseException) -> str:
    leaves = failure.exceptions if isinstance(failure, BaseExceptionGroup) else (failure,)
    return "; ".join(str(leaf) or type(leaf).__name__ for leaf in leaves)


if __name__ == "__main__":
    main()
