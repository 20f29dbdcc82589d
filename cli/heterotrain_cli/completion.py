"""``heterotrain completion``."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_HETEROTRAIN_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, *, shell: str) -> None:
    """Print the script that completes commands and options in a shell.

    \b
    Examples:
      echo 'eval "$(heterotrain completion bash)"' >> ~/.bashrc
      echo 'eval "$(heterotrain completion zsh)"' >> ~/.zshrc
      heterotrain completion fish > ~/.config/fish/completions/heterotrain.fish

    Exit status: 0.
    """  # noqa: D301  # click reads the character \b
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101  # click has all of SHELLS
    root = context.find_root().command
    click.echo(kind(root, {}, "heterotrain", _VARIABLE).source())
