"""One version: of the packages, of the chart, and in the record of a run."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager
from heterotrain_core.version import __version__

ROOT = Path(__file__).parents[2]


def test_the_wheel_has_the_version_of_the_sources() -> None:
    assert ProjectMetadata(str(ROOT), PluginManager()).version == __version__


def test_the_chart_installs_the_operator_of_the_same_version() -> None:
    assert yaml.safe_load((ROOT / "helm/heterotrain/Chart.yaml").read_text())["appVersion"] == __version__


def test_the_images_of_the_readme_have_the_same_version() -> None:
    assert set(
        re.findall(r"heterotrain-(?:operator|trainer):([0-9.]+[0-9])", (ROOT / "docs/install.md").read_text())
    ) == {__version__}
