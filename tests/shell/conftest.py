"""Settings of the shell tests."""

from __future__ import annotations

import structlog

# The default renders every local variable of every frame, which takes longer than the tests themselves.
structlog.configure(processors=[structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)])
