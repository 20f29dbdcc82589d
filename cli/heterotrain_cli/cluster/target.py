"""Options that choose a command's cluster and namespace, as kubectl's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Target:
    """Where the commands look: options of every command on a cluster.

    Attributes:
        namespace: of the jobs; ``None`` for that of the kubeconfig's context.
        context: of the kubeconfig; ``None`` for the current one.
        kubeconfig: file; ``None`` for kubectl's choice.
    """

    namespace: str | None = None
    context: str | None = None
    kubeconfig: str | None = None


def target_options(command: _F) -> _F:
    """Add the options that select cluster and namespace to a command, with kubectl's names."""
    for option in (
        click.option(
            "--kubeconfig", metavar="FILE", help="Access to the cluster  [default: $KUBECONFIG, ~/.kube/config]"
        ),
        click.option("--context", metavar="NAME", help="Context of the kubeconfig  [default: its current one]"),
        click.option("-n", "--namespace", metavar="NAME", help="Namespace of the job  [default: the context's]"),
    ):
        command = option(command)
    return command
