"""Access to the user's cluster: kubectl's kubeconfig, or in a pod its service account."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from heterotrain_operator.api.text import quoted

from heterotrain_cli.cluster.refusals import said
from heterotrain_cli.errors import UnavailableError


@dataclass(frozen=True, slots=True)
class Target:
    """Where the commands look: options of every command on a cluster.

    Attributes:
        namespace: of the jobs; ``None`` for that of the kubeconfig's context.
        context: of the kubeconfig; ``None`` for the current one.
        kubeconfig: file; ``None`` for kubectl's choice.
    """

    namespace: str | None = None
    context: str | None = None
    kubeconfig: str | None = None


def load(target: Target) -> tuple[Any, str]:
    """Return the official client's configuration, and the namespace of the jobs.

    Raises:
        UnavailableError: there is no usable kubeconfig, or the official client is not installed.
    """
    try:
        from kubernetes import client, config  # noqa: PLC0415  # takes half a second to load
    except ModuleNotFoundError as error:
        raise UnavailableError(
            "commands on a cluster need the package kubernetes: pip install 'heterotrain[cli]'"
        ) from error
    configuration = client.Configuration()
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ and not os.environ.get("KUBECONFIG")
    # The client reads the variable only once, when it is imported.
    files = target.kubeconfig or os.environ.get("KUBECONFIG")
    try:
        if target.kubeconfig is None and target.context is None and in_pod:
            config.load_incluster_config(client_configuration=configuration)
            namespace = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text(encoding="utf-8")
        else:
            config.load_kube_config(files, context=target.context, client_configuration=configuration)
            every, current = config.list_kube_config_contexts(files)
            named = {each["name"]: each for each in every}
            chosen = named[target.context] if target.context is not None else current
            namespace = chosen["context"].get("namespace") or "default"
    except Exception as error:  # the client checks little, so a broken file ends in any error
        raise UnavailableError(
            f"no access to a cluster ({_missing(files or '') or _unusable(error)}): set KUBECONFIG, or give "
            "--kubeconfig and --context"
        ) from error
    return configuration, target.namespace or namespace.strip()


def _missing(files: str) -> str:
    """Return that none of these files, separated as in a path, is there; empty if one is, or none is named."""
    named = [each for each in files.split(os.pathsep) if each]
    gone = bool(named) and not any(Path(each).expanduser().exists() for each in named)
    return f"there is no file {quoted(files)}" if gone else ""


def _unusable(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"the kubeconfig is not YAML: correct its line {error.problem_mark.line + 1}"
    if isinstance(error, UnicodeDecodeError | yaml.YAMLError):
        return "the kubeconfig is not YAML in UTF-8"
    if isinstance(error, OSError) and error.strerror:
        return f"{quoted(str(error.filename))}: {error.strerror}"
    found = said(str(error))
    return found if type(error).__module__.startswith("kubernetes") else f"the kubeconfig is not complete: {found}"
