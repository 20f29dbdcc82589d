"""``heterotrain checkpoint``: asks a running job for a checkpoint and waits until it is durable.

The request is an annotation of the job. The operator passes it on in the plan, and the ranks write at the next step
boundary. It is taken back in the end, so that plans stay as they were.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any, Final

import click
from heterotrain_core.contract import keys
from heterotrain_operator.api.conditions import ConditionType
from heterotrain_operator.api.status import CheckpointStatus

from heterotrain_cli.cluster.api import Cluster
from heterotrain_cli.cluster.names import job_argument
from heterotrain_cli.cluster.target import Target, target_options
from heterotrain_cli.cluster.view import view_of
from heterotrain_cli.errors import InputError, UnavailableError

TIMEOUT_S: Final = 300.0
LOOK_S: Final = 1.0
TRAINING_STATES: Final = ("Running", "Degraded", "Resizing")


@click.command()
@job_argument()
@click.option(
    "--timeout", type=click.FloatRange(0), default=TIMEOUT_S, show_default=True, metavar="SECONDS",
    help="Stop waiting after this time.",
)  # fmt: skip
@target_options
def checkpoint(*, name: str, timeout: float, **target: Any) -> None:
    """Write a checkpoint of a running job now, and wait until it is complete.

    \b
    Example:
      heterotrain checkpoint digits --timeout 60

    Exit status: 0 when there is a new checkpoint; 1 without an answer from the cluster, or after --timeout; 2 for a job
    that writes none.
    """  # noqa: D301  # click reads the character \b
    saved = take(Cluster(Target(**target)), name, timeout_s=timeout)
    click.echo(f"job {name}: the checkpoint of step {saved.step} is complete")


def take(cluster: Cluster, name: str, *, timeout_s: float = TIMEOUT_S) -> CheckpointStatus:
    """Ask a running job for a checkpoint, and return it when the job's status reports it.

    Args:
        cluster: where the job is.
        name: of the job.
        timeout_s: longest wait in seconds.

    Raises:
        InputError: the job keeps no checkpoints, or does not train now.
        UnavailableError: the cluster does not answer, or the time has passed.
    """
    view = view_of(cluster.job(name))
    if not view.body["spec"].get("checkpoint"):
        raise InputError(f"job {name} keeps no checkpoints: set spec.checkpoint.uri")
    if (state := view.status.state or "new") not in TRAINING_STATES:
        raise InputError(f"job {name} is {state}: only a job that trains can write a checkpoint")
    before = view.status.last_checkpoint
    _annotate(cluster, name, datetime.now(UTC).isoformat())
    end_s = time.monotonic() + timeout_s
    try:
        while time.monotonic() < end_s:
            time.sleep(LOOK_S)
            view = view_of(cluster.job(name))
            saved = view.status.last_checkpoint
            if saved is not None and saved != before:
                return saved
            if view.has_ended or view.status.state == "Suspended":
                raise UnavailableError(f"job {name} is {view.status.state} now: there is no other checkpoint")
    finally:
        _annotate(cluster, name, None)
    health = view.condition(ConditionType.CHECKPOINT_HEALTHY)
    why = f" ({health.message})" if health is not None and health.status == "False" and health.message else ""
    raise UnavailableError(
        f"job {name} reports no new checkpoint after {timeout_s:g} s{why}: look at its logs; an image or operator of "
        "an older version does not know the request"
    )


def _annotate(cluster: Cluster, name: str, value: str | None) -> None:
    cluster.patch(name, {"metadata": {"annotations": {keys.ANNOTATION_CHECKPOINT: value}}})
