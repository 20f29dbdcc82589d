"""``heterotrain forecast``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from rich.console import Console

from heterotrain_cli.cluster.target import target_options
from heterotrain_cli.documents import STANDARD_INPUT, read_document, schema_option
from heterotrain_cli.forecast.batch import as_document, forecast_batch
from heterotrain_cli.forecast.tables import show_batch
from heterotrain_cli.output import TABLE, output_option, print_document
from heterotrain_cli.profile import Profile

MAX_BATCH = 10_000_000
"""As in the API."""


@click.command()
@click.argument("job", required=False, metavar="[JOB.YAML|JOB]")
@click.option("--profile", "profile_path", metavar="FILE", help="File with speeds, YAML or JSON; - is standard input.")
@click.option("--model", "model_path", metavar="FILE", help="Model in units and devices to divide it over.")
@click.option(
    "--mode",
    type=click.Choice(["auto", "data", "sharded", "across-workers", "pipeline"]),
    default="auto",
    show_default=True,
    help="With --model: layouts that members may have.",
)
@click.option("--cluster", is_flag=True, help="Take the speeds that the running job has learned.")
@target_options
@click.option("--batch", type=click.IntRange(1, MAX_BATCH), help="Global batch in samples  [default: the job's]")
@click.option("--samples-per-epoch", type=click.IntRange(1), help="Size of the data set, for the cost of an epoch.")
@output_option
@schema_option(Profile)
def forecast(
    *,
    job: str | None,
    profile_path: str | None,
    model_path: str | None,
    mode: str,
    cluster: bool,
    batch: int | None,
    samples_per_epoch: int | None,
    output: str,
    **target: str | None,
) -> None:
    """Predict step time, throughput, cost and shares.

    With JOB.YAML, the forecast covers the pools of that job; with --profile alone, its members; with --model, the best
    division of a model over devices that may be too small to hold it.

    \b
    Examples:
      heterotrain forecast --profile gpus.yaml --batch 512
      heterotrain forecast job.yaml --profile pools.yaml
      heterotrain forecast job.yaml --cluster
      heterotrain forecast digits --cluster --batch 1024
      heterotrain forecast --model gpt.yaml --batch 256

    Exit status: 0 with an answer, also for an impossible batch; 1 without an answer from the cluster; 2 for a wrong
    file or option.
    """  # noqa: D301  # click reads the character \b
    if model_path is not None:
        if job is not None or profile_path is not None or cluster or samples_per_epoch is not None:
            raise click.UsageError("--model stands alone, with --batch and --mode: remove the other options")
        _of_model(model_path, batch=batch, mode=mode, output=output)
        return
    if mode != "auto":
        raise click.UsageError("--mode needs --model FILE")
    if job is not None:
        found = _of_job(job, profile_path, cluster=cluster, target=target, batch=batch, epoch=samples_per_epoch)
        if output != TABLE:
            print_document(found.document, output)
        else:
            found.show(Console())
        return
    given = _given(target)
    if cluster or given or samples_per_epoch is not None:
        raise click.UsageError(
            f"--cluster, {given or '--namespace'} and --samples-per-epoch need a job: add its JOB.YAML"
        )
    if profile_path is None:
        raise click.UsageError("nothing to forecast: give a JOB.YAML, or --profile FILE and --batch N")
    if batch is None:
        raise click.UsageError("the global batch is missing: add --batch N")
    profile = read_document(profile_path, Profile)
    single = forecast_batch(profile, batch)
    if output != TABLE:
        print_document(as_document(profile, batch, single), output)
    else:
        show_batch(Console(), profile, batch, single)


def _given(target: Mapping[str, str | None]) -> str:
    """Return the first option of a cluster that was given; empty for none."""
    return next((f"--{name}" for name, value in target.items() if value is not None), "")


def _of_model(path: str, *, batch: int | None, mode: str, output: str) -> None:
    from heterotrain_cli.layouts.forecast import as_document as as_layouts  # noqa: PLC0415  # loads slowly
    from heterotrain_cli.layouts.forecast import forecast_layout  # noqa: PLC0415  # loads slowly
    from heterotrain_cli.layouts.model_file import ModelFile  # noqa: PLC0415  # loads slowly
    from heterotrain_cli.layouts.tables import show_layout  # noqa: PLC0415  # loads slowly

    if batch is None:
        raise click.UsageError("the global batch is missing: add --batch N")
    found = forecast_layout(read_document(path, ModelFile).problem(batch), mode=mode)
    if output != TABLE:
        print_document(as_layouts(found), output)
    else:
        show_layout(Console(), found)


def _of_job(
    path: str,
    profile_path: str | None,
    *,
    cluster: bool,
    target: Mapping[str, str | None],
    batch: int | None,
    epoch: int | None,
) -> Any:
    # The operator's package takes time to load, and a bare profile does not need it.
    from heterotrain_cli.cluster.target import Target  # noqa: PLC0415  # loads slowly
    from heterotrain_cli.forecast.report import JobReport, report_from_cluster, report_from_profile  # noqa: PLC0415  # loads slowly

    if cluster and profile_path is not None:
        raise click.UsageError("--profile and --cluster both give speeds: remove one of them")
    if (given := _given(target)) and not cluster:
        raise click.UsageError(f"{given} belongs to --cluster: a profile is not from a cluster")
    if not cluster and profile_path is None:
        raise click.UsageError("no source of speeds: give either --profile FILE or --cluster")
    if path == profile_path == STANDARD_INPUT:
        raise click.UsageError("only one of job and profile can be standard input: name a file for the other one")
    found: JobReport
    if profile_path is not None:
        found = report_from_profile(path, profile_path, batch=batch, samples_per_epoch=epoch)
    else:
        found = report_from_cluster(path, target=Target(**target), batch=batch, samples_per_epoch=epoch)
    return found
