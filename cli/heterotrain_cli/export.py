"""``heterotrain export``."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import click

from heterotrain_cli.errors import InputError

PROGRAMS: Final = (".pt2", ".onnx")
WEIGHTS: Final = (".safetensors", ".pt", ".pth")


@click.command()
@click.argument("checkpoint")
@click.argument("out", metavar="OUT", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--step", type=click.IntRange(0), help="Committed steps of the checkpoint  [default: the newest]")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@click.option("--model", metavar="SCRIPT.PY:FUNCTION", help="For .pt2 and .onnx: the function that builds the model.")
@click.option("--arguments", metavar="JSON", default="{}", show_default=True, help="Its arguments, by name.")
@click.option("--input", "inputs", multiple=True, metavar="TYPE[SHAPE]",
              help="For .pt2 and .onnx: an example input, such as float32[2,1,16,16]; may be repeated.")  # fmt: skip
def export(
    checkpoint: str, out: Path, *, step: int | None, overwrite: bool, model: str | None, arguments: str,
    inputs: tuple[str, ...],
) -> None:  # fmt: skip
    """Write the model of a checkpoint for other programs, by the name of OUT.

    .safetensors and .pt (.pth) hold the weights. .pt2 (torch.export) and .onnx hold the whole model, which runs without
    the script. For these, your script is imported to build the model, and the result is compared with it.

    CHECKPOINT is the folder of a job's checkpoints, a path or a URI such as s3://bucket/digits/default-digits-UID.
    Tied weights are written once. Nothing in the checkpoint is executed. A damaged checkpoint is refused.

    \b
    Examples:
      heterotrain export checkpoints weights.safetensors
      heterotrain export s3://bucket/digits/default-digits-7c1e weights.safetensors --step 1200
      heterotrain export checkpoints digits.onnx --model train.py:network --arguments '{"width": 44}' \\
        --input 'float32[2,1,16,16]'

    Exit status: 0 when the file is written; 2 for a checkpoint or an option that cannot be used.
    """  # noqa: D301  # click reads the character \b
    _check_writable(out, overwrite=overwrite)
    is_program = out.suffix in PROGRAMS
    if is_program != bool(model and inputs):
        both = "--model and --input" if is_program else "neither --model nor --input"
        raise InputError(f"{out} needs {both}: only .pt2 and .onnx hold the model itself")
    try:
        # By name, because the other commands and the type checks of the light environments do without PyTorch.
        trainer, errors = import_module("heterotrain.checkpoints.export"), import_module("heterotrain.errors")
    except ModuleNotFoundError as error:
        raise InputError(
            f"heterotrain export needs the package {error.name}: pip install 'heterotrain[cli,export]'"
        ) from error
    try:
        if is_program:
            weights = trainer.read_weights(checkpoint, step=step)
            difference = _program(weights, out, model or "", arguments, inputs)
            click.echo(
                f"{out}: step {weights.step}, epoch {weights.epoch}. Its outputs differ from the script's model by at "
                f"most {difference:.1e} of the largest one."
            )
        else:
            found = trainer.export_weights(checkpoint, out, step=step)
            left_out = f", {len(found.tied)} further names of tied weights are in its metadata" if found.tied else ""
            click.echo(
                f"{out}: step {found.step}, epoch {found.epoch}; {found.tensors} tensors, "
                f"{found.size_bytes / 1e6:.1f} MB{left_out}"
            )
    except errors.UsageError as error:
        raise InputError(str(error)) from error


def _check_writable(out: Path, *, overwrite: bool) -> None:
    """Check that the file can be written.

    Raises:
        InputError: it exists, its folder does not, or it has an unknown format.
    """
    if out.exists() and not overwrite:
        raise InputError(f"{out} exists: choose another name, or add --overwrite")
    if out.suffix not in (*WEIGHTS, *PROGRAMS):
        raise InputError(f"{out} has no known format: end it with one of {', '.join((*WEIGHTS, *PROGRAMS))}")
    if not out.parent.is_dir():
        raise InputError(f"{out} cannot be written: there is no folder {out.parent}")


def _program(weights: Any, out: Path, model: str, arguments: str, inputs: tuple[str, ...]) -> float:
    programs = import_module("heterotrain.checkpoints.export_program")
    script, _, function = model.rpartition(":")
    try:
        values = json.loads(arguments)
    except ValueError:
        values = None
    if not script or not Path(script).is_file() or not function.isidentifier():
        raise InputError(f"--model {model} is not a script and its function, such as train.py:network")
    if not isinstance(values, dict):
        raise InputError(f"--arguments {arguments} is not a JSON object, such as '{{\"width\": 44}}'")
    examples = programs.read_inputs(inputs)
    built = programs.build(Path(script), function, values, weights)
    return float(programs.export_program(built, examples, out))
