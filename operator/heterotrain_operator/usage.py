"""Mistakes in files and options that click cannot know; the operator's own command and ``heterotrain`` use it."""

from __future__ import annotations

import click


class CommandLineError(click.ClickException):
    """A file, an option or a command that cannot be used; the message is one sentence with the remedy."""

    exit_code = 2
