"""The record of a run names the version of heterotrain, also in images, which hold no package metadata."""

from __future__ import annotations

import importlib.metadata

import heterotrain
import pytest
from heterotrain.checkpoints.record import versions


def test_the_record_names_the_version_without_package_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", absent)
    assert versions()["heterotrain"] == heterotrain.__version__
    assert heterotrain.__version__[0].isdigit()
