"""The ``heterotrain`` command."""

from __future__ import annotations

import click
from heterotrain_core.version import __version__

from heterotrain_cli.export import export
from heterotrain_cli.forecast.command import forecast
from heterotrain_cli.simulate.command import simulate


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="heterotrain")
def main() -> None:
    """Forecast and simulate a PyTorch training job on mixed GPUs, and export its weights."""


main.add_command(export)
main.add_command(forecast)
main.add_command(simulate)
