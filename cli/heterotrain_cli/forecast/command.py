"""``heterotrain forecast``."""

from __future__ import annotations

import json

import click
from rich.console import Console

from heterotrain_cli.documents import place, read_document, schema_text
from heterotrain_cli.forecast.answer import answer, as_document
from heterotrain_cli.forecast.tables import show_answer
from heterotrain_cli.profile import SCHEMA, read_profile

MAX_BATCH = 10**12


def _print_schema(context: click.Context, _: click.Parameter, wanted: bool) -> None:  # noqa: FBT001  # click's own signature
    if wanted:
        click.echo(schema_text(SCHEMA), nl=False)
        context.exit()


@click.command()
@click.option("--profile", "profile_path", metavar="FILE", help="Profile in YAML or JSON; - is standard input.")
@click.option("--batch", type=click.IntRange(1, MAX_BATCH), help="Global batch in samples.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option(
    "--schema",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_schema,
    help="Print the profile's JSON schema.",
)
def forecast(profile_path: str | None, batch: int | None, output: str) -> None:
    """Predict step time, throughput and shares before anything runs.

    Exit status: 0 with an answer (that a batch is not possible is an answer, too), 1 if the cluster can't be reached,
    2 if a file or an option is wrong.
    """
    if profile_path is None:
        raise click.UsageError("say which members there are: --profile FILE")
    if batch is None:
        raise click.UsageError("say which global batch: --batch N")
    profile = read_profile(read_document(profile_path), where=place(profile_path))
    found = answer(profile, batch)
    if output == "json":
        click.echo(json.dumps(as_document(found), indent=2, ensure_ascii=False))
    else:
        show_answer(Console(), profile, batch, found)
