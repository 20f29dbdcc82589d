"""``heterotrain suspend``, ``resume``, ``restart``, ``retry``, ``scale`` and ``delete``."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import click
from heterotrain_core.contract import keys

from heterotrain_cli.cluster.api import Cluster
from heterotrain_cli.cluster.names import complete_pools, job_argument
from heterotrain_cli.cluster.target import Target, target_options
from heterotrain_cli.cluster.view import view_of
from heterotrain_cli.errors import InputError

_OF_ENDED = {
    "suspend": "there is nothing to suspend",
    "resume": "there is nothing to resume",
    "restart": "`heterotrain retry` continues a failed job",
    "scale": "only a job that trains or waits can be scaled",
}
"""What holds of a job that has ended, by the change that was asked for."""


@click.command()
@job_argument()
@target_options
def suspend(*, name: str, **target: Any) -> None:
    """Stop a job and free its nodes. Checkpoints stay, and `heterotrain resume` continues from the newest one.

    \b
    Example:
      heterotrain suspend digits

    Exit status: 0 when the job is to be suspended, or has ended; 1 without an answer from the cluster; 2 for a
    refused change.
    """  # noqa: D301  # click reads the character \b
    cluster = Cluster(Target(**target))
    body = cluster.job(name)
    if ended := why_ended(body, name=name, change="suspend"):
        click.echo(ended)
        return
    without = not (body["spec"].get("checkpoint"))
    cluster.patch(name, {"spec": {"suspend": True}})
    lost = " (it has no spec.checkpoint, so it will start again from the beginning)" if without else ""
    click.echo(f"job {name} is being suspended{lost}")


@click.command()
@job_argument()
@target_options
def resume(*, name: str, **target: Any) -> None:
    """Continue a suspended job.

    \b
    Example:
      heterotrain resume digits

    Exit status: 0 when the job is to continue, or has ended; 1 without an answer from the cluster; 2 for a refused
    change.
    """  # noqa: D301  # click reads the character \b
    cluster = Cluster(Target(**target))
    if ended := why_ended(cluster.job(name), name=name, change="resume"):
        click.echo(ended)
        return
    cluster.patch(name, {"spec": {"suspend": False}})
    click.echo(f"job {name} continues")


@click.command()
@job_argument()
@target_options
def restart(*, name: str, **target: Any) -> None:
    """Renew all workers of a job, so that they get its present template.

    They are renewed one by one while the others train, or together from a last checkpoint where all must be equal.

    \b
    Example:
      heterotrain restart digits

    Exit status: 0 when the workers are to be renewed; 1 without an answer from the cluster; 2 for a job that has ended
    or is suspended, or a refused change.
    """  # noqa: D301  # click reads the character \b
    cluster = Cluster(Target(**target))
    body = cluster.job(name)
    if ended := why_ended(body, name=name, change="restart"):
        raise InputError(ended)
    if body["spec"].get("suspend"):
        raise InputError(f"job {name} is suspended: `heterotrain resume {name}` starts it with its present template")
    now = datetime.now(UTC).isoformat()
    cluster.patch(name, {"metadata": {"annotations": {keys.ANNOTATION_RESTART: now}}})
    click.echo(f"job {name}: its workers are being renewed; `heterotrain describe {name}` shows how far it is")


@click.command()
@job_argument()
@target_options
def retry(*, name: str, **target: Any) -> None:
    """Try a failed job again: it continues from its newest checkpoint, with its present spec.

    \b
    Example:
      heterotrain retry digits

    Exit status: 0 when the job is to be tried again; 1 without an answer from the cluster; 2 for a job that has not
    failed, or a refused change.
    """  # noqa: D301  # click reads the character \b
    cluster = Cluster(Target(**target))
    view = view_of(cluster.job(name))
    if view.status.state != "Failed":
        raise InputError(f"job {name} is {view.status.state or 'new'}: only a failed job can be tried again")
    now = datetime.now(UTC).isoformat()
    cluster.patch(name, {"metadata": {"annotations": {keys.ANNOTATION_RETRY: now}}})
    saved = view.status.last_checkpoint
    where = "from the beginning: it has no checkpoint" if saved is None else f"from step {saved.step}"
    click.echo(f"job {name} is tried again, {where}")


@click.command()
@job_argument()
@click.argument("replicas", type=click.IntRange(1), required=False, metavar="[N]")
@click.option(
    "--pool",
    "pools",
    multiple=True,
    metavar="POOL=N",
    shell_complete=complete_pools,
    help="Most workers in a pool; may be repeated.",
)
@target_options
def scale(*, name: str, replicas: int | None, pools: tuple[str, ...], **target: Any) -> None:
    """Change how many workers a running job may have: N over all pools, or N in single pools.

    \b
    Examples:
      heterotrain scale digits 8
      heterotrain scale digits --pool t4=0 --pool a100=2

    Exit status: 0 when the limits are changed; 1 without an answer from the cluster; 2 for a refused change.
    """  # noqa: D301  # click reads the character \b
    if replicas is None and not pools:
        raise click.UsageError("the number of workers is missing: give N, or --pool POOL=N")
    cluster = Cluster(Target(**target))
    cluster.change(name, lambda body: scaled(body, name=name, workers=replicas, pools=pools))
    parts = ([f"at most {replicas} workers"] if replicas is not None else []) + [
        f"at most {wanted.partition('=')[2]} in pool {wanted.partition('=')[0]}" for wanted in pools
    ]
    click.echo(f"job {name}: {', '.join(parts)}")


def scaled(body: Mapping[str, Any], *, name: str, workers: int | None, pools: tuple[str, ...]) -> dict[str, Any]:
    """Return the patch that limits the workers of a job: over all pools, and in single pools (``POOL=N``). Pure.

    Raises:
        InputError: the job has ended, has no such pool, or its pools cannot hold so many workers.
    """
    if ended := why_ended(body, name=name, change="scale"):
        raise InputError(ended)
    spec: dict[str, Any] = {}
    limits = with_limits(body["spec"]["workerPools"], pools)
    if workers is not None:
        room = {str(pool["name"]): int(pool["maxReplicas"]) for pool in limits}
        if workers > sum(room.values()):
            held = ", ".join(f"{pool} {most}" for pool, most in room.items())
            raise InputError(f"its pools hold at most {sum(room.values())} in all ({held}): scale a pool, too")
        spec["elasticPolicy"] = {"maxReplicas": workers}
    patch: dict[str, Any] = {"spec": spec}
    if pools:
        spec["workerPools"] = limits
        # A merge patch replaces the whole list: another writer's change in between must not be lost.
        patch["metadata"] = {"resourceVersion": body["metadata"]["resourceVersion"]}
    return patch


@click.command()
@job_argument()
@click.option("--yes", is_flag=True, help="Do not ask.")
@target_options
def delete(*, name: str, yes: bool, **target: Any) -> None:
    """Delete a job and its workers. Checkpoints in its store stay.

    \b
    Example:
      heterotrain delete digits --yes

    Exit status: 0 when the job is deleted; 1 without an answer from the cluster, or when the answer is no; 2 for a job
    that does not exist.
    """  # noqa: D301  # click reads the character \b
    cluster = Cluster(Target(**target))
    state = str((cluster.job(name).get("status") or {}).get("state") or "new")
    if not yes and not _confirmed(f"Delete job {name} in namespace {cluster.namespace} ({state})?"):
        click.echo(f"job {name} is kept", err=True)
        raise SystemExit(1)
    cluster.delete(name)
    click.echo(f"job {name} is deleted")


def _confirmed(question: str) -> bool:
    """Ask on standard error.

    Raises:
        InputError: there is nobody to answer.
    """
    try:
        return click.confirm(question, err=True)
    except click.Abort as error:
        click.echo(err=True)
        raise InputError("nobody answers: say --yes to delete without a question") from error


def why_ended(body: Mapping[str, Any], *, name: str, change: str) -> str:
    """Return in one sentence that a job has ended and cannot be changed; empty for other jobs.

    ``change``: ``suspend``, ``resume``, ``restart`` or ``scale``.
    """
    view = view_of(body)
    return f"job {name} has ended ({view.status.state}): {_OF_ENDED[change]}" if view.has_ended else ""


def with_limits(pools: list[Mapping[str, Any]], wanted: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the pools with other maximum numbers of workers.

    Args:
        pools: ``spec.workerPools``.
        wanted: ``POOL=N``, each.

    Raises:
        InputError: a pool is unknown, or the text is not of that form.
    """
    found: list[dict[str, Any]] = [copy.deepcopy(dict(pool)) for pool in pools]
    by_name = {str(pool["name"]): pool for pool in found}
    for text in wanted:
        name, equals, count = text.partition("=")
        if not equals or not count.isdecimal():
            raise InputError(f"--pool {text} is not of the form POOL=N, such as a100=2")
        if name not in by_name:
            raise InputError(f"the job has no pool {name}: its pools are {', '.join(by_name)}")
        by_name[name]["maxReplicas"] = int(count)
        by_name[name]["minReplicas"] = min(int(by_name[name].get("minReplicas") or 0), int(count))
    return found
