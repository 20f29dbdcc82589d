"""``heterotrain export``."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import click

from heterotrain_cli.errors import InputError


@click.command()
@click.argument("checkpoint")
@click.argument("out", metavar="OUT.safetensors", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--step", type=click.IntRange(0), help="Committed steps of the checkpoint  [default: the newest]")
@click.option("--overwrite", is_flag=True, help="Replace OUT.safetensors if it exists.")
def export(checkpoint: str, out: Path, *, step: int | None, overwrite: bool) -> None:
    """Write the weights in a checkpoint to a safetensors file, or to a file for torch.load (.pt, .pth).

    CHECKPOINT is the folder of a job's checkpoints, a path or a URI such as s3://bucket/digits/default-digits-UID.
    Tied weights are written once. Nothing in the checkpoint is executed. A damaged checkpoint is refused.

    \b
    Examples:
      heterotrain export checkpoints weights.safetensors
      heterotrain export s3://bucket/digits/default-digits-7c1e weights.safetensors --step 1200

    Exit status: 0 when the file is written; 2 for a checkpoint or an option that cannot be used.
    """  # noqa: D301  # click reads the character \b
    if out.exists() and not overwrite:
        raise InputError(f"{out} exists: choose another name, or add --overwrite")
    try:
        # By name, because the other commands and the type checks of the light environments do without PyTorch.
        trainer, errors = import_module("heterotrain.checkpoints.export"), import_module("heterotrain.errors")
    except ModuleNotFoundError as error:
        raise InputError(
            f"heterotrain export needs the package {error.name}: pip install 'heterotrain[cli,export]'"
        ) from error
    try:
        found = trainer.export_weights(checkpoint, out, step=step)
    except errors.UsageError as error:
        raise InputError(str(error)) from error
    left_out = f", {len(found.tied)} further names of tied weights are in its metadata" if found.tied else ""
    click.echo(
        f"{out}: step {found.step}, epoch {found.epoch}; {found.tensors} tensors, "
        f"{found.size_bytes / 1e6:.1f} MB{left_out}"
    )
