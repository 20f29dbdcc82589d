"""Settings of the shell tests."""

from __future__ import annotations

import pytest
import structlog


@pytest.fixture(autouse=True)
def _logs() -> None:
    """Render logs without local variables; some tests of this folder configure them otherwise."""
    structlog.reset_defaults()
    # The default renders every local variable of every frame, which takes longer than the tests themselves.
    structlog.configure(processors=[structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)])
