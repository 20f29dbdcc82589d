"""The ``heterotrain`` command: forecasts and simulations for people."""

from __future__ import annotations

import click

from heterotrain_cli.forecast.command import forecast
from heterotrain_cli.simulate.command import simulate


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="heterotrain")
def main() -> None:
    """One PyTorch training job on mixed GPUs: what it will cost, and how it would go."""


main.add_command(forecast)
main.add_command(simulate)
