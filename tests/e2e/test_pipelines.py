"""A model whose training state fits no worker, and members of different shapes that survive a loss.

Memory limits of the pods are enforced by the kernel. A layer takes about 12.6 MB of training state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from heterotrain_core.contract import env, keys, metrics
from heterotrain_core.contract.plan import LayoutKind, Plan
from lab import spot_node
from lab.cluster import REPOSITORY, Cluster, wait_for
from lab.jobs import Job, committed_steps, fresh_folder
from lab.telemetry import Prometheus

EXAMPLE = REPOSITORY / "deploy/examples/language-model"
"""The limits of job-pipeline.yaml suit processes that take some 430 MB before they have a model, and leave half of the
rest for it."""


@dataclass(frozen=True, slots=True)
class Training:
    """A job with the language model, and the folder with its sample logs."""

    job: Job
    folder: Path

    def wait_steps(self, count: int, *, timeout_s: float) -> None:
        """Wait until this many steps are committed."""

        def probe() -> bool:
            failed = self.job.condition("Failed")
            assert failed.get("status") != "True", f"the job failed: {failed.get('message')}"
            return self.steps >= count

        wait_for(probe, f"{count} steps: {self.job.condition('LayoutPlanned')}", timeout_s=timeout_s, every_s=0.5)

    @property
    def steps(self) -> int:
        """The number of committed steps."""
        return committed_steps(self.folder / "samples")

    def wait_plan(self, *, after: int = 0, members: int = 1, timeout_s: float = 240) -> Plan:
        """Wait for a plan of a later generation that names so many members."""

        def probe() -> Plan | None:
            plan = self.job.plan()
            return plan if plan is not None and plan.generation > after and len(plan.members) == members else None

        return wait_for(probe, f"a plan: {self.job.condition('LayoutPlanned')}", timeout_s=timeout_s, every_s=0.5)


def language_model(
    name: str, *, blocks: int, folder: Path, members: int = 1, parallelism: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the example's job: a model of so many layers, at least so many members, three unequal workers."""
    job: dict[str, Any] = yaml.safe_load((EXAMPLE / "job-pipeline.yaml").read_text())
    job["metadata"]["name"] = name
    spec = job["spec"]
    spec["training"]["epochs"] = 1000
    spec["elasticPolicy"]["minReplicas"] = members
    spec["parallelism"] |= parallelism or {}
    pod = spec["template"]["spec"]
    command = pod["containers"][0]["command"]
    command[command.index("--blocks") + 1] = str(blocks)
    pod["containers"][0]["env"] = [{"name": env.SAMPLE_LOG_DIR, "value": "/checkpoints/samples"}]
    pod["volumes"][1]["hostPath"]["path"] = str(folder)
    return job


@pytest.fixture
def train(installed: Cluster, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yield a function that starts a job of so many layers and members in a namespace of its own."""
    name = "pipelines-" + str(request.node.name).removeprefix("test_").replace("_", "-")[:30].strip("-")
    cluster = Cluster(environment=installed.environment, namespace=f"e2e-{name}")

    def start(*, blocks: int, **changes: Any) -> Training:
        cluster.run("kubectl", "delete", "namespace", cluster.namespace, "--ignore-not-found", timeout_s=620)
        cluster.run("kubectl", "create", "namespace", cluster.namespace)
        data = {"train.py": (EXAMPLE / "train.py").read_text()}
        script = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "language-model-script"}, "data": data}
        cluster.apply(script)
        folder = fresh_folder(cluster.namespace)
        (folder / "samples").mkdir()
        (folder / "samples").chmod(0o777)
        cluster.apply(language_model("gpt", blocks=blocks, folder=folder, **changes))
        return Training(Job(cluster, "gpt"), folder)

    yield start
    if getattr(request.node, "failed_call", False):
        for command in (
            ("get", keys.PLURAL, "gpt", "-o", "yaml"),
            ("get", "pods", "-o", "wide"),
            ("logs", "-l", f"{keys.LABEL_JOB}=gpt", "--tail=60", "--prefix", "--ignore-errors"),
        ):
            print(cluster.kubectl(*command))
    cluster.run("kubectl", "delete", "namespace", cluster.namespace, "--ignore-not-found", "--wait=false")


def measured_pools(cluster: Cluster) -> set[str]:
    """Return the pools to which Prometheus knows a measured link of this namespace's workers."""
    links = Prometheus(cluster).query(f'{metrics.LINK_BANDWIDTH}{{namespace="{cluster.namespace}"}}')
    return {link["metric"][metrics.LABEL_PEER_POOL] for link in links if float(link["value"][1]) > 0}


@pytest.mark.thorough
def test_a_model_that_fits_no_worker_trains_on_three(train: Any) -> None:
    """44 layers take 550 MB of training state; no worker has that. Nobody runs out of memory."""
    training: Training = train(blocks=44)
    plan = training.wait_plan()
    (member,) = plan.members
    assert member.layout.kind is LayoutKind.PIPELINE
    assert len({plan.pool_of(rank) for rank in plan.ranks}) == member.layout.stages
    training.wait_steps(10, timeout_s=240)
    status = training.job.status()
    assert status["plan"]["layout"].startswith("1 member: [")
    assert training.job.is_true("LayoutPlanned")
    assert status["restarts"] == 0, status.get("lastFailure")


@pytest.mark.thorough
def test_a_model_that_fits_no_worker_is_divided_by_memory(train: Any) -> None:
    """60 layers take 750 MB, and equal parts do not fit v100 and t4. Nobody runs out of memory."""
    training: Training = train(blocks=60, parallelism={"mode": "ShardedAcrossWorkers"})
    plan = training.wait_plan()
    (member,) = plan.members
    assert member.layout.kind is LayoutKind.SHARDED
    parts = {plan.pool_of(rank): member.layout.state_weights[rank.shard] for rank in plan.ranks}
    assert parts["a100"] > max(parts["v100"], parts["t4"])
    training.wait_steps(10, timeout_s=240)
    assert "of all units" in training.job.status()["plan"]["layout"]
    assert training.job.status()["restarts"] == 0, training.job.status().get("lastFailure")
    # The parts of units are messages that are large enough to show the bandwidth between all three.
    wait_for(lambda: measured_pools(training.job.cluster) == parts.keys(), "measured links", timeout_s=120)


def test_a_whole_member_goes_on_when_a_stage_of_another_one_is_killed(train: Any) -> None:
    """26 layers take 330 MB: a100 holds them alone, v100 and t4 only together. Two members can have no other shapes."""
    training: Training = train(blocks=26, members=2)
    plan = training.wait_plan(members=2)
    assert sorted(member.layout.kind.value for member in plan.members) == ["Pipeline", "Replicated"]
    training.wait_steps(10, timeout_s=240)
    stage = next(rank for rank in plan.ranks if rank.stage == 1)
    spot_node.kill(training.job, stage.worker)
    training.wait_steps(training.steps + 5, timeout_s=240)
    again = training.wait_plan(after=plan.generation, members=2)
    assert sorted(member.layout.kind.value for member in again.members) == ["Pipeline", "Replicated"]
    training.wait_steps(training.steps + 5, timeout_s=240)
