"""Files of the chart that are made: README with all values, and one manifest for clusters without Helm.

``lab.generated`` writes them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from lab.cluster import REPOSITORY

CHART: Final = REPOSITORY / "helm/heterotrain"
README: Final = CHART / "README.md"
MANIFEST: Final = REPOSITORY / "deploy/manifest/heterotrain.yaml"
NAMESPACE: Final = "heterotrain-system"
_KEY = re.compile(r"^( *)([A-Za-z]+):(?: (.*))?$")
_ABOUT = """# heterotrain

The operator for [HeteroTrainJobs](../../README.md): one PyTorch training job on pools of different GPUs.

```
helm install heterotrain {source} -n heterotrain-system --create-namespace \\
  --set image.repository=REGISTRY/heterotrain-operator \\
  --set prometheus.url=http://prometheus.monitoring.svc:9090 --set monitoring.podMonitor.enabled=true
helm test heterotrain -n heterotrain-system
```

It needs Kubernetes {kubernetes} and works best with a Prometheus that scrapes the workers; without one, all workers
get equal shares. [Operating](../../docs/operating.md) describes upgrade and removal,
[platforms](../../docs/install.md#platforms) has values for some clusters. Without Helm, `kubectl apply --server-side -f
deploy/manifest/heterotrain.yaml` installs the same objects with default values.

## Values

`values.schema.json` checks every field. This table is generated from `values.yaml` by `make generate`.

| value | default | meaning |
| --- | --- | --- |
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A value of the chart: its path with dots, its default and the comment above it."""

    path: str
    default: Any
    meaning: str


def values(text: str) -> Iterator[Value]:
    """Yield the values of a ``values.yaml``, in its order; a mapping in flow style is one value.

    The comment of a section belongs to its first value that has none.
    """
    whole = yaml.safe_load(text)
    path: list[str] = []
    comment: list[str] = []
    of_section = ""
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped.lstrip("# "))
            continue
        found = _KEY.match(line)
        if found is None:
            comment = []
            continue
        depth = len(found[1]) // 2
        path = [*path[:depth], found[2]]
        meaning, comment = " ".join(comment), []
        default: Any = whole
        for name in path:
            default = default[name]
        if found[3] is None and isinstance(default, dict):
            of_section = " ".join(filter(None, [of_section if depth else "", meaning]))
            continue
        yield Value(path=".".join(path), default=default, meaning=" ".join(filter(None, [of_section, meaning])))
        of_section = ""


def readme() -> str:
    """Return the README of the chart."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    kubernetes = chart["kubeVersion"].removeprefix(">=").removesuffix("-0").removesuffix(".0") + " or newer"
    rows = [
        f"| `{each.path}` | `{json.dumps(each.default)}` | {each.meaning.replace('|', chr(92) + '|')} |"
        for each in values((CHART / "values.yaml").read_text(encoding="utf-8"))
    ]
    return _ABOUT.format(source="helm/heterotrain", kubernetes=kubernetes) + "\n".join(rows) + "\n"


def helm() -> str:
    """Return the path of helm, which need not exist."""
    cached = Path(os.environ.get("HETEROTRAIN_CACHE") or Path.home() / ".cache/heterotrain") / "bin/helm"
    return shutil.which("helm") or str(cached)


def manifest() -> str:
    """Return all objects of the chart with default values, as one YAML text for ``kubectl apply --server-side``."""
    command = [helm(), "template", "heterotrain", str(CHART), "--namespace", NAMESPACE, "--skip-tests"]
    done = subprocess.run([*command, "--kube-version", "1.36.0"], capture_output=True, text=True, check=True)
    objects = [each for each in yaml.safe_load_all(done.stdout) if each]
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    text: str = yaml.safe_dump_all([namespace, *objects], sort_keys=False, width=120)
    return (
        "# Generated from the chart by `make generate`: its objects with default values. Set the image of the\n"
        f"# Deployment to your own: kubectl apply --server-side -f {MANIFEST.name}\n{text}"
    )
