"""Runs commands of click in this process, with standard output and standard error apart, with each supported click."""

from __future__ import annotations

import inspect
from typing import Any, Final

from click import testing

_APART: Final[dict[str, Any]] = (
    {"mix_stderr": False} if "mix_stderr" in inspect.signature(testing.CliRunner).parameters else {}
)
"""Before click 8.2, both are one text unless this is given; since then, they are always kept apart as well."""


class CliRunner(testing.CliRunner):
    """As click's, but ``result.stderr`` is there with every click; ``result.output`` is not the same in all of them."""

    def __init__(self) -> None:
        super().__init__(**_APART)
