"""Settings for tests whose ranks are threads of one process."""

from __future__ import annotations

import pytest
from heterotrain.network import connection_setup


@pytest.fixture
def long_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ranks more time to connect: on a busy machine, threads of one process take turns for longer than ranks."""
    monkeypatch.setattr(connection_setup, "SETUP_S", 60.0)
