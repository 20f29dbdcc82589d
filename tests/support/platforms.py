"""The section Platforms of docs/install.md: values of the chart, and pools of a job, for each platform."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

TEXT = (Path(__file__).parents[2] / "docs/install.md").read_text().split("\n## Platforms\n")[1].split("\n## ")[0]
PLATFORM = re.compile(r"^### (.+)$", re.MULTILINE)
BLOCK = re.compile(r"```yaml\n# (\w+)\n(.*?)```", re.DOTALL)


def blocks(kind: str) -> list[tuple[str, str]]:
    """Return platform and text of every block of a kind, ``values`` or ``pools``."""
    parts = PLATFORM.split(TEXT)[1:]
    sections = zip(parts[::2], parts[1::2], strict=True)
    return [(name, text) for name, body in sections for found, text in BLOCK.findall(body) if found == kind]


def job(pools: str) -> dict[str, Any]:
    """Return a job with these pools."""
    spec = {
        "training": {"globalBatchSize": 512},
        "workerPools": yaml.safe_load(pools),
        "template": {"spec": {"containers": [{"name": "trainer", "image": "x"}]}},
    }
    return {"apiVersion": "heterotrain.dev/v1alpha1", "kind": "HeteroTrainJob", "metadata": {"name": "j"}, "spec": spec}
