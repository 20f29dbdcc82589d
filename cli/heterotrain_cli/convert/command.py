"""``heterotrain init``."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click
import yaml
from heterotrain_operator.api.admission import read_new_job
from heterotrain_operator.api.reading import SpecError
from heterotrain_operator.api.text import quoted
from heterotrain_operator.api.types import MAX_BATCH

from heterotrain_cli.convert.draft import CONTAINER, GPU, Draft, DraftPool, PoolPod, plain_name
from heterotrain_cli.convert.launching import RUN
from heterotrain_cli.convert.sources import draft_of
from heterotrain_cli.documents import parse_documents, place, read_text
from heterotrain_cli.errors import InputError

NAME: Final = "digits"
_IN_WHEEL: Final = Path(__file__).parents[1] / "examples" / NAME
_IN_CLONE: Final = Path(__file__).parents[3] / "deploy/examples" / NAME


@click.command()
@click.argument("script", required=False, metavar="[SCRIPT.PY]")
@click.option("--from", "source", metavar="FILE", help="PyTorchJob, TrainJob, MPIJob, RayJob or SkyPilot task.")
@click.option("--example", "with_example", is_flag=True, help="Write a script and its job into the folder digits.")
@click.option("--name", metavar="NAME", help="Name of the job  [default: that of the source]")
@click.option("--image", metavar="IMAGE", help="Image of the workers.")
@click.option("--pool", "pools", multiple=True, metavar="POOL=N", help="With SCRIPT.PY: most workers in a pool.")
@click.option("--gpus", type=click.IntRange(0, 16), default=1, show_default=True,
              help="With SCRIPT.PY: GPUs of each worker.")  # fmt: skip
@click.option("--batch", type=click.IntRange(1), help="Global batch of a script that uses heterotrain  [default: an "
              "unchanged script for torchrun]")  # fmt: skip
@click.option("--epochs", type=click.IntRange(1), help="With --batch: passes over the data set.")
@click.option("--steps", type=click.IntRange(1), help="With --batch: steps of the training, in place of epochs.")
def init(
    *,
    script: str | None,
    source: str | None,
    with_example: bool,
    name: str | None,
    image: str | None,
    pools: tuple[str, ...],
    gpus: int,
    batch: int | None,
    epochs: int | None,
    steps: int | None,
) -> None:
    """Write a job for a script, or for the manifest of another project. The job goes to standard output.

    Notes about parts that could not be taken over go to standard error. For a script, image, pools, and batch with
    epochs are asked for where image or pools are not given.

    \b
    Examples:
      heterotrain init --from pytorchjob.yaml > job.yaml
      heterotrain init --from task.yaml --batch 512 --epochs 20 > job.yaml
      heterotrain init train.py --image my/training --pool a100=2 --pool t4=6 > job.yaml
      heterotrain init --example

    Exit status: 0 with a job; 2 for a file that cannot be converted.
    """  # noqa: D301  # click reads the character \b
    if [script is not None, source is not None, with_example].count(True) != 1:
        raise click.UsageError("give either a SCRIPT.PY, --from FILE or --example")
    if with_example:
        click.echo(write_example(Path()))
        return
    if batch is None and (epochs is not None or steps is not None):
        given = "--epochs" if steps is None else "--steps"
        raise click.UsageError(f"{given} needs --batch: without it, the script counts them itself")
    if source is not None:
        if pools:
            raise click.UsageError("--pool belongs to a SCRIPT.PY: the pools come from the file")
        draft = _from_file(source)
    else:
        draft = _from_script(str(script), image, pools, gpus)
        if batch is None and (image is None or not pools):
            batch, epochs = _batch_and_epochs()
    if name is not None:
        draft.name = name
    if image is not None:
        for each in draft.pools:
            each.pod.main["image"] = image
    body = draft.body(batch=batch, epochs=epochs, steps=steps)
    try:
        read_new_job(body)
    except SpecError as error:
        raise InputError(f"the source gives a job with a mistake: {error}") from error
    if batch is not None and not _uses_heterotrain(script):
        draft.notes.append("the script has to use heterotrain: docs/other-libraries.md")
    for note in dict.fromkeys(draft.notes):
        click.echo(f"note: {note}", err=True)
    click.echo(yaml.dump(body, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110), nl=False)


def _uses_heterotrain(script: str | None) -> bool:
    """Return whether a script that is here imports the library; one that is only in the image is not known."""
    try:
        return script is not None and "heterotrain" in Path(script).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


class _Dumper(yaml.SafeDumper):
    """Puts text that looks like a number in quotes: PyYAML writes 1e-4 without, which kubectl reads as a number."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  # PyYAML's own method
        """Return that no value is written as a reference to another one."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "'" if text and text[0] in "+-.0123456789" else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _from_file(source: str) -> Draft:
    where = place(source)
    documents = [each for each in parse_documents(read_text(source), where=where) if isinstance(each, Mapping)]
    return draft_of(documents, where=where)


def _answer(question: str, *, needed: bool = False) -> str:
    """Ask on standard error and return the line that is given, asking again while a needed one is empty.

    Standard output is the job alone: ``click.prompt`` of click 8.1 to 8.3 writes a space there.

    Raises:
        InputError: the input has ended.
    """
    while True:
        click.echo(f"{question}: ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            raise InputError("the answers have ended: give --image and --pool as options, and --batch with --epochs")
        if line.strip() or not needed:
            return line.strip()


def _batch_and_epochs() -> tuple[int | None, int | None]:
    """Ask for both; an empty answer is an unchanged script for torchrun, which has a batch of its own.

    Raises:
        InputError: the answer is not one or two numbers.
    """
    question = "Global batch and epochs, such as 512 20 (empty: an unchanged script for torchrun)"
    words = _answer(question).replace(",", " ").split()
    if len(words) > 2 or not all(word.isdecimal() and 1 <= int(word) <= MAX_BATCH for word in words):  # noqa: PLR2004  # batch and epochs
        raise InputError(f"{quoted(' '.join(words))} is no batch with epochs: write whole numbers, such as 512 20")
    numbers = [*map(int, words), None, None]
    return numbers[0], numbers[1]


def _from_script(script: str, image: str | None, pools: tuple[str, ...], gpus: int) -> Draft:
    """Return the draft for a script that is in the image; ask for what is missing."""
    chosen = image or _answer("Image of the workers, with the script in it", needed=True)
    asked = pools or tuple(
        (_answer("Pools of nodes and most workers in each [gpu=1]") or "gpu=1").replace(",", " ").split()
    )
    draft = Draft(name=Path(script).stem)
    for text in asked:
        name, equals, count = text.partition("=")
        if not equals or not count.isdecimal() or int(count) < 1:
            raise InputError(f"{text} is not of the form POOL=N, such as a100=2")
        resources: dict[str, Any] = {"limits": {GPU: gpus}} if gpus else {}
        selector = {"heterotrain.dev/pool": plain_name(name)}
        main = {"name": CONTAINER, "image": chosen, "command": [RUN, script]}
        pod = PoolPod(spec={"containers": [main]})
        draft.pools.append(
            DraftPool(name=plain_name(name), most=int(count), resources=resources, node_selector=selector, pod=pod)
        )
    draft.least, draft.most = 1, sum(pool.most for pool in draft.pools)
    return draft


def write_example(folder: Path) -> str:
    """Copy the example into a new folder below ``folder``; return what to do next.

    Raises:
        InputError: the new folder exists, or cannot be written.
    """
    made = folder / NAME
    source = _IN_WHEEL if _IN_WHEEL.is_dir() else _IN_CLONE
    try:
        made.mkdir()
        files = sorted(path for path in source.iterdir() if path.is_file())
        for path in files:
            shutil.copyfile(path, made / path.name)
    except FileExistsError as error:
        raise InputError(f"{made} exists already: remove it, or run this in another folder") from error
    except OSError as error:
        raise InputError(f"{made} cannot be written: {error.strerror}") from error
    return (
        f"wrote {', '.join(str(made / path.name) for path in files)}\n"
        f"train: python {made}/train.py --epochs 2 --samples-per-epoch 4480   (needs PyTorch and scikit-learn)"
    )
