"""The modules that each part loads: the operator has to run without torch, the planner without any of the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = {
    "operator": "heterotrain_operator.cli",
    "planner": "heterotrain_planner.planning.shares",
    "models": "heterotrain_operator.api.admission",
    "client": "heterotrain_client.client",
}
FORBIDDEN = {
    "operator": {"torch", "heterotrain", "scipy", "matplotlib"},
    "models": {"torch", "kopf", "kubernetes", "aiohttp", "structlog", "heterotrain", "heterotrain_cli"},
    "client": {"torch", "kopf", "aiohttp", "structlog", "heterotrain", "scipy", "matplotlib"},
    "planner": {"torch", "kopf", "pydantic", "kubernetes", "aiohttp", "scipy", "heterotrain", "heterotrain_operator"},
}


def loaded(module: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after importing ``module``."""
    code = f"import sys, {module}; print(' '.join(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("part", sorted(MODULES))
def test_a_part_does_not_load_the_others(part: str) -> None:
    assert loaded(MODULES[part]) & FORBIDDEN[part] == set()


def test_the_check_detects_a_loaded_module() -> None:
    assert "kopf" in loaded(MODULES["operator"])


@pytest.mark.parametrize("folder", ["core", "planner", "operator", "trainer", "cli", "tests"])
def test_source_roots_are_not_packages(folder: str) -> None:
    """``operator/__init__.py`` would shadow the standard library's module of that name."""
    assert not (ROOT / folder / "__init__.py").exists()
