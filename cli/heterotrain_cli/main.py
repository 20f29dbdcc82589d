"""The ``heterotrain`` command."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

import click
from click.shell_completion import CompletionItem
from heterotrain_core.version import __version__

INTERRUPTED: Final = 130
"""Exit status after Ctrl-C, as shells have it."""
COMMANDS: Final[Mapping[str, str]] = {
    "init": "convert.command", "validate": "cluster.validate", "submit": "cluster.submit", "wait": "cluster.submit",
    "get": "cluster.listing",
    "describe": "cluster.show", "top": "cluster.show", "logs": "cluster.logs", "suspend": "cluster.change",
    "resume": "cluster.change", "restart": "cluster.change",
    "retry": "cluster.change",
    "checkpoint": "cluster.checkpoint", "scale": "cluster.change",
    "delete": "cluster.change", "forecast": "forecast.command",
    "bench": "bench.command", "preflight": "preflight", "export": "export",
    "plot": "cluster.plot", "completion": "completion",
}  # fmt: skip
"""The module of each command, in the order of the help. It is loaded when the command is used."""
CAPTIONS: Final[Mapping[str, str]] = {
    "init": "Write a job for a script, or from another project's manifest.",
    "validate": "Check a job without running it.",
    "submit": "Create a job on the cluster.",
    "wait": "Show a job's progress until it ends.",
    "get": "List jobs, or one job, with speed, progress and price.",
    "describe": "Show one job, what holds it up, and what to do.",
    "top": "Watch one job until it ends.",
    "logs": "Print the logs of all workers of a job.",
    "suspend": "Stop a job and free its nodes.",
    "resume": "Continue a suspended job.",
    "restart": "Renew a job's workers with its present template.",
    "retry": "Continue a failed job from its newest checkpoint.",
    "checkpoint": "Write a checkpoint of a running job now.",
    "scale": "Change how many workers a running job may have.",
    "delete": "Delete a job and its workers.",
    "forecast": "Predict step time, throughput, cost and shares.",
    "bench": "Measure how a script scales on this machine.",
    "preflight": "Check GPUs, store, network and more before a training.",
    "export": "Write the model of a checkpoint for other programs.",
    "plot": "Draw loss, throughput and batch of a job over time.",
    "completion": "Print the script that completes commands in a shell.",
}
"""A line for each command in the help of the program, which loads no module of a command for it."""


class Commands(click.Group):
    """A group whose commands are imported by name: the libraries of all of them take a second to load."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's own method
        """Return all names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  # as above
        """Return a command; ``None`` for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = getattr(import_module(f"heterotrain_cli.{COMMANDS[cmd_name]}"), cmd_name)
        return found

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; Ctrl-C ends it with one word."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            raise SystemExit(INTERRUPTED) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  # as above
        """Write the list of commands into the help."""
        with formatter.section("Commands"):
            formatter.write_dl(list(CAPTIONS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands and options of these first letters, without loading the modules of all commands."""
        if incomplete and not incomplete[0].isalnum():
            return click.Command.shell_complete(self, ctx, incomplete)
        return [CompletionItem(name) for name in COMMANDS if name.startswith(incomplete)]


@click.group("heterotrain", cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="heterotrain")
def main() -> None:
    """Run, watch and forecast PyTorch training jobs on mixed GPUs."""
