"""``-o table|json|yaml``: one option for all commands, and documents on standard output for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import click
import yaml

TABLE: Final = "table"
JSON: Final = "json"
YAML: Final = "yaml"
OUTPUTS: Final = (TABLE, JSON, YAML)
_F = TypeVar("_F", bound=Callable[..., Any])


def output_option(command: _F) -> _F:
    """Add ``-o`` with the parameter ``output``: text for people, or a document for programs."""
    return click.option(
        "-o", "--output", type=click.Choice(OUTPUTS), default=TABLE, show_default=True,
        help="Text for people, or a document for programs.",
    )(command)  # fmt: skip


def print_document(document: Any, output: str) -> None:
    """Print a document of plain values on standard output; numbers that JSON lacks become null.

    Args:
        document: mappings, sequences, texts, numbers and ``None``.
        output: ``json`` or ``yaml``.
    """
    plain = _plain(document)
    if output == JSON:
        click.echo(json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        click.echo(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), nl=False)


def _plain(value: Any) -> Any:
    """Return the value without tuples and without infinite numbers."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
