"""The wheel of the sources, built once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.wheels import built

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel."""
    return built(ROOT, tmp_path_factory.mktemp("wheel"))
