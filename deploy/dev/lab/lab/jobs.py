"""Jobs on the cluster: created from the example, with waits and the count of committed steps."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from heterotrain_cli.cluster import api
from heterotrain_cli.cluster.target import Target
from heterotrain_cli.errors import InputError, UnavailableError
from heterotrain_core.contract import keys
from heterotrain_core.contract.codec import Refused, decode_plan
from heterotrain_core.contract.plan import Plan

from lab.cluster import REPOSITORY, Cluster, ClusterError, wait_for

EXAMPLE = REPOSITORY / "deploy/examples/digits"
SHARED_FOLDER = "/var/local/heterotrain"
"""The folder that kind-config.yaml mounts into every node."""
_STEP = re.compile(rb'"step": ?(\d+)')


def example(
    name: str,
    *,
    arguments: Sequence[str] = (),
    training: Mapping[str, Any] | None = None,
    spec: Mapping[str, Any] | None = None,
    limits: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    folder: str | None = None,
) -> dict[str, Any]:
    """Return the example job under another name.

    Args:
        name: the job's name.
        arguments: appended to the script's own arguments.
        training: fields that replace those of ``spec.training``.
        spec: fields that replace those of ``spec``.
        limits: CPU limit for each pool (``{"a100": "560m"}``).
        environment: variables for the container.
        folder: host folder for checkpoints; a folder named after the job when ``None``.
    """
    job: dict[str, Any] = copy.deepcopy(yaml.safe_load((EXAMPLE / "job.yaml").read_text()))
    job["metadata"]["name"] = name
    job["spec"]["training"].update(training or {})
    job["spec"].update(spec or {})
    for pool in job["spec"]["workerPools"]:
        if limits and pool["name"] in limits:
            pool["resources"]["limits"]["cpu"] = pool["resources"]["requests"]["cpu"] = limits[pool["name"]]
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    container["command"] = [*container["command"], *arguments]
    container["env"] = [{"name": key, "value": value} for key, value in (environment or {}).items()]
    pod["volumes"][1]["hostPath"]["path"] = folder or f"{SHARED_FOLDER}/{name}"
    return job


def script() -> dict[str, Any]:
    """Return the ConfigMap with the example's training script."""
    data = {"train.py": (EXAMPLE / "train.py").read_text()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "digits-script"}, "data": data}


@dataclass(frozen=True, slots=True)
class Job:
    """A job on the cluster, by name.

    It is read by the command line's client: tests ask again and again, and each start of kubectl takes an eighth of a
    second of a processor from the job.
    """

    cluster: Cluster
    name: str

    @property
    def _client(self) -> api.Cluster:
        return _client(self.cluster.environment["KUBECONFIG"], self.cluster.namespace)

    def read(self) -> dict[str, Any]:
        """Return the whole object.

        Raises:
            ClusterError: it does not exist, or there is no answer.
        """
        try:
            return self._client.job(self.name)
        except (InputError, UnavailableError) as error:
            raise ClusterError(error.message) from error

    def status(self) -> dict[str, Any]:
        """Return its status; empty before the operator has processed it."""
        status: dict[str, Any] = self.read().get("status") or {}
        return status

    def condition(self, kind: str) -> dict[str, Any]:
        """Return one of its conditions; empty if it has none of this type."""
        return next((each for each in self.status().get("conditions", []) if each["type"] == kind), {})

    def is_true(self, kind: str) -> bool:
        """Return whether a condition is True."""
        return self.condition(kind).get("status") == "True"

    def uid(self) -> str:
        """Return the object's uid."""
        return str(self.read()["metadata"]["uid"])

    def plan(self) -> Plan | None:
        """Return the operator's current plan, or ``None`` before the first one."""
        try:
            config_map = self._client.config_map(keys.plan_name(self.name))
        except InputError:
            return None
        except UnavailableError as error:
            raise ClusterError(error.message) from error
        plan = decode_plan(config_map["data"][keys.PLAN_KEY], job_uid=self.uid())
        if isinstance(plan, Refused):
            raise ClusterError(plan.reason)
        return plan

    def pods(self) -> list[dict[str, Any]]:
        """Return its pods."""
        try:
            return self._client.pods(self.name)
        except (InputError, UnavailableError) as error:
            raise ClusterError(error.message) from error

    def pod(self, name: str) -> dict[str, Any] | None:
        """Return one of its pods, or ``None`` if there is none of that name."""
        return next((pod for pod in self.pods() if pod["metadata"]["name"] == name), None)

    def pools(self) -> dict[str, str]:
        """Return each worker's pool by pod name."""
        return {pod["metadata"]["name"]: pod["metadata"]["labels"][keys.LABEL_POOL] for pod in self.pods()}

    def pod_on(self, pool: str) -> dict[str, Any] | None:
        """Return a running pod of this pool, or ``None``."""
        running = (
            pod
            for pod in self.pods()
            if pod["metadata"]["labels"].get(keys.LABEL_POOL) == pool
            and pod["status"].get("phase") == "Running"
            and "deletionTimestamp" not in pod["metadata"]
        )
        return next(running, None)

    def wait_true(self, condition: str, *, timeout_s: float) -> None:
        """Wait for a condition.

        Raises:
            AssertionError: the job failed meanwhile; the message holds the reason.
            ClusterError: the condition is not True in time.
        """

        def probe() -> bool:
            failed = self.condition("Failed")
            if failed.get("status") == "True" and condition != "Failed":
                raise AssertionError(f"job {self.name} failed: {failed.get('reason')}: {failed.get('message')}")
            return self.is_true(condition)

        wait_for(probe, f"condition {condition} of job {self.name}", timeout_s=timeout_s, every_s=0.5)

    def wait_members(self, count: int, *, timeout_s: float) -> Plan:
        """Wait for a plan with this many members and return it."""

        def probe() -> Plan | None:
            plan = self.plan()
            return plan if plan is not None and len(plan.members) == count else None

        return wait_for(probe, f"a plan of job {self.name} with {count} members", timeout_s=timeout_s)

    def wait_epoch(self, epoch: int, *, timeout_s: float) -> None:
        """Wait until training has reached an epoch (counted from 0)."""
        wait_for(
            lambda: self.status().get("epoch", -1) >= epoch, f"epoch {epoch} of job {self.name}", timeout_s=timeout_s
        )


@lru_cache
def _client(kubeconfig: str, namespace: str) -> api.Cluster:
    """Return a client with connections that stay open."""
    return api.Cluster(Target(namespace=namespace, kubeconfig=kubeconfig))


def fresh_folder(name: str) -> Path:
    """Return an empty folder that every node mounts and every user may write to, like a volume of a real cluster."""
    folder = Path(SHARED_FOLDER) / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    return folder


def committed_steps(folder: Path) -> int:
    """Return the number of steps in the ranks' own sample logs, without a line that is still being written."""
    steps: set[bytes] = set()
    for path in folder.glob("*.jsonl"):
        whole, _, _ = path.read_bytes().rpartition(b"\n")
        steps.update(_STEP.findall(whole))
    return len(steps)
