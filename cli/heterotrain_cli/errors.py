"""What can go wrong on the command line, and the exit status that says so.

``InputError`` is the user's to mend (status 2, as for a wrong option); ``UnavailableError`` says that something outside
could not be reached (status 1). An infeasible batch is neither: it is an answer, and the status is 0.
"""

from __future__ import annotations

import click


class InputError(click.ClickException):
    """A file or option that cannot be used; the message is one sentence: what is wrong and what to do."""

    exit_code = 2


class UnavailableError(click.ClickException):
    """Something outside, such as the cluster, did not answer."""

    exit_code = 1
