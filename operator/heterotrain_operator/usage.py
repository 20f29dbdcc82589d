"""One sentence for each mistake on a command line, in place of click's usage, hint and error on three lines.

The operator's own command and ``heterotrain`` use it.

Click's messages hold the wrong value as text only. Its forms are read here; an unknown form keeps click's words.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from heterotrain_operator.api.text import quoted

_NUMBER = re.compile(r"^'?(?P<value>.*?)'? is not a valid (?P<kind>integer|float)(?: range)?\.$", re.DOTALL)
_RANGE = re.compile(r"^(?P<value>\S+) is not in the range .*\.$", re.DOTALL)
_CHOICE = re.compile(r"^'(?P<value>.*)' is not one of .*\.$", re.DOTALL)
_PATH = re.compile(r"^(?P<kind>\w+) '(?P<value>.*)' (?P<problem>does not exist|is a directory|is a file)\.$", re.DOTALL)
_COMMAND = re.compile(r"^No such command '(?P<value>.*)'\.", re.DOTALL)
_EXTRA = re.compile(r"^Got unexpected extra arguments? \((?P<value>.*)\)$", re.DOTALL)
_NO_VALUE = re.compile(r"^Option '(?P<value>[^']+)' requires (?:an argument|\d+ arguments)\.$")


class CommandLineError(click.ClickException):
    """A file, an option or a command that cannot be used; the message is one sentence with the remedy."""

    exit_code = 2


@contextmanager
def one_sentence(names: Sequence[str] = ()) -> Iterator[None]:
    """Turn click's error about a command line into one sentence.

    Args:
        names: commands that there are, for a misspelt one.

    Raises:
        CommandLineError: the command line has a mistake.
    """
    try:
        yield
    except click.UsageError as error:
        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
            raise  # the help is the answer
        raise CommandLineError(_sentence(error, names)) from error


def _sentence(error: click.UsageError, names: Sequence[str]) -> str:
    path = error.ctx.command_path if error.ctx is not None else "the command"
    more = f"`{path} --help` has examples"
    message = error.message or ""
    match error:
        case click.MissingParameter():
            what = _name(error.param) if error.param is not None else str(error.param_hint)
            return f"{what} is missing: {more}"
        case click.BadParameter():
            return _bad_value(error, message)
        case click.NoSuchOption():
            close = difflib.get_close_matches(error.option_name, error.possibilities or (), n=1)
            return f"{_shown(error.option_name)} is not an option of `{path}`: " + (
                f"did you mean {close[0]}?" if close else f"`{path} --help` lists them"
            )
    if found := _COMMAND.match(message):
        close = difflib.get_close_matches(found["value"], names, n=1)
        return f"{_shown(found['value'])} is not a command: " + (
            f"did you mean {close[0]}?" if close else f"`{path} --help` lists them"
        )
    if found := _EXTRA.match(message):
        return f"{_shown(found['value'])} is one argument too many: {more}"
    if found := _NO_VALUE.match(message):
        return f"{found['value']} has no value: write one after it"
    return " ".join(message.split()) or more


def _bad_value(error: click.BadParameter, message: str) -> str:
    name, kind = _name(error.param), error.param.type if error.param is not None else None
    if (found := _NUMBER.match(message)) or (found := _RANGE.match(message)):
        return f"{name} must be {_allowed(kind, error.param)}, not {_shown(found['value'])}"
    if (found := _CHOICE.match(message)) and isinstance(kind, click.Choice):
        return f"{name} must be one of {', '.join(map(str, kind.choices))}, not {_shown(found['value'])}"
    if found := _PATH.match(message):
        wanted = "a file" if getattr(kind, "file_okay", True) else "a folder"
        missing = found["problem"] == "does not exist"
        problem = "there is nothing of this name: check the path" if missing else f"it must be {wanted}"
        return f"{name} is {_shown(found['value'])}, but {problem}"
    return f"{name}: {' '.join(message.split())}"


def _allowed(kind: Any, parameter: click.Parameter | None) -> str:
    """Return what a number may be, such as ``a whole number from 1 to 64``."""
    what = "a whole number" if isinstance(kind, click.types.IntParamType) else "a number"
    what += " of seconds" if parameter is not None and parameter.metavar == "SECONDS" else ""
    low, high = getattr(kind, "min", None), getattr(kind, "max", None)
    if low is not None and high is not None:
        return f"{what} from {low:,} to {high:,}"
    return f"{what}, at least {low:,}" if low is not None else what


def _name(parameter: click.Parameter | None) -> str:
    """Return what the user writes for a parameter: its longest option, or the argument's name."""
    if parameter is None:
        return "the value"
    if isinstance(parameter, click.Argument):
        return str(parameter.metavar or (parameter.name or "").upper()).strip("[]…")
    return max(parameter.opts, key=len)


def _shown(text: str) -> str:
    return quoted(" ".join(text.split())) if text.strip() else '""'
