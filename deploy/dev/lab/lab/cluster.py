"""A cluster, used through kubectl and helm as a user does; errors carry kubectl's own messages."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

_T = TypeVar("_T")
REPOSITORY = Path(__file__).resolve().parents[4]
clock: Callable[[], float] = time.monotonic
"""Measures the limits of waits, in seconds; tests replace it by one that is patient with a busy machine."""
BREAK = 4.0
"""A break between two probes is at least this many times as long as a probe."""


class ClusterError(Exception):
    """A command against the cluster failed, or a wait timed out; the message names it and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The environment of kubectl and helm for one cluster, and a namespace.

    Attributes:
        environment: variables for every command, ``KUBECONFIG`` and ``PATH`` among them.
        namespace: namespace of commands that do not name one.
    """

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    namespace: str = "default"

    def run(self, *command: str, stdin: str | None = None, timeout_s: float = 240) -> str:
        """Return the command's standard output.

        Raises:
            ClusterError: it exited with a non-zero code or took longer than ``timeout_s``.
        """
        try:
            done = subprocess.run(
                command,
                input=stdin,
                env=dict(self.environment),
                text=True,
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"`{' '.join(command)}` did not end within {timeout_s:.0f} s") from error
        if done.returncode != 0:
            raise ClusterError(f"`{' '.join(command)}`: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 240) -> str:
        """Run kubectl in this cluster's namespace and return its output."""
        return self.run("kubectl", "-n", self.namespace, *arguments, stdin=stdin, timeout_s=timeout_s)

    def apply(self, *objects: Mapping[str, Any]) -> str:
        """Apply objects as ``kubectl apply -f`` does."""
        return self.kubectl("apply", "-f", "-", stdin="---\n".join(yaml.safe_dump(dict(each)) for each in objects))

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return an object, or ``None`` if it does not exist."""
        text = self.kubectl("get", kind, name, "--ignore-not-found", "-o", "json")
        return json.loads(text) if text.strip() else None

    def list(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        """Return the namespace's objects of a kind, filtered by a label selector if there is one."""
        arguments = ["-l", selector] if selector else []
        items: list[dict[str, Any]] = json.loads(self.kubectl("get", kind, *arguments, "-o", "json"))["items"]
        return items

    def delete(self, kind: str, name: str, *arguments: str) -> None:
        """Delete an object if it exists, without waiting for the end of the deletion."""
        self.kubectl("delete", kind, name, "--ignore-not-found", "--wait=false", *arguments)

    def raw(self, path: str) -> Any:
        """Return the JSON document at an API path; the API server's proxy also reaches Services and pods."""
        return json.loads(self.kubectl("get", "--raw", path))


def wait_for(probe: Callable[[], _T | None], what: str, *, timeout_s: float, every_s: float = 0.25) -> _T:
    """Return the first answer of ``probe`` that is neither ``None`` nor ``False``.

    A failing command counts as "not yet", because API servers and pods come and go during the tests. A probe that takes
    long, such as a command, is repeated less often: the processors are for what is awaited.

    Raises:
        ClusterError: ``timeout_s`` passed; the message holds the last failure.
    """
    deadline_s, last = clock() + timeout_s, ""
    while True:
        began_s = time.monotonic()
        try:
            answer = probe()
        except ClusterError as error:
            answer, last = None, f" (last error: {error})"
        if answer is not None and answer is not False:
            return answer
        if clock() > deadline_s:
            raise ClusterError(f"not within {timeout_s:.0f} s: {what}{last}")
        time.sleep(max(every_s, BREAK * (time.monotonic() - began_s)))


def commands(cluster: Cluster, *lines: Sequence[str]) -> None:
    """Run commands one after the other."""
    for line in lines:
        cluster.run(*line, timeout_s=300)
