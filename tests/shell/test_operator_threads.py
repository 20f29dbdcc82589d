"""Work beside the event loop goes through one value, so that a test can do each piece of it when it likes."""

from __future__ import annotations

import ast
from pathlib import Path

import heterotrain_operator

SOURCES = Path(heterotrain_operator.__file__).parent
STARTS_THREADS = {"to_thread", "run_in_executor", "set_default_executor", "ThreadPoolExecutor", "Thread"}


def test_only_one_module_starts_threads() -> None:
    found = {
        path.name
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")) in STARTS_THREADS
    }
    assert found == {"threads.py"}
