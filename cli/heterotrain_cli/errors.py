"""Errors of the command line and their exit status.

``InputError`` is a mistake in a file or an option (status 2). ``UnavailableError`` is a missing answer from the cluster
(status 1). An infeasible batch is an answer, with status 0.
"""

from __future__ import annotations

import click
from heterotrain_operator.usage import CommandLineError

InputError = CommandLineError


class ChangedError(InputError):
    """Another program has changed an object since it was read."""


class UnavailableError(click.ClickException):
    """No answer from outside, such as from the cluster."""

    exit_code = 1
