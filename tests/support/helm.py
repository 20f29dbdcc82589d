"""The Helm chart as helm renders it, with helm from the PATH or from the local cluster's cache."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

import yaml

from support.programs import program

CHART = Path(__file__).parents[2] / "helm/heterotrain"
HELM = program("helm")
EVERYTHING = (
    "monitoring.podMonitor.enabled=true",
    "monitoring.serviceMonitor.enabled=true",
    "monitoring.prometheusRule.enabled=true",
    "monitoring.dashboard.enabled=true",
    "networkPolicy.enabled=true",
    "podDisruptionBudget.enabled=true",
    "prometheus.auth.secretName=secret",
    "prometheus.auth.caSecretName=ca",
    "metrics.tls.secretName=tls",
    "metrics.tls.caSecretName=ca",
    "metrics.auth=true",
    "jobs.egress.enabled=true",
)
"""Settings that turn on all optional objects."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False)


def render(*values: str, release: str = "release", namespace: str = "operators") -> list[dict[str, Any]]:
    """Return the objects that the chart renders with these ``name=value`` settings."""
    return [each for each in yaml.load_all(_rendered(values, release, namespace), _LOADER) if each]


@functools.cache
def _rendered(values: tuple[str, ...], release: str, namespace: str) -> str:
    settings = [part for value in values for part in ("--set", value)]
    done = helm("template", release, str(CHART), "--namespace", namespace, "--kube-version", "1.36.0", *settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind]
