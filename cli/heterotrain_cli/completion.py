"""``heterotrain completion``, and the completion of ``kubectl htj``.

kubectl runs the program ``kubectl_complete-htj`` with the words after ``kubectl htj``; the last one is incomplete and
may be empty. It prints a candidate on each line, its meaning after a tab, and a number for kubectl on the last line
(https://github.com/kubernetes/sample-cli-plugin#shell-completion).
"""

from __future__ import annotations

from collections.abc import Sequence

import click
from click.shell_completion import ShellComplete, get_completion_class

SHELLS = ("bash", "zsh", "fish", "kubectl")
_VARIABLE = "_HETEROTRAIN_COMPLETE"
_FILES, _NO_FILES = ":0", ":4"
"""What kubectl's shells do besides: complete names of files, or not."""
_FOR_KUBECTL = """#!/bin/sh
# Completion of `kubectl htj`: put this file into a folder of $PATH as kubectl_complete-htj, and make it executable.
exec kubectl htj __complete "$@"
"""


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, *, shell: str) -> None:
    """Print the script that completes commands, options and names of jobs in a shell.

    \b
    Examples:
      echo 'eval "$(heterotrain completion bash)"' >> ~/.bashrc
      echo 'eval "$(heterotrain completion zsh)"' >> ~/.zshrc
      heterotrain completion fish > ~/.config/fish/completions/heterotrain.fish
      heterotrain completion kubectl > ~/.krew/bin/kubectl_complete-htj

    Exit status: 0.
    """  # noqa: D301  # click reads the character \b
    if shell == "kubectl":
        click.echo(_FOR_KUBECTL, nl=False)
        return
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101  # click has all of SHELLS
    root = context.find_root().command
    click.echo(kind(root, {}, "heterotrain", _VARIABLE).source())


def candidates(command: click.Command, words: Sequence[str]) -> list[str]:
    """Return the lines for kubectl.

    Args:
        command: the whole program.
        words: after ``kubectl htj``, with the incomplete one as the last; none at all is one empty word.
    """
    *before, incomplete = words or [""]
    found = ShellComplete(command, {}, "kubectl htj", _VARIABLE).get_completions(before, incomplete)
    lines = []
    for each in found:
        meaning = " ".join((each.help or "").split())
        lines.append(f"{each.value}\t{meaning}" if meaning else str(each.value))
    files = any(each.type in ("file", "dir") for each in found)
    return [_FILES] if files else [*lines, _NO_FILES]
