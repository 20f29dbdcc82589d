"""Names of jobs, pools and workers for a shell's completion, from the API server; none where it does not answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import click
from click.shell_completion import CompletionItem

from heterotrain_cli.cluster.api import Cluster
from heterotrain_cli.cluster.target import Target

LIMIT_S: Final = 2.0
"""Longest wait for an answer: a shell does not react meanwhile."""
_F = TypeVar("_F", bound=Callable[..., Any])
Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def job_argument(**more: Any) -> Callable[[_F], _F]:
    """Return the argument NAME of a command on one job, which a shell can complete."""
    return click.argument("name", shell_complete=complete_jobs, **more)


def _silently(names: Callable[[Cluster, click.Context], Iterable[CompletionItem]]) -> Complete:
    """Return the callback that completes by these names, and by none of them where anything is wrong."""

    def complete(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        target = {key: context.params.get(key) for key in ("namespace", "context", "kubeconfig")}
        try:
            cluster = Cluster(Target(**target), timeout_s=LIMIT_S, read_tries=1)
            return [each for each in names(cluster, context) if str(each.value).startswith(incomplete)]
        except Exception:  # noqa: BLE001  # no message may get between a user and the prompt
            return []

    return complete


def _job(context: click.Context) -> str:
    """Return the job that the command line names.

    Raises:
        LookupError: it names none yet.
    """
    # Click assigns no arguments while an option has no value, which is the one that is completed.
    return str(context.params.get("name") or context.args[0])


def _jobs(cluster: Cluster, _context: click.Context) -> Iterable[CompletionItem]:
    for body in cluster.jobs():
        state = str((body.get("status") or {}).get("state") or "New")
        yield CompletionItem(str(body["metadata"]["name"]), help=state)


def _pools(cluster: Cluster, context: click.Context) -> Iterable[CompletionItem]:
    for pool in cluster.job(_job(context))["spec"]["workerPools"]:
        most = pool.get("maxReplicas", 1)
        yield CompletionItem(f"{pool['name']}={most}", help=f"at most {most} workers now")


def _workers(cluster: Cluster, context: click.Context) -> Iterable[CompletionItem]:
    for pod in cluster.pods(_job(context)):
        yield CompletionItem(str(pod["metadata"]["name"]), help=str((pod.get("status") or {}).get("phase") or ""))


complete_jobs: Final = _silently(_jobs)
complete_pools: Final = _silently(_pools)
complete_workers: Final = _silently(_workers)
