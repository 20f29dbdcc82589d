"""A job's life without faults: it learns its shares, succeeds, can be suspended, and leaves nothing behind."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from heterotrain_client import HeteroTrainClient
from heterotrain_core.contract import keys
from lab.cluster import wait_for

if TYPE_CHECKING:
    from conftest import Running, Start
    from heterotrain_core.contract.plan import Plan


@pytest.mark.thorough
def test_a_job_learns_its_shares_and_succeeds(start: Start) -> None:
    """Three pools that wait for each sample, 4 : 2 : 1, end with shares in this order, and no sample is lost."""
    running = start(paces_s={"a100": 0.008, "v100": 0.016, "t4": 0.032})
    running.job.wait_members(3, timeout_s=180)
    running.wait_succeeded()

    plan = running.job.plan()
    assert plan is not None
    shares = {member.pool: member.share_samples for member in plan.members}
    assert shares["a100"] > shares["v100"] > shares["t4"], f"learned shares {shares}"
    assert sum(shares.values()) == plan.global_batch_samples
    assert plan.prediction is not None
    status = running.job.status()
    assert running.job.read()["metadata"]["generation"] == status["observedGeneration"]
    assert status["restarts"] == 0
    assert status["disruptions"] == 0


def test_a_suspended_job_gives_its_nodes_back_and_resumes(start: Start) -> None:
    """Suspending removes every pod and keeps a checkpoint; resuming continues from it with the next samples.

    The status has the checkpoint that the workers write when they are told to leave, as their folder has it.
    Before that, a checkpoint is asked for and awaited.
    """
    running = start(epochs=None)
    running.wait_steps(running.epoch_samples // 112 + 3)  # into the second epoch
    running.job.wait_true("Running", timeout_s=120)
    cluster = running.job.cluster
    client = HeteroTrainClient(namespace=cluster.namespace, kubeconfig=cluster.environment["KUBECONFIG"])
    saved = client.job(running.job.name).checkpoint(timeout_s=120)
    assert saved.step > 0
    running.wait_steps(running.steps() + 3)  # beyond that checkpoint
    running.job.cluster.kubectl(
        "patch", keys.PLURAL, running.job.name, "--type=merge", "-p", '{"spec":{"suspend":true}}'
    )
    running.job.wait_true("Suspended", timeout_s=120)
    wait_for(lambda: not running.job.pods(), "the suspended job's pods to be gone", timeout_s=120)
    before = running.steps()
    stopped = newest_step(running)
    wait_for(
        lambda: (running.job.status().get("lastCheckpoint") or {}).get("step") == stopped,
        f"the checkpoint of step {stopped} in the suspended job's status",
        timeout_s=60,
    )
    assert stopped > saved.step
    running.job.cluster.kubectl(
        "patch", keys.PLURAL, running.job.name, "--type=merge", "-p", '{"spec":{"suspend":false}}'
    )
    running.wait_steps(before + 1)
    running.stop()
    assert not running.job.is_true("Suspended")


@pytest.mark.thorough
def test_jobs_in_two_namespaces_are_independent_of_each_other_and_of_a_crashing_job(start: Start) -> None:
    """Jobs of the same name train in parallel while a third job crashes again and again.

    One of them has no room for a checkpoint: it trains to its end, and says what is missing.
    """
    broken = start("broken", namespace="-a", arguments=["--no-such-option"], spec={"backoffLimit": 2})
    one = start("job", namespace="-a", paces_s={}, epochs=2)
    other = start("job", namespace="-b", paces_s={}, epochs=2, disk="64Ki")
    one.wait_succeeded()
    other.wait_succeeded()
    assert "No space left on device" in other.job.condition("Succeeded")["message"]
    assert other.job.status()["restarts"] == 0
    broken.job.wait_true("Failed", timeout_s=240)
    failed = broken.job.condition("Failed")
    assert failed["reason"] == "BackoffLimitExceeded"
    assert broken.job.status()["disruptions"] == 0


def newest_step(running: Running) -> int:
    """Return the step of the newest checkpoint in the job's folder."""
    manifests = [path for path in running.folder.rglob("checkpoint-*.json") if "-p" not in path.name]
    return max(int(json.loads(path.read_text())["step"]) for path in manifests)


def planned(running: Running) -> Plan:
    """Return a job's last plan."""
    plan = running.job.plan()
    assert plan is not None
    return plan
