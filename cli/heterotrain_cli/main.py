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
COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "init": ("convert.command", "Write a job for a script, or from another project's manifest."),
    "validate": ("cluster.validate", "Check a job without running it."),
    "submit": ("cluster.submit", "Create a job on the cluster."),
    "wait": ("cluster.submit", "Show a job's progress until it ends."),
    "get": ("cluster.listing", "List jobs, or one job, with speed, progress and price."),
    "describe": ("cluster.show", "Show one job, what holds it up, and what to do."),
    "top": ("cluster.show", "Watch one job until it ends."),
    "logs": ("cluster.logs", "Print the logs of all workers of a job."),
    "suspend": ("cluster.change", "Stop a job and free its nodes."),
    "resume": ("cluster.change", "Continue a suspended job."),
    "restart": ("cluster.change", "Renew a job's workers with its present template."),
    "retry": ("cluster.change", "Continue a failed job from its newest checkpoint."),
    "checkpoint": ("cluster.checkpoint", "Write a checkpoint of a running job now."),
    "scale": ("cluster.change", "Change how many workers a running job may have."),
    "delete": ("cluster.change", "Delete a job and its workers."),
    "forecast": ("forecast.command", "Predict step time, throughput, cost and shares."),
    "bench": ("bench.command", "Measure how a script scales on this machine."),
    "preflight": ("preflight", "Check GPUs, store, network and more before a training."),
    "export": ("export", "Write the model of a checkpoint for other programs."),
    "plot": ("cluster.plot", "Draw loss, throughput and batch of a job over time."),
}
"""The module of each command, loaded when it is used, and its line in the help of the program; in the help's order."""


class Commands(click.Group):
    """A group whose commands are imported by name: the libraries of all of them take a second to load."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's own method
        """Return all names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  # as above
        """Return a command; ``None`` for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = getattr(import_module(f"heterotrain_cli.{COMMANDS[cmd_name][0]}"), cmd_name)
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
            formatter.write_dl([(name, caption) for name, (_, caption) in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands and options of these first letters, without loading the modules of all commands."""
        if incomplete and not incomplete[0].isalnum():
            return click.Command.shell_complete(self, ctx, incomplete)
        return [CompletionItem(name) for name in COMMANDS if name.startswith(incomplete)]


@click.group("heterotrain", cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="heterotrain")
def main() -> None:
    """Run, watch and forecast PyTorch training jobs on mixed GPUs."""
