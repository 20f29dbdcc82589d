"""An API server for the commands of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from heterotrain_cli.cluster import api, names, submit
from support.api_stub import ApiStub, serve


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiStub]:
    """An API server without objects, and a kubeconfig for it; nothing waits before it tries again."""
    monkeypatch.setattr(api, "RETRY_S", 0.0)
    monkeypatch.setattr(submit, "LOOK_S", 0.0)
    monkeypatch.setattr(names, "LIMIT_S", 60.0)
    found = ApiStub()
    with serve(found, tmp_path, namespace="ml") as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        yield found
